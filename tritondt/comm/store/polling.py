"""Waiting for what other ranks write to the store: often at first, when all come at once, then seldom."""

import time
from collections.abc import Callable

# The first pauses are short, as a look takes 0.1 ms; of 1,000 ranks that wait for a late one, each looks 10 times a
# second.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
# How often a rank looks why others have not come, which takes a call of the store for each of them.
_LOOK_S = 0.5


def _look_nowhere() -> None:
    """Nothing is known of those who are missing."""


def await_others(have_come: Callable[[], bool], deadline: float, look: Callable[[], object] = _look_nowhere) -> bool:
    """Whether `have_come()` has become true by `deadline`, by time.monotonic; it is asked once anyway.

    `look` is called twice a second, and may raise why the others do not come.

    >>> await_others(lambda: True, 0.0), await_others(lambda: False, 0.0)
    (True, False)
    """
    pause, next_look = _FIRST_PAUSE_S, time.monotonic() + _LOOK_S
    while not have_come():
        now = time.monotonic()
        if now >= deadline:
            return False
        if now >= next_look:
            look()
            next_look = time.monotonic() + _LOOK_S
        time.sleep(min(pause, deadline - now))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True
