"""The few forms that kernels are compiled in: modes in classes, dims and pointers rounded up.

A kernel takes a second or more to compile, and a table needs it before its first run. The needs of a table are
therefore rounded up to what other tables need too.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from tritondt.kernels.gpu.box_table import GATHERED, GROUPS, MAX_POINTERS, NUM_MODES, SHIFTED, TILES, mode
from tritondt.kernels.gpu.loop_nest import MAX_DIMS, LoopNest, coalesce, cut
from tritondt.kernels.gpu.pieces import WIDEST, Kind

# Loops around units; a nest has one more than dims, over the bytes of an element.
DIMS = (4, 8, MAX_DIMS + 1)
POINTERS = (8, MAX_POINTERS)
_MAX_REGISTERS = {8: 128, 17: 255}
# A nest of more loops than the fewest is cut into at most so many that have no more.
_MAX_PARTS = 64


def modes_between(first: int, end: int) -> int:
    """Bits of the modes from `first` to before `end`.

    >>> bin(modes_between(1, 3))
    '0b110'
    """
    return (1 << end) - (1 << first)


# Classes of modes of copies: aligned runs alone, which take the fewest registers; runs beside gathered rows; all but
# tiles; tiles.
WIDE_RUNS = 1 << mode(Kind.RUNS, WIDEST)
SHORT_ROWS = modes_between(0, GROUPS) | modes_between(GATHERED, TILES)
COPY_RUNS = modes_between(0, TILES) & ~modes_between(GROUPS, SHIFTED)
ALL_TILES = modes_between(TILES, NUM_MODES)


def run_modes(widest: int, widest_in_groups: int) -> int:
    """Bits of runs in units up to a width, and of groups up to another, 0 for none."""
    groups = modes_between(GROUPS, GROUPS + widest_in_groups.bit_length())
    return modes_between(0, mode(Kind.RUNS, widest) + 1) | groups


def rounded_up(count: int, steps: Sequence[int]) -> int:
    """The least of `steps`, which ascend, that is no less than `count`.

    >>> rounded_up(3, (2, 4, 8))
    4
    """
    return next(step for step in steps if count <= step)


def class_of(modes: int, classes: Sequence[int]) -> int:
    """The first of `classes` that has all of `modes`."""
    return next(found for found in classes if modes & ~found == 0)


def few_dims(nest: LoopNest, num_dims: int) -> list[LoopNest]:
    """A nest whose pieces have so many dims, in parts that have as few as kernels are compiled for first, or as it is.

    Its shortest loops are unrolled, unless that makes too many parts.

    >>> from tritondt.kernels.gpu.loop_nest import Operand
    >>> strides = (256, 64, 32, 8, 1)
    >>> [part.lengths for part in few_dims(LoopNest((9, 2, 3, 3, 7), (Operand(0, 0, strides),)), 5)]
    [(9, 3, 3, 7), (9, 3, 3, 7)]
    """
    loops = range(len(nest.lengths) - 1)  # the last is the run
    unrolled = sorted(loops, key=lambda dim: nest.lengths[dim])[: max(num_dims - DIMS[0], 0)]
    if prod(nest.lengths[dim] for dim in unrolled) > _MAX_PARTS:
        return [nest]
    parts = [nest]
    for dim in unrolled:
        parts = [cut(part, dim, index, index + 1) for part in parts for index in range(part.lengths[dim])]
    return [coalesce(part) for part in parts]


def compiler_options(
    options: Mapping[str, Any], registers: Mapping[int, int], num_dims: int, num_warps: int, architecture: int | None
) -> dict[str, Any]:
    """Compiler options of a kernel whose own options are `options`, for an architecture such as 90.

    `registers` bounds a thread's registers (maxnreg) by major capability, where another bound than that of `options`
    is needed. Both are for few dims. To stay at 32 registers, the assembler spills 8 bytes of a copy of 6 dims on sm_90
    (Triton 3.6 and 3.7); where a bound is given it takes what it needs, 48.

    >>> compiler_options({"maxnreg": 64}, {12: 72}, 4, 8, 121)
    {'num_warps': 8, 'maxnreg': 72}
    """
    if num_dims > DIMS[0]:
        bound = {"maxnreg": _MAX_REGISTERS[num_dims]}
    elif architecture is not None and architecture // 10 in registers:
        bound = {"maxnreg": registers[architecture // 10]}
    else:
        bound = {}
    return {"num_warps": num_warps, **options, **bound}
