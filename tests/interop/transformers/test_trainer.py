"""Trainer of transformers on four ranks, with tensor-parallel groups of four and of two, trains as one process does."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch.testing import assert_close

REPOSITORY = Path(__file__).parents[3]
PROGRAM = "tests.interop.transformers.trainer_program"


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    folder.mkdir()
    variables = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    try:
        printed, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, printed


def seen(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"rank-{rank}.json").read_text())


@pytest.mark.extended
def test_groups_get_one_batch_and_train_as_one_process(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", PROGRAM)
    processes = [start(alone, PROGRAM, str(alone), "1"), start(together, *launch, str(together), "1", "2")]
    for process in processes:
        end(process)
    expected = seen(alone / "1", 0)
    weights = dict(transformers.LlamaForCausalLM.from_pretrained(alone / "1" / "saved").state_dict())
    for num_groups in (1, 2):
        folder = together / str(num_groups)
        size = 4 // num_groups
        ranks = [seen(folder, rank) for rank in range(4)]
        for rank in range(4):
            assert ranks[rank]["batches"] == ranks[rank // size * size]["batches"], "a group has one batch"
            for what in ("losses", "evaluated"):
                assert_close(ranks[rank][what], expected[what], rtol=1e-4, atol=1e-5)
        groups = zip(*[ranks[group * size]["batches"] for group in range(num_groups)], strict=True)
        assert [list(itertools.chain(*step)) for step in groups] == expected["batches"], (
            "groups share out the batch of one process"
        )
        trained = dict(transformers.LlamaForCausalLM.from_pretrained(folder / "saved").state_dict())
        assert_close(trained, weights, rtol=1e-3, atol=1e-4)
