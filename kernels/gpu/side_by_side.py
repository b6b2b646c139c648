"""Compilations side by side: what the tables of an exchange need is compiled at the same time, by threads.

Triton compiles for most of the time outside of Python's lock, in LLVM and in the assembler's process.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
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


class Started:
    """Launcher of a kernel by `_start`.

    The kernel may still be in compilation when the launcher is made; the first launch waits for it, and
    later launches start it straight.
    """

    _start: Start

    def _prepare(self, kernel: Any, compiled: Any, grid: tuple[int, int, int]) -> None:
        """Takes a kernel as it was compiled, or will have been at the first launch."""
        if isinstance(compiled, FutureKernel):
            self._start = partial(self._start_first, kernel, compiled, grid)
        else:
            self._start = launcher(kernel, compiled, grid)

    def _start_first(
        self,
        kernel: Any,
        compiled: FutureKernel,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        stream: int | None,
    ) -> None:
        self._start = launcher(kernel, compiled.result(), grid)  # compiled beside others
        self._start(arguments, stream)
