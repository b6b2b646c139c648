"""Boxes as nested loops over bytes, checked, with the fewest loops; plain values, as in csrc/boxes/loop_nest."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox

MAX_DIMS = 16
_ITEMSIZES = (1, 2, 4, 8, 16)
_MAX_BYTES = 2**62


class Operand(NamedTuple):
    """Walk over one tensor: its start, and the step of each loop, in bytes."""

    tensor: int
    offset: int
    strides: tuple[int, ...]


class LoopNest(NamedTuple):
    """Loops, outermost first; the innermost steps through bytes. Operand 0 is the target, the others are sources.

    Of a cast, whose elements have two sizes, everything counts elements in place of bytes.
    """

    lengths: tuple[int, ...]
    operands: tuple[Operand, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one operand."""
        return prod(self.lengths)

    @property
    def run_bytes(self) -> int:
        """Bytes that are adjacent in every operand: the innermost loop, where that steps by 1.

        >>> LoopNest((2, 12), (Operand(0, 0, (16, 1)),)).run_bytes
        12
        """
        is_run = bool(self.lengths) and all(operand.strides[-1] == 1 for operand in self.operands)
        return self.lengths[-1] if is_run else 1


def copy_nest(position: int, box: CopyBox) -> LoopNest:
    """Box number `position` of a table as loops; ValueError where it cannot be.

    >>> copy_nest(0, CopyBox(0, 3, 1, 0, 4, (2, 2), (3, 1), (2, 1)))
    LoopNest(lengths=(2, 2, 4), operands=(Operand(tensor=3, offset=0, strides=(8, 4, 1)),
                                          Operand(tensor=0, offset=4, strides=(12, 4, 1))))
    """
    if box.itemsize not in _ITEMSIZES:
        raise _refusal(position, f"itemsize {box.itemsize}; allowed are 1, 2, 4, 8 and 16")
    target = Operand(box.target, box.target_offset, box.target_strides)
    source = Operand(box.source, box.source_offset, box.source_strides)
    return _nest(position, box.itemsize, box.lengths, {"target": target, "source": source})


def cast_nest(position: int, box: CastBox) -> LoopNest:
    """Box number `position` of a table of casts as loops over elements; ValueError where it cannot be."""
    target = Operand(box.target, box.target_offset, box.target_strides)
    source = Operand(box.source, box.source_offset, box.source_strides)
    return _nest(position, 1, box.lengths, {"target": target, "source": source})


def reduce_nest(position: int, box: ReduceBox, itemsize: int) -> LoopNest:
    """Box number `position` of a reduction as loops; ValueError where it cannot be."""
    if not box.slots:
        raise _refusal(position, "no slots; a box reduces 1 slot or more")
    operands = {"target": Operand(box.target, box.target_offset, box.target_strides)}
    for number, slot in enumerate(box.slots):
        name = f"slot {number}" if len(box.slots) > 1 else "slot"
        operands[name] = Operand(slot.source, slot.offset, slot.strides)
    return _nest(position, itemsize, box.lengths, operands)


def coalesce(nest: LoopNest) -> LoopNest:
    """Nest of equal bytes without loops of length 1, ordered by falling target stride, neighbours merged.

    Two loops are merged where every operand walks both as one.

    >>> rows = Operand(0, 0, (12, 4, 1))
    >>> coalesce(LoopNest((2, 3, 4), (rows, rows))).lengths
    (24,)
    >>> coalesce(LoopNest((2, 3, 4), (rows, Operand(0, 0, (24, 4, 1))))).lengths
    (2, 12)
    """
    order = [dim for dim, length in enumerate(nest.lengths) if length != 1]
    order.sort(key=lambda dim: -nest.operands[0].strides[dim])
    groups: list[list[int]] = []
    for dim in order:
        if groups and _walks_as_one(nest, groups[-1][-1], dim):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    lengths = tuple(prod(nest.lengths[dim] for dim in group) for group in groups)
    return LoopNest(
        lengths,
        tuple(
            operand._replace(strides=tuple(operand.strides[group[-1]] for group in groups)) for operand in nest.operands
        ),
    )


