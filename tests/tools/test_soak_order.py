"""The order of a soak's tests: random, and first what takes longer than a soak waits for its last test."""

from typing import Any

import pytest

from tests.tools import soak_order
from tests.tools.soak import GRACE_S


class Test:
    """A test with a limit of its own, or with that of all."""

    __test__ = False

    def __init__(self, number: int, limit_s: float | None) -> None:
        self.number = number
        self._mark = None if limit_s is None else pytest.mark.timeout(limit_s).mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """The mark of that name."""
        return self._mark if name == "timeout" else None


def test_what_may_take_longer_than_the_grace_begins_first():
    assert soak_order.LONG_S == GRACE_S
    items: list[Any] = [Test(number, limit_s) for number, limit_s in enumerate([None] * 30 + [600, 3600, 1200])]
    soak_order.pytest_collection_modifyitems(items)
    assert {item.number for item in items[:2]} == {31, 32}
    rest = [item.number for item in items[2:]]
    assert sorted(rest) == list(range(31))
    assert rest != sorted(rest)
