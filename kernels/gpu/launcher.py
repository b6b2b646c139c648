"""Launches of a compiled kernel on a grid, straight through Triton's launcher."""

from collections.abc import Callable
from typing import Any

from triton import knobs

from tritondt.kernels.gpu.interpreter import take_scalars


def launcher(kernel: Any, compiled: Any, grid: tuple[int, int, int]) -> Callable[[tuple[Any, ...], int | None], None]:
    """Function that launches a kernel with the arguments that it is given, on a stream; None is for the current one.

    `compiled` is the kernel compiled for those arguments, or None from Triton's interpreter. Triton's own launch,
    `compiled[grid]`, prepares for hooks and calls them where there are none, which takes longer than the launch itself
    (`benchmarks.nccl.host_overhead`). Where a program has set hooks, as Triton's profiler does, it is the one that
    launches.
    """
    if compiled is None:
        take_scalars(type(kernel).__module__)
        interpreted: Callable[..., None] = kernel[grid]
        return lambda arguments, _: interpreted(*arguments)
    watched, run = compiled[grid], compiled.run
    function, metadata = compiled.function, compiled.packed_metadata

    x, y, z = grid

    def launch(arguments: tuple[Any, ...], stream: int | None) -> None:
        if stream is None or _has_hooks():
            watched(*arguments, stream=stream)
        else:
            run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return launch


def _has_hooks() -> bool:
    """Whether something is to be called before or after a launch: a function, or a chain of Triton's with one in it."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
