"""Threads that the end of the process may find within a call of C++: in the store of a silent host, or in NCCL."""

import threading
from collections.abc import Callable

from tritondt._C import stay_at_exit


def start_daemon(run: Callable[[], object], name: str) -> threading.Thread:
    """A thread that runs `run`, and ends with the process, which keeps its exit status wherever the thread is."""

    def run_to_the_end() -> None:
        stay_at_exit()
        run()

    thread = threading.Thread(target=run_to_the_end, name=name, daemon=True)
    thread.start()
    return thread
