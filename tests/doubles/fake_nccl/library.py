"""The test double of NCCL, built and called from Python: no torch, no binding of ours.

    nccl = FakeNccl(build())
    stream = nccl.new_stream()
    nccl("ncclAllReduce", source, target, count, FLOAT32, SUM, communicator, stream.handle)

Pointers and handles are plain numbers, as torch's and the binding's are.
"""

import ctypes
import fcntl
import functools
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.doubles.fake_nccl.abi import NEWEST, PARAMETERS, RESULTS, TYPES, Config, UniqueId

REPOSITORY = Path(__file__).parents[3]

_OPERATION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class FakeNcclError(Exception):
    """A call that did not return ncclSuccess; `result` is the name of what it returned."""

    def __init__(self, name: str, result: str, text: str) -> None:
        super().__init__(f"{name}: {result}: {text}")
        self.result = result


def build(version: int = NEWEST) -> Path:
    """The double as a library of a version, built where its sources have changed; one process at a time builds.

    FAKE_NCCL_LIBRARY names one that is there, of the newest version: that with sanitizers (`tests/tools/sanitized.py`).
    """
    if version == NEWEST and "FAKE_NCCL_LIBRARY" in os.environ:
        return Path(os.environ["FAKE_NCCL_LIBRARY"])
    folder = REPOSITORY / "build" / "fake_nccl"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / str(version) / "libnccl.so.2"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "--silent", "--jobs", "2", "--file", str(Path(__file__).parent / "Makefile"), str(library)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise RuntimeError(f"the test double of NCCL was not built:\n{built.stdout}{built.stderr}")
    return library


@functools.cache
def load(path: Path) -> "FakeNccl":
    """The library at a path, one object for a process."""
    return FakeNccl(path)


class FakeNccl:
    """The functions of a built double; a call that fails raises FakeNcclError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._operations: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        # One function for all: it says by number which operation is to run, and forgets it.
        self._run = _OPERATION(lambda number: self._operations.pop(number)())
        for name, parameters in PARAMETERS.items():
            if name in self:
                getattr(self._library, name).argtypes = [TYPES[letter] for letter in parameters]
        self._library.ncclGetLastError.argtypes = [ctypes.c_void_p]
        self._library.ncclGetLastError.restype = ctypes.c_char_p
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def __contains__(self, name: str) -> bool:
        return hasattr(self._library, name)

    def result(self, name: str, *arguments: Any) -> str:
        """The name of what the function returned."""
        return RESULTS[getattr(self._library, name)(*arguments)]

    def __call__(self, name: str, *arguments: Any) -> None:
        result = self.result(name, *arguments)
        if result != "ncclSuccess":
            raise FakeNcclError(name, result, self.last_error())

    def last_error(self) -> str:
        return str(self._library.ncclGetLastError(None), "utf-8")

    def error_string(self, result: int) -> str:
        return str(self._library.ncclGetErrorString(result), "utf-8")

    def number(self, name: str, *arguments: Any) -> int:
        """What the function wrote through a last pointer to an int."""
        found = ctypes.c_int()
        self(name, *arguments, ctypes.byref(found))
        return found.value

    def pointer(self, name: str, *arguments: Any, at: int = 0) -> int:
        """What the function wrote through a pointer to a pointer that stands `at` this place; 0 for null."""
        found = ctypes.c_void_p()
        self(name, *arguments[:at], ctypes.byref(found), *arguments[at:])
        return found.value or 0

    def set(self, **settings: object) -> None:
        """Settings of this process, by the names of environment variables."""
        for name, value in settings.items():
            self("fakeSet", name.encode(), str(value).encode())

    def version(self) -> int:
        return self.number("ncclGetVersion")

    def unique_id(self) -> bytes:
        made = UniqueId()
        self("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def init(self, num_ranks: int, unique_id: bytes, rank: int, config: Config | None = None) -> int:
        """A communicator; one that does not block may be in progress."""
        made = ctypes.c_void_p()
        pointer = None if config is None else ctypes.byref(config)
        given = UniqueId.from_buffer_copy(unique_id)
        result = self.result("ncclCommInitRankConfig", ctypes.byref(made), num_ranks, given, rank, pointer)
        if result not in ("ncclSuccess", "ncclInProgress"):
            raise FakeNcclError("ncclCommInitRankConfig", result, self.last_error())
        return made.value or 0

    def state(self, communicator: int) -> str:
        """What ncclCommGetAsyncError says."""
        return RESULTS[self.number("ncclCommGetAsyncError", communicator)]

    def wait_for_joined(self, unique_id: bytes, count: int) -> None:
        """Until so many ranks have joined, of more that are to."""
        given, deadline = UniqueId.from_buffer_copy(unique_id), time.monotonic() + 60
        while self.number("fakeCountJoined", ctypes.byref(given)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} ranks have not joined within a minute")
            time.sleep(0.001)

    def counts(self) -> tuple[int, ...]:
        """How many communicators, streams, events and allocations there are."""
        found = [ctypes.c_int() for _ in range(4)]
        self("fakeCountObjects", *map(ctypes.byref, found))
        return tuple(each.value for each in found)

    def new_stream(self) -> "HostStream":
        return HostStream(self, self.pointer("fakeStreamCreate"))

    def new_event(self) -> "HostEvent":
        return HostEvent(self, self.pointer("fakeEventCreate"))

    def launch(self, stream: int, operation: Callable[[], object]) -> None:
        """Runs a function of Python in a stream; what it raises goes to sys.unraisablehook."""
        number = next(self._numbers)
        self._operations[number] = operation
        self("fakeStreamLaunch", stream, self._run, number)


class HostStream:
    """A stream of the double, on the device that was the thread's when it was made."""

    def __init__(self, library: FakeNccl, handle: int) -> None:
        self._library = library
        self.handle = handle

    @property
    def device(self) -> int:
        return self._library.number("fakeStreamDevice", self.handle)

    def launch(self, operation: Callable[[], object]) -> None:
        self._library.launch(self.handle, operation)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._library("fakeStreamCopy", self.handle, target, source, num_bytes)

    def wait(self, event: "HostEvent") -> None:
        self._library("fakeStreamWaitEvent", self.handle, event.handle)

    def is_idle(self) -> bool:
        return self._library.result("fakeStreamQuery", self.handle) == "ncclSuccess"

    def synchronize(self) -> None:
        self._library("fakeStreamSynchronize", self.handle)

    def destroy(self) -> None:
        self._library("fakeStreamDestroy", self.handle)


class HostEvent:
    """An event of the double."""

    def __init__(self, library: FakeNccl, handle: int) -> None:
        self._library = library
        self.handle = handle

    def record(self, stream: HostStream) -> None:
        self._library("fakeEventRecord", self.handle, stream.handle)

    def is_over(self) -> bool:
        return self._library.result("fakeEventQuery", self.handle) == "ncclSuccess"

    def synchronize(self) -> None:
        self._library("fakeEventSynchronize", self.handle)

    def destroy(self) -> None:
        self._library("fakeEventDestroy", self.handle)


class Gate:
    """Holds streams up until it is opened, or a minute has passed."""

    def __init__(self, *streams: HostStream) -> None:
        self._opened = threading.Event()
        for stream in streams:
            stream.launch(lambda: self._opened.wait(60))

    def open(self) -> None:
        self._opened.set()
