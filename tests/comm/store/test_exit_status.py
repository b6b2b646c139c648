"""The exit status of a rank that hangs in a store which goes on while the rank ends."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

_HOLDER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
# The call that hangs is answered when the holder goes on: when the interpreter of the rank has begun to end, and `last`
# goes with the names of the module.
_RANK = """
import os, signal, sys, time, torch.distributed as dist
import __main__
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost

store, holder = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), int(sys.argv[2])
client = StoreClient(store, StoreHost(store))
client.call(lambda store: store.set("there", "yes"))

class Last:
    def __del__(self, kill=os.kill, holder=holder, goes_on=signal.SIGCONT, sleep=time.sleep):
        kill(holder, goes_on)
        sleep(1.0)

kept = [client, __main__]
last = Last()
os.kill(holder, signal.SIGSTOP)
while True:  # the signal may take a moment
    client.call(lambda store: (store.get("there"), kept))
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as found:
        yield found
        found.kill()


@pytest.mark.extended
def test_it_is_that_of_its_exception(holder: subprocess.Popen[str]) -> None:
    assert holder.stdout is not None
    port = holder.stdout.readline().strip()
    command = [sys.executable, "-c", _RANK, port, str(holder.pid)]
    rank = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
    holder.send_signal(signal.SIGCONT)  # where the rank did not come so far
    assert "SilentStoreError: the store at 127.0.0.1:" in rank.stderr
    assert "terminate" not in rank.stderr
    assert rank.returncode == 1
