"""Copies of whole runs of memory by a GPU's copy engines, which leave its processors to what they compute meanwhile."""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tritondt.kernels.boxes import CopyBox

_COPY = "cuMemcpyDtoDAsync_v2"


class Run(NamedTuple):
    """Bytes that lie one after the other in tensor number `source` and in tensor number `target`."""

    source: int
    target: int
    source_start: int
    target_start: int
    num_bytes: int


def run_of(box: CopyBox) -> Run | None:
    """The run that a box is; None where it is none, or holds nothing.

    >>> run_of(CopyBox(0, 1, 3, 0, 4, (2, 8), (8, 1), (8, 1)))
    Run(source=0, target=1, source_start=12, target_start=0, num_bytes=64)
    >>> run_of(CopyBox(0, 1, 3, 0, 4, (2, 8), (9, 1), (8, 1)))
    """
    loops = zip(box.lengths, box.source_strides, box.target_strides, strict=True)
    numel = 1
    for length, source_stride, target_stride in sorted(
        (each for each in loops if each[0] != 1), key=lambda each: each[2]
    ):
        if not source_stride == target_stride == numel:
            return None
        numel *= length
    size = box.itemsize
    if numel == 0:
        return None
    return Run(box.source, box.target, box.source_offset * size, box.target_offset * size, numel * size)


class EngineTable:
    """Runs that CUDA copies, one call each, in the current stream of a device: on copy engines where there are some.

    Source: CUDA's driver API, cuMemcpyDtoDAsync. `library` names the driver; on the CPU, which a test double of it
    serves, the stream is 0. RuntimeError where it fails.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device, library: str = "libcuda.so.1") -> None:
        self._runs, self._copy = tuple(runs), _copy_of(library)
        self._number = None if device.type == "cpu" else device.index or 0

    def run(self, source_ptrs: Sequence[int], target_ptrs: Sequence[int], num_threads: int = 1) -> None:
        """Copies every run between the tensors whose first elements lie at the given addresses."""
        stream = 0 if self._number is None else torch._C._cuda_getCurrentRawStream(self._number)
        for source, target, source_start, target_start, num_bytes in self._runs:
            status = self._copy(
                target_ptrs[target] + target_start, source_ptrs[source] + source_start, num_bytes, stream
            )
            if status != 0:
                raise RuntimeError(f"{_COPY} was called for {num_bytes} bytes and returned {status}; it must return 0")

    @property
    def num_bytes(self) -> int:
        """Bytes that one run writes."""
        return sum(run.num_bytes for run in self._runs)

    @property
    def num_boxes(self) -> int:
        """Number of runs."""
        return len(self._runs)


@lru_cache(maxsize=4)
def _copy_of(library: str) -> Callable[[int, int, int, int], int]:
    found: Any = getattr(ctypes.CDLL(library), _COPY)
    found.argtypes, found.restype = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p), ctypes.c_int
    made: Callable[[int, int, int, int], int] = found
    return made
