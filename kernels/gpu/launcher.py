"""Launches of a compiled kernel on a grid, straight through Triton's launcher."""

from collections.abc import Callable
from typing import Any

from triton import knobs

from tritondt.kernels.gpu.interpreter import take_scalars

# Bytes of scratch memory that a launch is to allocate.
_SCRATCH = ("global_scratch_size", "profile_scratch_size")


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
    watched, unwatched, runtime = compiled[grid], _without_hooks(compiled, grid), knobs.runtime

    def launch(arguments: tuple[Any, ...], stream: int | None) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # A function, or a chain of Triton's with one in it.
        if stream is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            watched(*arguments, stream=stream)
        else:
            unwatched(arguments, stream)

    return launch


def _without_hooks(compiled: Any, grid: tuple[int, int, int]) -> Callable[[tuple[Any, ...], int], None]:
    """Launches without hooks, by what Triton's launcher calls once it has allocated scratch memory, if there is none.

    Its way there takes 1 us, for a function that it defines anew each time. Up to Triton 3.6 what it calls takes the
    kernel's arguments one by one, and from 3.7 on in a tuple, with what they are.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = grid
    if any(getattr(run, name, True) for name in _SCRATCH) or getattr(run, "gsan_enabled", False):
        return lambda arguments, stream: run(x, y, z, stream, function, metadata, None, None, None, *arguments)
    start, is_cooperative, is_dependent = run.launch, run.launch_cooperative_grid, run.launch_pdl
    on = function, is_cooperative, is_dependent
    if hasattr(run, "kernel_signature"):
        described = run.arg_annotations, run.kernel_signature
        return lambda arguments, stream: start(
            x, y, z, stream, *on, metadata, None, None, None, None, None, *described, arguments
        )
    return lambda arguments, stream: start(x, y, z, stream, *on, None, None, metadata, None, None, None, *arguments)
