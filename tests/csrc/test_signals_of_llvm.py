"""SIGUSR1 writes the flight recorder though LLVM, which Triton brings, takes the signal when it first compiles."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tritondt._C import FlightRecorder, Watchdog

_TRITON = find_spec("triton")
if _TRITON is None or _TRITON.origin is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
_LIBRARY = Path(_TRITON.origin).parent / "_C" / "libtriton.so"


class _Action(ctypes.Structure):
    _fields_ = (("handler", ctypes.c_void_p), ("rest", ctypes.c_char * 256))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.signal.restype, _LIBC.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)


def handler_now():
    found = _Action()
    assert _LIBC.sigaction(int(signal.SIGUSR1), None, ctypes.byref(found)) == 0
    return found.handler


@pytest.fixture(scope="module")
def in_llvm():
    """An address in Triton's library, which stands for that of LLVM's handler there: it is never called."""
    return ctypes.cast(ctypes.CDLL(str(_LIBRARY)).PyInit_libtriton, ctypes.c_void_p).value


@pytest.fixture
def watchdog():
    before = handler_now()
    _LIBC.signal(signal.SIGUSR1, None)
    made = Watchdog()
    yield made
    made.close()
    _LIBC.signal(signal.SIGUSR1, before)


def reason_written(path, within_s=60.0):
    end = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written within {within_s} s"
        time.sleep(0.01)
    return json.loads(path.read_text())["reason"]


def test_a_signal_that_llvm_takes_later_is_taken_back(watchdog, in_llvm, tmp_path):
    assert watchdog.dump_on_signal(signal.SIGUSR1, FlightRecorder(0, 2), str(tmp_path / "rank-0.json"))
    ours = _LIBC.signal(signal.SIGUSR1, in_llvm)
    end = time.monotonic() + 60
    while handler_now() == in_llvm and time.monotonic() < end:
        time.sleep(0.01)
    assert handler_now() == ours
    os.kill(os.getpid(), signal.SIGUSR1)
    assert reason_written(tmp_path / "rank-0.json") == "signal"


def test_one_that_llvm_has_already_is_taken_and_given_back(watchdog, in_llvm, tmp_path):
    _LIBC.signal(signal.SIGUSR1, in_llvm)
    assert watchdog.dump_on_signal(signal.SIGUSR1, FlightRecorder(0, 2), str(tmp_path / "rank-0.json"))
    assert handler_now() != in_llvm
    watchdog.close()
    assert handler_now() == in_llvm


def test_one_that_the_program_takes_later_is_left_to_it(watchdog, tmp_path):
    assert watchdog.dump_on_signal(signal.SIGUSR1, FlightRecorder(0, 2), str(tmp_path / "rank-0.json"))
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    taken = handler_now()
    # At every signal that it serves the thread has looked once more at who has them.
    assert watchdog.dump_on_signal(signal.SIGUSR2, FlightRecorder(1, 2), str(tmp_path / "rank-1.json"))
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR2)
        assert reason_written(tmp_path / "rank-1.json") == "signal"
        (tmp_path / "rank-1.json").unlink()
    assert handler_now() == taken
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert seen == [1]


_PROGRAM = """
import os, signal, sys, time
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tritondt._C import FlightRecorder, Watchdog

@triton.jit
def add_one(pointer, LENGTH: tl.constexpr):
    places = pointer + tl.arange(0, LENGTH)
    tl.store(places, tl.load(places) + 1)

def compile():
    source = ASTSource(add_one, {"pointer": "*fp32", "LENGTH": "constexpr"}, constexprs={"LENGTH": 128})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))

def caught():
    mask = int(open("/proc/self/status").read().partition("SigCgt:")[2].split()[0], 16)
    return bool(mask >> (signal.SIGUSR2 - 1) & 1)

watchdog = Watchdog()
assert watchdog.dump_on_signal(signal.SIGUSR1, FlightRecorder(0, 1), sys.argv[1])
assert not caught()
compile()
assert caught(), "LLVM has taken no signals: nothing is tested"
end = time.monotonic() + 60
while not os.path.exists(sys.argv[1]) and time.monotonic() < end:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.05)
watchdog.close()
"""


@pytest.mark.extended
def test_the_record_is_written_after_a_real_compilation(tmp_path):
    program = tmp_path / "program.py"  # Triton reads the source of kernels
    program.write_text(_PROGRAM)
    path = tmp_path / "rank-0.json"
    done = subprocess.run(
        [sys.executable, program, path],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},  # what is found there is not compiled
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert reason_written(path, 0) == "signal"
