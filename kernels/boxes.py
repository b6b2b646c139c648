"""Boxes and tables of boxes: the copies, casts and reductions of a launch, as plain values.

A box is a set of nested loops. `source` and `target` are positions in the two lists of tensors that a
table is run on; offsets and strides count elements from a tensor's first element (`data_ptr()`).
Source strides are any integers: 0 repeats an element, a negative one walks backwards. Target strides
are positive wherever a length exceeds 1, for no two elements may land on one place.
"""

from typing import NamedTuple

# Of the float32 that a box to or from fp8 is scaled by.
SCALE_BYTES = 4


class CopyBox(NamedTuple):
    """Copy of one box of any dtype, as words of `itemsize` bytes (1, 2, 4, 8 or 16)."""

    source: int
    target: int
    source_offset: int
    target_offset: int
    itemsize: int
    lengths: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


class CastBox(NamedTuple):
    """Cast of one box between two dtypes, those of the tensors that the table is run on."""

    source: int
    target: int
    source_offset: int
    target_offset: int
    lengths: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


class Slot(NamedTuple):
    """One contribution to a reduction, of the shape of its box."""

    source: int
    offset: int
    strides: tuple[int, ...]


class ReduceBox(NamedTuple):
    """Reduction of `slots`, in their order, into one box; there is at least one slot."""

    target: int
    target_offset: int
    lengths: tuple[int, ...]
    target_strides: tuple[int, ...]
    slots: tuple[Slot, ...]
