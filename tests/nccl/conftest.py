"""Ranks over the double of NCCL, and on a GPU where there is one: one and two of them, started once."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.gloo_ranks import GlooRanks
from tests.nccl.devices import start, why_not


class Setting(NamedTuple):
    """Ranks, and where they are: "host" or "gpu"."""

    where: str
    ranks: GlooRanks


# On a machine without a GPU those on it are skipped by their mark.
SETTINGS = [
    pytest.param(("host", 1), id="host-1"),
    pytest.param(("host", 2), id="host-2"),
    pytest.param(("gpu", 1), id="gpu-1", marks=pytest.mark.gpu),
    pytest.param(("gpu", 2), id="gpu-2", marks=pytest.mark.gpu),
]
GPUS = SETTINGS[2:]


@pytest.fixture(scope="session")
def setting_of() -> Iterator[Callable[[str, int], Setting]]:
    """So many ranks there; skips where something is missing."""
    started: dict[tuple[str, int], GlooRanks] = {}

    def find(where: str, size: int) -> Setting:
        reason = why_not(where, size)
        if reason is not None:
            pytest.skip(reason)
        if (where, size) not in started or not started[where, size].pids:  # a test that hangs kills them
            started[where, size] = start(where, size, TRITONDT_TIMEOUT="60")
        return Setting(where, started[where, size])

    yield find
    for ranks in started.values():
        ranks.close()


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest, setting_of: Callable[[str, int], Setting]) -> Setting:
    return setting_of(*request.param)
