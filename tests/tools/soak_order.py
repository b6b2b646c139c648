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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what would begin after the time."""
    if time.time() > float(_UNTIL):
        pytest.skip("the time is over")