def cut(nest: LoopNest, dim: int, start: int, stop: int) -> LoopNest:
    """Nest restricted to indices [start, stop) of one loop.

    >>> cut(LoopNest((2, 12), (Operand(0, 5, (16, 1)),)), 1, 8, 12)
    LoopNest(lengths=(2, 4), operands=(Operand(tensor=0, offset=13, strides=(16, 1)),))
    """
    lengths = (*nest.lengths[:dim], stop - start, *nest.lengths[dim + 1 :])
    operands = (operand._replace(offset=operand.offset + start * operand.strides[dim]) for operand in nest.operands)
    return LoopNest(lengths, tuple(operands))


def halves(nest: LoopNest) -> tuple[LoopNest, LoopNest]:
    """Two halves of a nest, cut where it reaches farthest, at a multiple of 16 indices where there are that many."""
    dim = max(
        range(len(nest.lengths)),
        key=lambda dim: max(abs(operand.strides[dim]) for operand in nest.operands) * (nest.lengths[dim] - 1),
    )
    length = nest.lengths[dim]
    middle = length // 32 * 16 if length >= 32 else length // 2
    return cut(nest, dim, 0, middle), cut(nest, dim, middle, length)


def span_bytes(nest: LoopNest, operand: Operand) -> int:
    """Bytes from the first to the last that an operand touches.

    >>> nest = LoopNest((2, 12), (Operand(0, 5, (-16, 1)),))
    >>> span_bytes(nest, nest.operands[0])
    28
    """
    return 1 + sum(abs(stride) * (length - 1) for stride, length in zip(operand.strides, nest.lengths, strict=True))


def _nest(position: int, itemsize: int, lengths: tuple[int, ...], operands: dict[str, Operand]) -> LoopNest:
    _check_lengths(position, lengths)
    for name, operand in operands.items():
        _check_operand(position, name, operand, lengths)
    for dim, (length, stride) in enumerate(zip(lengths, operands["target"].strides, strict=True)):
        if length > 1 and stride < 1:
            raise _refusal(
                position,
                f"target stride {stride} in dim {dim} of length {length}; "
                "target strides are positive where a length exceeds 1",
            )
    in_bytes = (
        Operand(operand.tensor, operand.offset * itemsize, (*(stride * itemsize for stride in operand.strides), 1))
        for operand in operands.values()
    )
    nest = LoopNest((*lengths, itemsize), tuple(in_bytes))
    _check_reach(position, nest)
    return nest


def _check_lengths(position: int, lengths: Sequence[int]) -> None:
    if len(lengths) > MAX_DIMS:
        raise _refusal(position, f"{len(lengths)} dims; at most {MAX_DIMS} are allowed")
    for dim, length in enumerate(lengths):
        if length < 0:
            raise _refusal(position, f"length {length} in dim {dim}; lengths are 0 or more")


def _check_operand(position: int, name: str, operand: Operand, lengths: Sequence[int]) -> None:
    if operand.tensor < 0:
        raise _refusal(position, f"{name} is tensor {operand.tensor}; positions in the list of tensors are 0 or more")
    if len(operand.strides) != len(lengths):
        raise _refusal(
            position, f"{name} has {len(operand.strides)} strides for {len(lengths)} lengths; one stride per length"
        )


def _check_reach(position: int, nest: LoopNest) -> None:
    """Refuses a nest on whose walk an address could leave 64 bits."""
    if nest.num_bytes == 0:
        return
    for operand in nest.operands:
        farthest = abs(operand.offset) + span_bytes(nest, operand)
        if farthest > _MAX_BYTES:
            raise _refusal(position, f"reaches {farthest} bytes from the first element; at most 2^62 are allowed")


def _walks_as_one(nest: LoopNest, outer: int, inner: int) -> bool:
    return all(operand.strides[outer] == operand.strides[inner] * nest.lengths[inner] for operand in nest.operands)


def _refusal(position: int, sentence: str) -> ValueError:
    return ValueError(f"box {position}: {sentence}")
