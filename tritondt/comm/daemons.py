"""Threads that the end of the process may find within a call of C++: in the store of a silent host, or in NCCL."""

import threading
from collections.abc import Callable

from tritondt._C import stay_at_exit
from tritondt.errors import WorldError


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
