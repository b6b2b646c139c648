"""Where a process is that says nothing: the Python stacks of all its threads, which it writes when it is asked.

listen(path)                   # in the process, while all is well
text = stacks_of(pid, path)    # in another
"""

import faulthandler
import os
import signal
import time
from pathlib import Path

# faulthandler writes without the interpreter, in milliseconds; the rest is for a machine that is busy.
_LONGEST_S, _PAUSE_S = 2.0, 0.1


def listen(path: Path) -> None:
    """Lets this process write its stacks to `path` on SIGUSR2, whatever it is doing."""
    written = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)  # and left open: it may be asked at any time
    faulthandler.register(signal.SIGUSR2, written, all_threads=True)


def stacks_of(pid: int, path: Path) -> str:
    """The state of a process that listens, as the system names it, and its stacks; why there are none otherwise."""
    if not path.exists():
        return "it has not come to listen"
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    before = path.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    size, end = before, time.monotonic() + _LONGEST_S
    while time.monotonic() < end:
        time.sleep(_PAUSE_S)
        last, size = size, path.stat().st_size
        if before < last == size:
            return f"in state {state}\n{path.read_text()[before:]}"
    return f"in state {state}, and writes no stacks"
