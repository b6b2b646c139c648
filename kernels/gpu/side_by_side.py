"""Compilations side by side: what the tables of an exchange need is compiled at the same time, by threads.

Triton compiles for most of the time outside of Python's lock, in LLVM and in the assembler's process.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, FutureKernel
from triton.runtime import _async_compile

from tritondt.kernels.gpu.launcher import launcher

# An exchange needs a few kernels; all of them wait for the slowest.
_MOST_THREADS = 8

Start = Callable[[tuple[Any, ...], int | None], None]


@contextmanager
def compiling_side_by_side() -> Iterator[None]:
    """Context in which `compile_form` returns at once; at its end all kernels are there, or the error of one is raised.

    Within another one, it is part of that.
    """
    if _async_compile.active_mode.get() is not None:
        yield
        return
    try:
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool, AsyncCompileMode(pool):
            yield
    finally:
        _async_compile.active_mode.set(None)  # after an error Triton leaves it


class LaterLauncher:
    """What `launcher` returns, of a kernel that may still be compiled: made at the first launch."""

    def __init__(self, kernel: Any, compiled: FutureKernel, grid: tuple[int, int, int]) -> None:
        self._made = kernel, compiled, grid

    def made(self) -> Start:
        """The launcher, when the kernel is there."""
        kernel, compiled, grid = self._made
        return launcher(kernel, compiled.result(), grid)
