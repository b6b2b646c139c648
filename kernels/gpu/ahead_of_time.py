"""Kernels compiled into Triton's cache before a program needs them, for an architecture whose GPU need not be there."""

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tritondt.kernels.gpu.cast_boxes import DIVIDES, FLOATS, MULTIPLIES, NO_SCALES, DtypePair
from tritondt.kernels.gpu.copy_boxes import copies, slot_copies
from tritondt.kernels.gpu.device_table import Form, Kernel, compile_form
from tritondt.kernels.gpu.fp8_tables import EXACT_IN_FLOAT32, FP8, scale_finding
from tritondt.kernels.gpu.reduce_slots import reductions
from tritondt.kernels.gpu.signals import num_lanes
from tritondt.kernels.gpu.specialization import DIMS, POINTERS
from tritondt.kernels.gpu.tuning import DEFAULT, Choice, choose
from tritondt.kernels.reduction_dtypes import DTYPES

_SUMMED_IN_SLOTS = ("float32", "bfloat16")
# Kernels are not compiled for the number of a table's cells.
_ANY_NUMBER = 1


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


def slot_kernels() -> Iterator[Kernel]:
    """The kernels of exchanges through peers' slots: copies, and sums of the dtypes that gradients have."""
    yield slot_copies()
    yield from (reductions(dtype, "sum", is_of_slots=True) for dtype in _SUMMED_IN_SLOTS)


def compilations(device_name: str = DEFAULT) -> list[Compilation]:
    """Compilations for boxes of few dims and tensors: every class of every kernel, as tuned for a device.

    Kernels of slots are for as many peers as a block has threads, with native atomics and without. A sum over 8 ranks
    has 9 pointers.
    """

    def tuned(kernel: Kernel) -> Choice:
        return choose(device_name, kernel.name, kernel.width, DIMS[0])

    found: list[tuple[Kernel, Choice, Sequence[int]]] = [(kernel, tuned(kernel), POINTERS[:1]) for kernel in kernels()]
    for kernel, by_store in itertools.product(slot_kernels(), (False, True)):
        choice = tuned(kernel)
        signalling = kernel.with_signals(_ANY_NUMBER, num_lanes(1, choice.num_warps), by_store=by_store)
        found.append((signalling, choice, POINTERS[:1] if kernel.function is slot_copies().function else POINTERS[:2]))
    return [
        Compilation(kernel, Form(modes, DIMS[0], num_pointers, choice.block), choice.num_warps)
        for kernel, choice, pointers in found
        for modes, num_pointers in itertools.product(kernel.modes, pointers)
    ]


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
