"""Signals that end a run, which none of Python's callbacks can swallow.

A signal's handler raises wherever the program is just then. In a destructor, or what a weak reference calls, Python
prints that exception and goes on, and so would the run, for minutes. While ranks are ended it would leave some of them.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """The last error that a handler of SIGINT or SIGTERM has raised."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._is_held = False

    def check(self) -> None:
        """Raises what a handler has raised, which may not have arrived."""
        if self._raised is not None:
            raise self._raised

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which nothing is raised; `check` does it afterwards."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def noting(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        """A handler that remembers what another one raises."""

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                self._raised = error
                if not self._is_held:
                    raise

        return handle


@contextmanager
def noted() -> Iterator[Interrupts]:
    """Context that remembers what handlers of SIGINT and SIGTERM raise; Python has them in the main thread alone."""
    made, before = Interrupts(), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = signal.signal(number, made.noting(handler))
    try:
        yield made
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
