"""Builds `recording_nccl`, the stand-in for NCCL that writes calls down, and tells it what to do."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tritondt._C import NcclLibrary

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[2]
NEWEST = 23203

INTERNAL_ERROR = 3
REMOTE_ERROR = 6
UNHANDLED_CUDA_ERROR = 1
INVALID_ARGUMENT = 4

STREAM = 9


def compiled(source, target, *flags):
    """Compiles one file to a shared library, or skips the test where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    command = ["g++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags, source]
    subprocess.run([*command, f"-I{REPOSITORY / 'csrc'}", "-pthread", "-o", target], check=True)
    return target


def build(version=NEWEST, *flags):
    """The path of a recording library that has what NCCL had in a version; kept in build/ for the next session."""
    sources = [FOLDER / "recording_nccl.cpp", FOLDER / "recording.h", REPOSITORY / "csrc" / "nccl" / "types.h"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + repr(flags).encode())
    target = REPOSITORY / "build" / "recording_nccl" / f"recording_nccl_{version}_{digest.hexdigest()[:12]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        compiled(sources[0], unfinished, f"-DRECORDING_VERSION={version}", *flags).rename(target)
    return target


class Recording:
    """A recording library as the binding has it, and as the test that drives it."""

    def __init__(self, path):
        self.nccl = NcclLibrary(str(path))
        self._c = ctypes.CDLL(str(path))
        self._c.recording_take.restype = ctypes.c_char_p
        self.reset()

    def reset(self):
        """Forgets what was recorded and told."""
        self._c.recording_reset()

    def take(self):
        """The calls since the last time."""
        return self._c.recording_take().decode().splitlines()

    def fail(self, function, result):
        """The next call of a function returns a result."""
        self._c.recording_fail(function.encode(), result)

    def get_stuck_in(self, function):
        """Calls of a function do not return before the communicator is aborted."""
        self._c.recording_get_stuck(function.encode())

    def set_polls(self, count):
        """How often a nonblocking communicator answers that it is at work, after each call."""
        self._c.recording_set_polls(count)

    def set_windows(self, there):
        """Whether there is symmetric memory."""
        self._c.recording_set_windows(int(there))

    def set_state(self, comm, result):
        """What a communicator answers about itself from now on."""
        self._c.recording_set_state(comm, result)

    def init(self, num_ranks=2, rank=0, **options):
        """A communicator, with the record empty."""
        made = self.nccl.init([self.nccl.unique_id()], num_ranks, rank, options)
        assert made.wait(10)
        self.take()
        return made


def started(recording):
    """What was started together, as lists of calls; the stream and the communicator left out."""
    found: list[list[str]] = []
    is_group = False
    for line in recording.take():
        if line == "ncclGroupStart":
            is_group = True
            found.append([])
        elif line == "ncclGroupEnd":
            is_group = False
        else:
            call = line.removesuffix(f" {STREAM} c0")
            assert call != line
            found[-1].append(call) if is_group else found.append([call])
    assert not is_group
    return found


def all_reduce(comm):
    comm.all_reduce(16, 16, 3, "float32", "sum", STREAM)
