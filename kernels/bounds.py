"""Checks of tables of boxes made by hand: no box leaves its tensors, and no element is written twice."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox

Box = CopyBox | CastBox | ReduceBox


def check_boxes(boxes: Sequence[Box], source_sizes: Sequence[int], target_sizes: Sequence[int]) -> None:
    """Refuses boxes that leave their tensors or write one element twice, with a ValueError that names them.

    Sizes count elements from each tensor's first one; for CopyBoxes, bytes. The time is that of sorting
    the runs of target elements that lie one behind the other.

    >>> good = CastBox(0, 0, 0, 0, (2, 3), (3, 1), (3, 1))
    >>> check_boxes([good, good._replace(target_offset=6)], [6], [12])
    >>> check_boxes([good, good._replace(target_offset=5)], [6], [12])
    Traceback (most recent call last):
    ValueError: boxes 0 and 1 write element 5 of target 0; no element is written twice
    """
    written: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for position, box in enumerate(boxes):
        if 0 in box.lengths:
            continue
        itemsize = box.itemsize if isinstance(box, CopyBox) else 1
        unit = "bytes" if isinstance(box, CopyBox) else "elements"
        for name, tensor, offset, strides in _sides(box):
            sizes = target_sizes if name == "target" else source_sizes
            _check_place(f"box {position}", unit, (name, tensor), sizes, _range(box.lengths, offset, strides, itemsize))
        runs = _runs(box.lengths, box.target_offset, box.target_strides)
        written[box.target] += [(start * itemsize, end * itemsize, position) for start, end in runs]
    for target, found in written.items():
        _check_overlap(target, sorted(found), "byte" if isinstance(boxes[0], CopyBox) else "element")


def _sides(box: Box) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    yield "target", box.target, box.target_offset, box.target_strides
    if isinstance(box, ReduceBox):
        for slot in box.slots:
            yield "source", slot.source, slot.offset, slot.strides
    else:
        yield "source", box.source, box.source_offset, box.source_strides


def _range(lengths: Sequence[int], offset: int, strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """First and last element of a box, in bytes for a CopyBox."""
    steps = [(length - 1) * stride for length, stride in zip(lengths, strides, strict=True)]
    first, last = (offset + sum(step for step in steps if (step < 0) == backward) for backward in (True, False))
    return first * itemsize, (last + 1) * itemsize - 1


def _check_place(box: str, unit: str, side: tuple[str, int], sizes: Sequence[int], touched: tuple[int, int]) -> None:
    name, tensor = side
    if not 0 <= tensor < len(sizes):
        raise ValueError(f"{box}: {name} {tensor}, but the number of {name}s is {len(sizes)}")
    if touched[0] < 0 or touched[1] >= sizes[tensor]:
        raise ValueError(
            f"{box}: {unit} {touched[0]} to {touched[1]} of {name} {tensor}, which has {sizes[tensor]}; "
            "a box lies within its tensors"
        )


def _runs(lengths: Sequence[int], offset: int, strides: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First element and end of every run of adjacent elements of a box."""
    loops = sorted((stride, length) for stride, length in zip(strides, lengths, strict=True) if length > 1)
    run = 1
    while loops and loops[0][0] == run:
        run *= loops.pop(0)[1]
    for steps in product(*(range(0, stride * length, stride) if stride else [0] * length for stride, length in loops)):
        start = offset + sum(steps)
        yield start, start + run


def _check_overlap(target: int, written: Sequence[tuple[int, int, int]], unit: str) -> None:
    """Refuses intervals that overlap in one target; `written` holds starts, ends and box numbers, sorted."""
    last_end, last_box = 0, -1
    for start, end, box in written:
        if start < last_end:
            what = (
                f"box {box} writes" if box == last_box else f"boxes {min(box, last_box)} and {max(box, last_box)} write"
            )
            raise ValueError(f"{what} {unit} {start} of target {target}; no {unit} is written twice")
        last_end, last_box = end, box
