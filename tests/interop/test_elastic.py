"""Training that is killed goes on from its last checkpoint: bit for bit on as many ranks, within rounding on others."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.testing import assert_close

from tests.harness.ports import free_port
from tritondt.interop import saves

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "examples" / "elastic.py"
# One of a step's exchanges, behind the first checkpoint and between two.
KILLED_AT = 25
# One of the optimizer's steps, behind the second checkpoint.
KILLED_BEHIND_STEP = 12
# One behind the first checkpoint and before the second; from there on, the same again.
MACHINES_CHANGE_BEHIND = 7


def variables() -> dict[str, str]:
    """Environment of a program that trains."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def run(*command: str, folder: Path, timeout_s: float = 250) -> str:
    found = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=variables(),
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
        ("ended before", "unbroken", 2, 0),
    )
    for name, num_ranks in goes_on.items():
        printed = (tmp_path / name / "rank-0.txt").read_text()
        assert re.search(rf"steps (5|10|15) to 20 on {num_ranks} ranks", printed), printed
    assert "steps 20 to 20 on 2 ranks, trained before" in (tmp_path / "ended before" / "rank-0.txt").read_text()
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


@pytest.mark.soak
def test_training_goes_on_with_a_machine_more_and_with_one_less(tmp_path: Path) -> None:
    """Under one torchrun with --nnodes 1:2: a second joins, is killed with its rank, and the first goes on alone."""
    runs(tmp_path, ("unbroken", "", 2, 0))
    elastic = tmp_path / "elastic"
    elastic.mkdir()
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "changes"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", *meeting]
    program = ["-m", "tests.harness.killed.machine", str(PROGRAM), str(MACHINES_CHANGE_BEHIND)]
    command = [*launch, "--rdzv-conf", "last_call_timeout=1", "--max-restarts", "3", *program]
    # torch announces the store that agents share in the first round alone, where who joins later does not look.
    environment = variables() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (elastic / "first.txt").open("w") as output:
        first = subprocess.Popen(command, cwd=elastic, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while not saves.found_in(elastic / "checkpoints") and time.monotonic() < deadline:
                time.sleep(0.1)
            second = subprocess.run(
                command, cwd=elastic, env=environment | {"DIES": "1"}, capture_output=True, timeout=120, check=False
            )
            status = first.wait(timeout=240)
        finally:
            first.kill()
    printed = (elastic / "first.txt").read_text()
    assert second.returncode == -signal.SIGKILL, printed + second.stdout.decode() + second.stderr.decode()
    assert status == 0, printed
    # Alone it came to step 7, and waited; two went from 5 to 12, and saved at 10.
    assert "steps 10 to 20 on 1 ranks" in printed, printed
    assert_close(trained(elastic), trained(tmp_path / "unbroken"), rtol=1e-4, atol=1e-5)
