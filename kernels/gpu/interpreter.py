"""Triton's interpreter, mended where a version of it does not go with NumPy's."""

import sys
from functools import lru_cache
from typing import Any

import triton


@lru_cache(maxsize=8)  # Triton's interpreter is one module; the mend does no harm twice
def take_scalars(module_name: str) -> None:
    """Lets loops of interpreted kernels end at scalars in Triton before 3.7, whose interpreter is the named module.

    It holds a scalar in an array of one dim, and NumPy from 2.4 on makes numbers of arrays without dims only.
    """
    # Imported with the kernel; it imports NumPy, which others need not have. What stands for a kernel and launches
    # nothing, in benchmarks of the host's time, names no module.
    interpreter: Any = sys.modules.get(module_name)
    if interpreter is None or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)  # puts back when the launch has ended what it has replaced, this too
        tensor.__index__ = lambda scalar: scalar.handle.data.item()

    interpreter._patch_lang_tensor = patch_and_mend
