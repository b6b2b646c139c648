"""Ranks that are killed: what the others see, and that nothing is left of anybody."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.doubles.fake_nccl.library import FakeNccl, FakeNcclError, load

SIZE = 3


@contextmanager
def started(
    double: Path, unique_id: bytes, num_started: int, peer_loss: str, **of_last: int
) -> Iterator[list[subprocess.Popen]]:
    """The first of three survivors, as processes that do not outlive the block; settings of the last one."""
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.doubles.fake_nccl.survivor",
                str(double),
                unique_id.hex(),
                str(rank),
                str(SIZE),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "FAKE_NCCL_PEER_LOSS": peer_loss,
                **{name: str(value) for name, value in of_last.items() if rank == num_started - 1},
            },
        )
        for rank in range(num_started)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def kill_one(double: Path, delay_s: float, peer_loss: str) -> list[list]:
    """What the survivors say when the last rank is killed in the middle of its sums."""
    with started(double, load(double).unique_id(), SIZE, peer_loss) as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "joined\n"
        time.sleep(delay_s)
        ranks[-1].kill()
        said = [rank.communicate(timeout=150)[0] for rank in ranks[:-1]]
        assert [rank.returncode for rank in ranks[:-1]] == [0, 0]
        return [json.loads(each) for each in said]


@pytest.mark.parametrize("seed", range(3))
def test_survivors_hear_of_a_killed_rank_and_go_on_without_it(double: Path, seed: int) -> None:
    before = shared_files()
    for state, text, shrunk_sum, is_clean in kill_one(double, random.Random(seed).uniform(0.01, 0.05), "error"):
        assert (state, shrunk_sum, is_clean) == ("ncclRemoteError", 2, True)
        assert text == "fake NCCL: rank 2 has left, or its process has ended"
    assert shared_files() == before


def test_survivors_wait_for_a_killed_rank_until_they_abort(double: Path) -> None:
    assert kill_one(double, 0.02, "wait") == [["ncclSuccess", "", 0, True]] * 2


def test_nothing_is_left_of_ranks_that_are_killed_while_they_join(double: Path) -> None:
    before, unique_id = shared_files(), load(double).unique_id()
    with started(double, unique_id, 2, "error") as ranks:
        load(double).wait_for_joined(unique_id, 2)
        ranks[0].kill()
        said = json.loads(ranks[1].communicate(timeout=150)[0])
    text = "fake NCCL: joining a communicator: rank 0 was lost before all had come"
    assert said == ["ncclRemoteError", text, 0, True]
    assert shared_files() == before


def outcomes(double: Path, step: int) -> list[list[str]]:
    """What the survivors say when the last rank is killed at a step of its own."""
    with started(double, load(double).unique_id(), SIZE, "error", FAKE_NCCL_DIE=step) as ranks:
        said = [rank.communicate(timeout=150)[0].splitlines() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0, -signal.SIGKILL]
    return said[:-1]


# From the moment it is known who joins: five more steps until all know that all have, then one sum after the other.
@pytest.mark.in_ci(21)
@pytest.mark.parametrize("step", [*range(2, 32), *range(35, 300, 23)])
def test_survivors_hear_of_a_rank_that_dies_at_any_step(double: Path, step: int) -> None:
    for *joined, outcome in outcomes(double, step):
        state, text, shrunk_sum, is_clean = json.loads(outcome)
        assert (state, shrunk_sum, is_clean) == ("ncclRemoteError", 2 * len(joined), True)
        if joined:
            assert text == "fake NCCL: rank 2 has left, or its process has ended"
        else:  # who gives up first is lost to the other one
            assert "was lost before all had come" in text or "a rank has given this communicator up" in text


@pytest.mark.extended
def test_survivors_give_up_a_rank_that_dies_before_it_is_known(double: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_JOIN_MS", "5000")
    texts = []
    for (outcome,) in outcomes(double, 1):
        state, text, shrunk_sum, is_clean = json.loads(outcome)
        assert (state, shrunk_sum, is_clean) == ("ncclRemoteError", 0, True)
        texts.append(text)
    assert "fake NCCL: joining a communicator: not all ranks came within 5000 ms" in texts


@pytest.mark.parametrize("peer_loss", ["wait", "error"])
def test_ranks_that_never_come_are_not_waited_for_without_end(double: Path, nccl: FakeNccl, peer_loss: str) -> None:
    nccl.set(FAKE_NCCL_PEER_LOSS=peer_loss, FAKE_NCCL_JOIN_MS=200)
    with pytest.raises(FakeNcclError, match="joining a communicator: not all ranks came within 200 ms") as raised:
        nccl.init(2, nccl.unique_id(), 0)
    assert raised.value.result == "ncclRemoteError"
