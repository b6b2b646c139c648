"""A plugin of pytest: tests in random order until a time, both from TRITONDT_SOAK (`seed:time`).

Tests whose own limit is above LONG_S come first, in random order, too: 1,000 kills take 10 minutes of two free cores
and 30 of busy ones, and begun as the last they would end beyond the time that `tests.tools.soak` gives.
"""

import os
import random
import time

import pytest

# Limits in seconds up to which a test may be the last: the grace of `tests.tools.soak`.
LONG_S = 600
_SEED, _, _UNTIL = os.environ.get("TRITONDT_SOAK", "0:inf").partition(":")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffles what is left to run: a run that is cut short meets other tests each time."""
    random.Random(int(_SEED)).shuffle(items)
    items.sort(key=lambda item: _limit_s(item) <= LONG_S)


def _limit_s(item: pytest.Item) -> float:
    """The limit that a test asks for; 0 where it has that of all."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leaves out what would begin after the time: who says that a test was run has run it."""
    return True if time.time() > float(_UNTIL) else None
