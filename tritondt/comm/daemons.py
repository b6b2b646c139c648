"""Threads that the end of the process may find within a call of C++: in the store of a silent host, or in NCCL."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from tritondt._C import stay_at_exit
from tritondt.errors import WorldError

Result = TypeVar("Result")
# How often whoever waits for a thread looks for a reason to leave it to itself.
_LOOK_S = 0.5


def start_daemon(run: Callable[[], object], name: str) -> threading.Thread:
    """A thread that runs `run`, and ends with the process, which keeps its exit status wherever the thread is.

    WorldError where the system gives the process no more threads.
    """

    def run_to_the_end() -> None:
        stay_at_exit()
        run()

    thread = threading.Thread(target=run_to_the_end, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # of which Python knows no errno
        raise WorldError(
            f"the thread {name} could not be started ({error}): this user has as many processes as `ulimit -u` allows, "
            "or the process as much memory as `ulimit -v` does; raise that limit"
        ) from error
    return thread


def within(
    timeout: timedelta, make: Callable[[], Result], name: str, look: Callable[[], object] = lambda: None
) -> Result:
    """The result of `make`, which runs in a thread that is left to itself where it takes longer than `timeout`.

    TimeoutError then. `look` is called now and then, and may raise what ends the waiting before.
    """
    outcome: list[Result | BaseException] = []

    def run() -> None:
        try:
            outcome.append(make())
        except BaseException as error:  # noqa: BLE001  the caller raises it
            outcome.append(error)

    thread, ends_at = start_daemon(run, name), time.monotonic() + timeout.total_seconds()
    while thread.is_alive() and (left_s := ends_at - time.monotonic()) > 0:
        thread.join(min(left_s, _LOOK_S))
        if thread.is_alive():
            look()
    if not outcome:
        raise TimeoutError
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
