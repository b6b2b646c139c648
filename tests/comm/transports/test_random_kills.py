"""A rank that shares memory is killed at random moments: the others are told, keep nothing of it, and train on."""

import pytest

from tests.harness.killed.at_random import VICTIM, RandomKills


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(1, 10, marks=pytest.mark.extended),
        pytest.param(2, 1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_a_rank_is_killed_again_and_again(seed: int, count: int) -> None:
    with RandomKills(seed) as kills:
        for number in range(count):
            for told in kills.kill():
                assert told.kind == "PeerError", f"kill {number}: {told}"
                assert f"rank {VICTIM} closed its connection" in told.text, f"kill {number}: {told}"
                assert told.wrong == "", f"kill {number}: {told}"
                assert told.left == [], f"kill {number}: {told}"
