"""A rank, run as a program, whose peer is killed: adds up until something is wrong, and says how it went.

    python -m tests.doubles.fake_nccl.survivor LIBRARY UNIQUE_ID RANK SIZE

It prints "joined" before the first sum, and how that went where it does not come to one. Where the double reports lost
peers, the survivors shrink and add once more; else a watchdog aborts after half a second in which nothing moved.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tests.doubles.fake_nccl.abi import INT64, SUM
from tests.doubles.fake_nccl.library import FakeNccl, FakeNcclError

PATIENCE_S = 0.5  # where nobody reports the loss
LONGEST_LIFE_S = 90
COUNT = 30_000  # several times what a ring holds


def possessions() -> tuple[int, ...]:
    """What this process could leave behind: shared memory that it maps, descriptors, threads."""
    maps = Path("/proc/self/maps").read_text().count("memfd:fake_nccl")
    return maps, *(sum(1 for _ in Path("/proc/self", each).iterdir()) for each in ("fd", "task"))


def comes_back_to(before: tuple[int, ...]) -> bool:
    """Whether this process soon has no more than before; threads of streams end by themselves, older ones too."""
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(possessions(), before, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Rank:
    def __init__(self, library: FakeNccl, communicator: int, patience_s: float) -> None:
        self._patience_s = patience_s
        self._library, self._communicator = library, communicator
        self._stream = library.new_stream()
        self._source, self._target = (ctypes.c_int64 * COUNT)(*([1] * COUNT)), (ctypes.c_int64 * COUNT)()

    def add(self) -> bool:
        """One sum over all ranks; False where it does not come to its end."""
        source, target = ctypes.addressof(self._source), ctypes.addressof(self._target)
        place = self._communicator, self._stream.handle
        if self._library.result("ncclAllReduce", source, target, COUNT, INT64, SUM, *place) != "ncclSuccess":
            return False
        deadline = time.monotonic() + self._patience_s
        while not self._stream.is_idle():
            if self._library.state(self._communicator) != "ncclSuccess" or time.monotonic() > deadline:
                return False
            time.sleep(0)
        return True

    def value(self) -> int:
        return self._target[COUNT - 1]

    def abort(self) -> None:
        aborting = threading.Thread(target=self._library, args=("ncclCommAbort", self._communicator))
        aborting.start()
        self._stream.synchronize()
        aborting.join()
        self._stream.destroy()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(path: str, unique_id: str, rank: int, size: int) -> None:
    signal.alarm(LONGEST_LIFE_S)  # whatever becomes of the test
    library = FakeNccl(Path(path))
    before = possessions()
    try:
        communicator = library.init(size, bytes.fromhex(unique_id), rank)
    except FakeNcclError as error:
        say(json.dumps([error.result, library.last_error(), 0, comes_back_to(before)]))
        return
    say("joined")
    is_told = os.environ["FAKE_NCCL_PEER_LOSS"] == "error"
    here = Rank(library, communicator, LONGEST_LIFE_S if is_told else PATIENCE_S)
    while here.add():
        assert here.value() == size
    state, text, shrunk_sum = library.state(communicator), library.last_error(), 0
    if state == "ncclRemoteError":
        excluded = (ctypes.c_int * 1)(size - 1)
        smaller = library.pointer("ncclCommShrink", communicator, excluded, 1, None, 1, at=3)
        again = Rank(library, smaller, LONGEST_LIFE_S)
        assert again.add()
        shrunk_sum = again.value()
        again.abort()
    here.abort()
    say(json.dumps([state, text, shrunk_sum, comes_back_to(before)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
