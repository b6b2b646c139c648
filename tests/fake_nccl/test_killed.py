"""Ranks that are killed: what the others see, and that nothing is left of anybody."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fake_nccl.library import load

SIZE = 3


def start(double: Path, unique_id: bytes, rank: int, size: int, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.fake_nccl.survivor", str(double), unique_id.hex(), str(rank), str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def kill_one(double: Path, delay_s: float, **environment: str) -> list[list]:
    """What the survivors say when the last rank is killed in the middle of its sums."""
    unique_id = load(double).unique_id()
    ranks = [start(double, unique_id, rank, SIZE, **environment) for rank in range(SIZE)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "joined\n"
        time.sleep(delay_s)
        ranks[-1].kill()
        said = []
        for rank in ranks[:-1]:
            out, _ = rank.communicate(timeout=20)
            assert rank.returncode == 0
            said.append(json.loads(out))
        return said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("seed", range(3))
def test_survivors_hear_of_a_killed_rank_and_go_on_without_it(double: Path, seed: int) -> None:
    before = shared_files()
    for state, text, shrunk_sum, is_clean in kill_one(
        double, random.Random(seed).uniform(0.01, 0.05), FAKE_NCCL_PEER_LOSS="error"
    ):
        assert (state, shrunk_sum, is_clean) == ("ncclRemoteError", 2, True)
        assert text == "fake NCCL: rank 2 has left, or its process has ended"
    assert shared_files() == before


def test_survivors_wait_for_a_killed_rank_until_they_abort(double: Path) -> None:
    assert [said[0] for said in kill_one(double, 0.02)] == ["ncclSuccess", "ncclSuccess"]
    assert [said[3] for said in kill_one(double, 0.02)] == [True, True]


def test_nothing_is_left_of_ranks_that_are_killed_while_they_join(double: Path) -> None:
    before, unique_id = shared_files(), load(double).unique_id()
    ranks = [start(double, unique_id, rank, SIZE, FAKE_NCCL_PEER_LOSS="error") for rank in range(2)]
    time.sleep(0.3)
    ranks[0].kill()
    assert ranks[1].wait(timeout=20) == 1  # ncclCommInitRankConfig fails there
    for rank in ranks:
        rank.communicate()
    assert shared_files() == before
