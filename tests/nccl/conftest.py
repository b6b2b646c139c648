"""Ranks over the double of NCCL, and on a GPU where there is one: one and two of them, started once."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.harness.gloo_ranks import GlooRanks
from tests.nccl.devices import start, why_not


class Setting(NamedTuple):
    """Ranks, and where they are: "host" or "gpu"."""

    where: str
    ranks: GlooRanks

    def alike(self, **variables: str) -> GlooRanks:
        """As many more there, with other environment variables."""
        return start(self.where, self.ranks.size, **variables)


SettingOf = Callable[[str, int], Setting]

# On a machine without a GPU those on it are skipped by their mark.
SETTINGS = [
    pytest.param("host", 1, id="host-1"),
    pytest.param("host", 2, id="host-2"),
    pytest.param("gpu", 1, id="gpu-1", marks=pytest.mark.gpu),
    pytest.param("gpu", 2, id="gpu-2", marks=pytest.mark.gpu),
]
GPUS = SETTINGS[2:]


@pytest.fixture(scope="session")
def setting_of(kept_ranks: list[GlooRanks]) -> SettingOf:
    """So many ranks there; skips where something is missing."""
    started: dict[tuple[str, int], GlooRanks] = {}

    def find(where: str, size: int) -> Setting:
        reason = why_not(where, size)
        if reason is not None:
            pytest.skip(reason)
        if (where, size) not in started or not started[where, size].pids:  # a test that hangs kills them
            started[where, size] = start(where, size, TRITONDT_TIMEOUT="60")
            kept_ranks.append(started[where, size])
        return Setting(where, started[where, size])

    return find


@pytest.fixture
def setting(where: str, size: int, setting_of: SettingOf) -> Setting:
    """The ranks of a test that runs everywhere."""
    return setting_of(where, size)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Everywhere is every setting."""
    if "setting" in metafunc.fixturenames:
        metafunc.parametrize(("where", "size"), SETTINGS)
