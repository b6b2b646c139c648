"""Kernels compiled into Triton's cache before a program needs them, for an architecture whose GPU need not be there."""

import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tritondt.kernels.gpu.cast_boxes import DIVIDES, FLOATS, MULTIPLIES, NO_SCALES, DtypePair
from tritondt.kernels.gpu.copy_boxes import copies
from tritondt.kernels.gpu.device_table import Form, Kernel, compile_form
from tritondt.kernels.gpu.fp8_tables import EXACT_IN_FLOAT32, FP8, scale_finding
from tritondt.kernels.gpu.reduce_slots import reductions
from tritondt.kernels.gpu.specialization import DIMS, POINTERS
from tritondt.kernels.gpu.tuning import DEFAULT, choose
from tritondt.kernels.reduction_dtypes import DTYPES


class Compilation(NamedTuple):
    """A kernel, and a form of it."""

    kernel: Kernel
    form: Form
    num_warps: int


class Architecture:
    """The part of a driver that Triton needs to compile, for a GPU that is not there."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        """The target to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream, on which nothing is launched."""
        return 0


def kernels() -> Iterator[Kernel]:
    """The kernels of all operations."""
    yield copies()
    yield from (reductions(dtype, op) for dtype, found in DTYPES.items() for op in found.ops)
    yield from (DtypePair(*pair).kernel(NO_SCALES) for pair in itertools.permutations(FLOATS, 2))
    for wide, narrow in itertools.product(EXACT_IN_FLOAT32, FP8):
        yield scale_finding(DtypePair(wide, narrow))
        yield DtypePair(wide, narrow).kernel(DIVIDES)
        yield DtypePair(narrow, wide).kernel(MULTIPLIES)


def compilations(device_name: str = DEFAULT) -> list[Compilation]:
    """Compilations for boxes of few dims and tensors: every class of every kernel, as tuned for a device."""
    found = []
    for kernel in kernels():
        choice = choose(device_name, kernel.name, kernel.width, DIMS[0])
        forms = (Form(modes, DIMS[0], POINTERS[0], choice.block) for modes in kernel.modes)
        found += [Compilation(kernel, form, choice.num_warps) for form in forms]
    return found


def compile_all(architecture: int, num_processes: int, device_name: str = DEFAULT) -> int:
    """Compiles all of `compilations` for an architecture such as 90, side by side; their number."""
    count = len(compilations(device_name))
    parts = [(architecture, device_name, start, num_processes) for start in range(num_processes)]
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        compiled = sum(pool.map(_compile_part, parts))
    assert compiled == count, f"{compiled} of {count} kernels were compiled"
    return count


def _compile_part(part: tuple[int, str, int, int]) -> int:
    """Compiles each so many-th kernel, from one on, in a process that has no other use for Triton."""
    architecture, device_name, start, step = part
    stand_in: Any = Architecture(architecture)
    driver.set_active(stand_in)
    chosen = compilations(device_name)[start::step]
    for kernel, form, num_warps in chosen:
        compile_form(kernel, form, num_warps, torch.int64, (1, 1, 1), (1, 1, 1))
    return len(chosen)
