"""Training that is killed goes on from its last checkpoint: bit for bit on as many ranks, within rounding on others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.testing import assert_close

from tritondt.interop import saves

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "examples" / "elastic.py"
# One of a step's exchanges, behind the first checkpoint and between two.
KILLED_AT = 40
# One of the optimizer's steps, behind the second checkpoint.
KILLED_BEHIND_STEP = 12


def run(*command: str, folder: Path, timeout_s: float = 250) -> str:
    variables = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    found = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    printed = [path.read_text() for path in sorted(folder.rglob("rank-*.txt"))]
    assert found.returncode == 0, "\n".join([found.stdout, *printed])
    return found.stdout


def runs(home: Path, *planned: tuple[str, str, int, int]) -> None:
    """Runs the program so often: in a folder, which begins as a copy of another, on ranks, one killed where not 0."""
    listed = [
        [str(home / name), copied_from and str(home / copied_from), num_ranks, killed_at]
        for name, copied_from, num_ranks, killed_at in planned
    ]
    run("tests.harness.elastic_runs", str(PROGRAM), json.dumps(listed), folder=home)


def trained(folder: Path) -> dict[str, Any]:
    """Tensors of the newest checkpoint, whole and plain."""
    newest = saves.found_in(folder / "checkpoints")[-1]
    assert newest.step == 20
    dcp_to_torch_save(folder / "checkpoints" / newest.name, folder / "whole.pt")
    found = torch.load(folder / "whole.pt", weights_only=True)
    return {"model": found["model"], "moments": found["optimizer"]["state"]}


@pytest.mark.extended
def test_a_killed_training_goes_on_with_as_many_ranks_and_with_others(tmp_path: Path) -> None:
    goes_on = {"same": 3, "fewer": 2, "more": 4}
    runs(
        tmp_path,
        ("unbroken", "", 3, 0),
        ("killed", "", 3, KILLED_AT),
        *((name, "killed", num_ranks, 0) for name, num_ranks in goes_on.items()),
    )
    for name, num_ranks in goes_on.items():
        printed = (tmp_path / name / "rank-0.txt").read_text()
        assert re.search(rf"steps (5|10|15) to 20 on {num_ranks} ranks", printed), printed
    expected = trained(tmp_path / "unbroken")
    assert_close(trained(tmp_path / "same"), expected, rtol=0, atol=0)
    for name in ("fewer", "more"):
        assert_close(trained(tmp_path / name), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.extended
def test_torchrun_starts_ranks_again_and_training_goes_on(tmp_path: Path) -> None:
    """Its store outlives the ranks that it ends, and has their addresses still."""
    runs(tmp_path, ("unbroken", "", 2, 0))
    restarted = tmp_path / "restarted"
    restarted.mkdir()
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    killed_once = ("-m", "tests.harness.killed.once", str(PROGRAM), str(KILLED_BEHIND_STEP))
    printed = run(*torchrun, *killed_once, folder=restarted)
    assert "steps 10 to 20 on 2 ranks" in printed, printed
    assert_close(trained(restarted), trained(tmp_path / "unbroken"), rtol=0, atol=0)
