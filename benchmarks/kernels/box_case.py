"""A case of benchmarks/kernels/copy_boxes.py: one job, done by several sides."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

Run = Callable[[], object]

OURS = "ours"
MEMCPY = "memcpy"
# The fastest of the sides whose names begin with "torch".
TORCH = "torch"

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


@dataclass(frozen=True)
class Case:
    """One job done by several sides; `limits` are the least that our speed may be of another side's."""

    title: str
    num_bytes: int
    sides: dict[str, Run]
    limits: dict[str, float]
    target: torch.Tensor


@dataclass(frozen=True)
class Recipe:
    """A case that is yet to be made, so that only one at a time takes memory."""

    title: str
    make: Callable[..., Case]
    arguments: tuple[Any, ...]

    def __call__(self) -> Case:
        """The case with its tensors."""
        return self.make(*self.arguments)


def ours_run(table: Any, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], num_threads: int) -> Run:
    """A run of a table of ours."""
    source_ptrs, target_ptrs = [x.data_ptr() for x in sources], [x.data_ptr() for x in targets]
    return lambda: table.run(source_ptrs, target_ptrs, num_threads)


def memcpy_run(source: torch.Tensor, target: torch.Tensor, num_threads: int) -> Run:
    """libc's memcpy of as many bytes, in equal parts by as many threads; ctypes gives the GIL up meanwhile."""
    part = -(-target.nbytes // num_threads)
    parts = [
        (target.data_ptr() + start, source.data_ptr() + start, min(part, target.nbytes - start))
        for start in range(0, target.nbytes, part)
    ]
    pool = ThreadPoolExecutor(num_threads)

    def run() -> None:
        others = [pool.submit(_memcpy, *other) for other in parts[1:]]
        _memcpy(*parts[0])
        for other in others:
            other.result()

    return run


def starts_of(widths: Sequence[int]) -> list[int]:
    """Where each width begins."""
    return [start for start, _ in pairwise(chain((0,), accumulate(widths)))]


def random_values(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed."""
    return torch.randn(numel).to(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """As tables and people call it."""
    return str(dtype).removeprefix("torch.")
