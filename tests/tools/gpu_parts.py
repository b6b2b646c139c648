"""The parts of `make gpu`, in order of value, and those of `make gpu-dry`, which run the same without a GPU."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# A GPU holds the contexts of a few processes beside each other, of half a gigabyte each.
_MOST_WORKERS = 8
# A test that compiles many kernels is longer under way; one that hangs is ended with the process, and told by name.
_HANG_S = 300
_CAN_SHARE = "import sys; from tests.nccl.devices import why_not; sys.exit(why_not('gpu', 2))"
_CAN_ASK = "import sys; from tests.nccl.libraries import why_not_shared; sys.exit(why_not_shared())"
_CAN_UNPACK = (
    "import sys; from tests.tools.gpu_kernels import ARCHIVE;"
    "sys.exit(None if ARCHIVE.exists() else f'{ARCHIVE.name} is missing, which make gpu-kernels writes into build/')"
)
_CAN_INTERPRET = "import numpy"
_CAN_SANITIZE = (
    "import sys; from tests.kernels.test_sanitized import sanitizer;"
    "sys.exit(None if sanitizer() else 'compute-sanitizer, of the CUDA toolkit, is not installed')"
)
# The cases that tell whether packs and unpacks are near a copy: short rows, and one of FSDP2's.
_ROWS = ("--only", "columns * 64", "columns * 256", "gathered bfloat16")


class Part(NamedTuple):
    """A command of at most `limit_s`; after an `essential` one that fails nothing is run.

    Where `can_run` fails the part is skipped, with its last line as the reason. One of `tests` is a run of pytest,
    which notes outcomes as they come and is continued. One that `interprets` runs in Triton's interpreter, which
    imports NumPy, as nothing else here does.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    essential: bool = False
    can_run: tuple[str, ...] = ()
    tests: bool = False
    interprets: bool = False


def parts(python: str) -> tuple[Part, ...]:
    """Parts that need a GPU: the build, those that tell most in six minutes, NCCL's tests, all others, more figures."""
    asked = (_CAN_SHARE, _CAN_ASK, _CAN_SANITIZE, _CAN_UNPACK)
    share, ask, sanitize, unpack = ((python, "-c", each) for each in asked)

    def bench(module: str, name: str, *options: str) -> tuple[str, ...]:
        return (python, "-m", f"benchmarks.{module}", *options, "--json", f"benchmarks/results/{name}.json")

    def tests(*words: str, marks: str = "gpu") -> tuple[str, ...]:
        return (*pytest_command(python), "-m", marks, *words)

    beside = ("--numprocesses", str(_workers()), "--dist", "load") if _workers() > 1 else ()
    return (
        Part("build", (python, "setup.py", "--quiet", "build_ext", "--inplace"), 300, essential=True),
        Part("kernels", (python, "-m", "tests.tools.gpu_kernels", "--unpack"), 60, can_run=unpack),
        Part(
            "tests-simulate",
            tests("tests/nccl/test_operations.py", "-k", "gpu-1 and simulations"),
            60,
            tests=True,
        ),
        Part(
            "bench-rows",
            bench("kernels.copy_boxes_gpu", "copy_rows_gpu", *_ROWS, "--mebibytes", "64", "--rounds", "15"),
            120,
        ),
        Part("bench-host", bench("nccl.host_bursts", "host_bursts_gpu", "--ranks", "2"), 90, can_run=share),
        Part("bench-slots", bench("nccl.slot_launches", "slot_launches_gpu"), 90),
        Part("tests-slots", tests("tests/nccl/test_slots.py", "-k", "gpu-2"), 240, can_run=share, tests=True),
        Part("tests-nccl", tests("tests/nccl", "-k", "gpu-1 or on_gpus"), 600, tests=True),
        Part(
            "tests-nccl-2",
            tests("tests/nccl", "-k", "gpu-2", "--ignore=tests/nccl/test_slots.py"),
            600,
            can_run=share,
            tests=True,
        ),
        Part("bench-own-kernel", bench("nccl.own_kernel", "own_kernel_gpu", "--rounds", "20"), 90, can_run=share),
        Part("bench-window-sum", bench("nccl.window_sum", "window_sum_gpu", "--rounds", "20"), 90, can_run=share),
        Part("libraries", (python, "-m", "tests.nccl.libraries"), 60, can_run=ask),
        Part("tests-kernels", tests("tests/kernels/test_gpu_kernels.py", *beside), 900, tests=True),
        Part("tests-engine", tests("tests/test_gpu.py", *beside), 900, tests=True),
        Part("bench-copies", bench("kernels.copy_boxes_gpu", "copy_boxes_gpu", "--mebibytes", "64"), 120),
        Part("bench-nccl", bench("nccl", "nccl_gpu_1_rank", "--rounds", "20"), 120),
        Part(
            "tests-others",
            tests("tests", *(f"--ignore=tests/{name}" for name in ("nccl", "kernels", "test_gpu.py"))),
            600,
            tests=True,
        ),
        Part("memcheck", tests("tests/kernels/test_sanitized.py", "-k", "memcheck"), 600, can_run=sanitize, tests=True),
        Part(
            "racecheck", tests("tests/kernels/test_sanitized.py", "-k", "racecheck"), 600, can_run=sanitize, tests=True
        ),
    )


