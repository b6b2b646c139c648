"""A plugin of pytest: tests in random order until a time, both from TRITONDT_SOAK (`seed:time`)."""

import os
import random
import time

import pytest

_SEED, _, _UNTIL = os.environ.get("TRITONDT_SOAK", "0:inf").partition(":")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffles what is left to run: a run that is cut short meets other tests each time."""
    random.Random(int(_SEED)).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leaves out what would begin after the time: who says that a test was run has run it."""
    return True if time.time() > float(_UNTIL) else None
