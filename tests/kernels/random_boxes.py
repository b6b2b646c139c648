"""Boxes drawn at random, disjoint in their target, of every alignment; and memory to run them on."""

from collections.abc import Sequence
from math import prod
from random import Random

import torch

from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox, Slot

ITEMSIZES = (1, 2, 4, 8, 16)
# Lengths as cuts leave them: short, odd, a multiple of 16, one that fills a group of units, and one of several blocks.
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 24, 33, 61, 101)
_MAX_ELEMENTS = 3000


def random_lengths(draw: Random, max_elements: int = _MAX_ELEMENTS) -> tuple[int, ...]:
    """One to eight lengths, now and then one of 0."""
    lengths: list[int] = []
    for _ in range(draw.randint(1, 8)):
        fitting = [length for length in _LENGTHS if length * prod(lengths) <= max_elements]
        lengths.append(draw.choice(fitting))
    if draw.random() < 0.03:
        lengths[draw.randrange(len(lengths))] = 0
    draw.shuffle(lengths)
    if draw.random() < 0.3:
        lengths.sort()  # long runs
    return tuple(lengths)


def nested_strides(lengths: Sequence[int], draw: Random, order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Strides of elements that do not overlap, dims nested as `order` says with gaps here and there; and the extent."""
    strides = [1] * len(lengths)
    extent = 1 if draw.random() < 0.9 else 2
    for dim in order:
        strides[dim] = extent
        extent *= max(lengths[dim], 1)
        gap = draw.random()
        if gap < 0.2:
            extent += draw.choice((1, 3, 4, 8, 16))
        elif gap < 0.4:
            extent = -(-extent // 16) * 16
    return tuple(strides), extent


def _order(lengths: Sequence[int], draw: Random, base: Sequence[int]) -> list[int]:
    """Mostly the same nesting on both sides; now and then another, so that something is transposed."""
    if draw.random() < 0.3:
        return draw.sample(range(len(lengths)), len(lengths))
    return list(base)


def _source(lengths: Sequence[int], draw: Random, base: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """Strides, offset of the first element, and the elements that are needed, from 0 on."""
    strides, extent = nested_strides(lengths, draw, _order(lengths, draw, base))
    offset = draw.choice((0, 0, 0, 1, 3, 4, 16))
    end = offset + extent
    changed = list(strides)
    for dim, length in enumerate(lengths):
        kind = draw.random()
        if kind < 0.03:
            changed[dim] = 0
        elif kind < 0.08:
            offset += max(length - 1, 0) * strides[dim]
            changed[dim] = -strides[dim]
    return tuple(changed), offset, end


def random_copy_boxes(
    draw: Random, num_boxes: int, itemsizes: Sequence[int] = ITEMSIZES
) -> tuple[list[CopyBox], list[int], list[int]]:
    """Boxes between two sources and two targets, and the bytes that each needs."""
    boxes, filled, needed = [], [0, 0], [0, 0]
    for _ in range(num_boxes):
        itemsize = draw.choice(itemsizes)
        lengths = random_lengths(draw)
        base = draw.sample(range(len(lengths)), len(lengths)) if draw.random() < 0.3 else range(len(lengths))[::-1]
        target_strides, target_extent = nested_strides(lengths, draw, base)
        strides, offset, end = _source(lengths, draw, base)
        source, target = draw.randrange(2), draw.randrange(2)
        start = -(-filled[target] // itemsize) + draw.choice((0, 0, 1, 3))
        boxes.append(CopyBox(source, target, offset, start, itemsize, lengths, strides, target_strides))
        filled[target] = (start + target_extent) * itemsize
        needed[source] = max(needed[source], end * itemsize)
    return boxes, needed, filled


def random_cast_boxes(draw: Random, num_boxes: int) -> tuple[list[CastBox], list[int], list[int]]:
    """Boxes between two sources and two targets, and the elements that each needs."""
    boxes, needed, filled = random_copy_boxes(draw, num_boxes, (1,))
    return [CastBox(*box[:4], *box[5:]) for box in boxes], needed, filled


def random_reduce_boxes(
    draw: Random, num_boxes: int, max_elements: int = _MAX_ELEMENTS
) -> tuple[list[ReduceBox], list[int], list[int]]:
    """Boxes of one dtype with one to nine slots in three sources, and the elements that each tensor needs."""
    boxes, filled, needed = [], [0, 0], [0, 0, 0]
    for _ in range(num_boxes):
        lengths = random_lengths(draw, max_elements)
        base = range(len(lengths))[::-1]
        target_strides, target_extent = nested_strides(lengths, draw, _order(lengths, draw, base))
        slots = []
        for _ in range(draw.randint(1, 9)):
            strides, offset, end = _source(lengths, draw, base)
            source = draw.randrange(3)
            start = draw.choice((0, 0, needed[source]))
            slots.append(Slot(source, start + offset, strides))
            needed[source] = max(needed[source], start + end)
        target = draw.randrange(2)
        start = filled[target] + draw.choice((0, 0, 1, 3))
        boxes.append(ReduceBox(target, start, lengths, target_strides, tuple(slots)))
        filled[target] = start + target_extent
    return boxes, needed, filled


def random_bytes(num_bytes: int) -> torch.Tensor:
    """Bytes that tell where they came from."""
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


def behind_alignment(x: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """A copy of bytes that starts so many bytes behind a multiple of 16."""
    room = torch.empty(x.numel() + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + num_bytes
    placed = room[start : start + x.numel()]
    return placed.copy_(x)


def random_values(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of every magnitude; of floats one in eight is a zero, a subnormal, an infinity or NaN."""
    if dtype == torch.bool:
        return torch.rand(num_elements) < 0.5
    if dtype.is_complex:
        parts = random_values(2 * num_elements, torch.empty(0, dtype=dtype).real.dtype)
        return torch.view_as_complex(parts.reshape(-1, 2))
    if not dtype.is_floating_point:
        integers = torch.iinfo(dtype)
        return torch.randint(integers.min, integers.max, (num_elements,), dtype=dtype)
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), limits.max, limits.tiny]
    special += [limits.smallest_normal / 2, -limits.smallest_normal / 8]
    specials = torch.tensor(special, dtype=dtype)[torch.randint(len(special), (num_elements,))]
    values = (torch.randn(num_elements) * 2.0 ** torch.randint(-8, 8, (num_elements,))).to(dtype)
    return torch.where(torch.rand(num_elements) < 0.125, specials, values)


def values_behind(num_elements: int, dtype: torch.dtype, draw: Random) -> torch.Tensor:
    """Random values that start where an element may, not always at a multiple of 16 bytes."""
    values = random_values(num_elements, dtype)
    itemsize = values.element_size()
    return behind_alignment(values.view(torch.uint8), itemsize * draw.choice((0, 0, 1, 2)) % 16).view(dtype)


def same_nan(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor with every NaN made the same one: which of many it is, is the machine's affair."""
    parts = torch.view_as_real(x) if x.is_complex() else x
    if not parts.is_floating_point():
        return parts
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.where(parts.isnan(), float("nan"), parts).view(integers[parts.element_size()])
