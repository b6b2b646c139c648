"""Threads that come back from C++ to an interpreter that is ending: the process keeps its exit status."""

import signal
import subprocess
import sys

import pytest

from tritondt import _C

# The extension alone, without torch. Its thread waits in C++ for bytes that never come, and returns to Python now and
# then for signals. The module holds itself, so that its names go when the interpreter has begun to end: `last`, too,
# which gives the thread the time to ask for the GIL.
_PROGRAM = """
import __main__, ctypes, socket, sys, threading, time
from importlib import machinery, util

loader = machinery.ExtensionFileLoader("_C", sys.argv[1])
_C = util.module_from_spec(util.spec_from_loader("_C", loader))
loader.exec_module(_C)
ours, its = socket.socketpair()
ours.setblocking(False)
group, memory, waits = _C.SocketGroup([-1, ours.fileno()]), ctypes.create_string_buffer(8), threading.Event()
group.start([], [(1, ctypes.addressof(memory), 8)], 1)

def wait():
    if sys.argv[2] == "stays":
        _C.stay_at_exit()
    waits.set()
    while True:
        group.finish()

class Last:
    def __init__(self):
        self._kept = (ours, its, group, memory)
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

threading.Thread(target=wait, daemon=True).start()
waits.wait()
last = Last()
sys.exit(7)
"""


def run(thread: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-c", _PROGRAM, _C.__file__, thread]
    return subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)


def test_a_thread_that_stays_leaves_the_exit_status_alone() -> None:
    done = run("stays")
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 holds such threads itself")
def test_one_that_does_not_ends_the_process_by_its_abort() -> None:
    done = run("returns")
    assert (done.returncode, done.stderr) == (-signal.SIGABRT, "terminate called without an active exception\n")