def dry_parts(python: str, *, short: bool) -> tuple[Part, ...]:
    """The same flow on the CPU: Triton interpreted, the double of NCCL, and few cases of each; a `short` form of it.

    Limits are such that only what hangs meets them, though other programs have most of the machine.
    """
    command = pytest_command(python)
    collect = (*command[:-2], "--collect-only", "-q", "-m", "gpu", "tests")
    host = (*command, "tests/nccl/test_operations.py", "-k")
    kernels = (*command, "-m", "gpu", "tests/kernels/test_gpu_kernels.py")
    bench = (python, "-m", "benchmarks.kernels.copy_boxes_gpu", "--dry", "--mebibytes", "0.04", "--rounds", "1")
    nccl = (python, "-m", "benchmarks.nccl", "--double", "--rounds", "1", "--bytes", "64")
    bursts = (python, "-m", "benchmarks.nccl.host_bursts")
    own = (
        python,
        "-m",
        "benchmarks.nccl.own_kernel",
        "--double",
        "--rounds",
        "1",
        "--rows",
        "9",
        "--inner",
        "8",
        "--columns",
        "16",
    )
    summed = (python, "-m", "benchmarks.nccl.window_sum", "--double", "--rounds", "1", "--elements", "64")
    slots = (python, "-m", "benchmarks.nccl.slot_launches", "--dry", "--rounds", "1", "--ranks", "2")
    interpret = (python, "-c", _CAN_INTERPRET)
    build = Part("build", (python, "setup.py", "--quiet", "build_ext", "--inplace"), 300, essential=True)
    if short:
        return (build, Part("collect", collect, 240), Part("bench-nccl", (*nccl, "--only", "all_reduce*"), 120))
    return (
        build,
        Part("collect", collect, 240),
        Part("tests-simulate", (*host, "host-1 and simulations"), 240, tests=True),
        Part("bench-rows", (*bench, *_ROWS), 240, can_run=interpret, interprets=True),
        Part("bench-host", (*bursts, "--double", "--rounds", "1"), 120),
        Part("bench-slots", (*slots, "--rows", "8", "--columns", "8"), 240, can_run=interpret, interprets=True),
        Part("tests-nccl", (*host, "host-1"), 240, tests=True),
        Part("bench-own-kernel", own, 240, can_run=interpret, interprets=True),
        Part("bench-window-sum", summed, 240, can_run=interpret, interprets=True),
        Part("libraries", (python, "-m", "tests.nccl.libraries"), 60, can_run=(python, "-c", _CAN_ASK)),
        Part(
            "tests-kernels",
            (*kernels, "-k", "float32-sum-3 or wide1-fp80 or test_random_casts and source0-target0"),
            240,
            can_run=interpret,
            tests=True,
            interprets=True,
        ),
        Part(
            "tests-engine",
            (*command, "-m", "gpu", "tests/test_gpu.py", "-k", "distributing or of_another_dtype and S0-S1"),
            240,
            can_run=interpret,
            tests=True,
            interprets=True,
        ),
        Part("bench-nccl", (*nccl, "--only", "all_reduce*"), 120),
    )


def pytest_command(python: str) -> tuple[str, ...]:
    """pytest, which ends a process whose test hangs; pytest-timeout cannot where the hang is within a C function.

    pytest-benchmark, where a machine has it, warns of tests side by side, and a warning is an error here.
    """
    ends = ("-o", f"faulthandler_timeout={_HANG_S}", "-o", "faulthandler_exit_on_timeout=true")
    return (python, "-m", "pytest", "-q", "-rs", *ends, "-p", "no:benchmark", "-p", "tests.tools.gpu_progress")


def environment(folder: str, given: Mapping[str, str], *, dry: bool) -> dict[str, str]:
    """The variables of all parts: Triton's cache is kept, so that a second call compiles nothing again."""
    found = {"TRITON_CACHE_DIR": str(Path(folder) / "triton"), **given}
    return found | ({"TRITONDT_GPU_DRY": "1", "CUDA_VISIBLE_DEVICES": ""} if dry else {})


def interpreting(folder: str, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a part that interprets: NumPy is beside the environment that has torch, Triton and pytest."""
    before = given.get("PYTHONPATH", "")
    return {**given, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(Path(folder) / "numpy"), before])}


def _workers() -> int:
    """Processes that run tests side by side; one without pytest-xdist."""
    if importlib.util.find_spec("xdist") is None:
        return 1
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
