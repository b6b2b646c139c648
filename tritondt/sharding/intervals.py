"""Arithmetic on sorted, disjoint half-open intervals, and on regions: one list of intervals per tensor dim.

A box is a region with one interval per dim. Intersections of regions are regions again, which is what keeps
a whole redistribution in closed form: nothing here ever lists single elements.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
Region = tuple[Intervals, ...]
Box = tuple[Interval, ...]


def total(intervals: Intervals) -> int:
    """Number of indices in the intervals."""
    return sum(stop - start for start, stop in intervals)


def merge(intervals: Iterable[Interval]) -> Intervals:
    """Sorted intervals without empty ones, and with touching ones joined.

    >>> merge([(0, 2), (2, 2), (2, 5), (7, 8)])
    ((0, 5), (7, 8))
    """
    merged: list[Interval] = []
    for start, stop in intervals:
        if start >= stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def intersect_intervals(left: Intervals, right: Intervals) -> Intervals:
    """Indices in both lists of intervals, by one sweep over them."""
    if len(left) == 1 and len(right) == 1:
        start, stop = max(left[0][0], right[0][0]), min(left[0][1], right[0][1])
        return ((start, stop),) if start < stop else ()
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            found.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def at_positions(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Indices at positions [start, stop) of intervals laid end to end.

    >>> at_positions(((0, 2), (10, 14)), 1, 4)
    ((1, 2), (10, 12))
    """
    found: list[Interval] = []
    passed = 0
    for low, high in intervals:
        first, last = max(low, low + start - passed), min(high, low + stop - passed)
        if first < last:
            found.append((first, last))
        passed += high - low
        if passed >= stop:
            break
    return tuple(found)


def positions(outer: Intervals, inner: Intervals) -> list[int]:
    """Position in `outer`, laid end to end, at which each interval of `inner` starts; each lies inside one of `outer`.

    >>> positions(((0, 4), (8, 12)), ((2, 4), (8, 10)))
    [2, 4]
    """
    found: list[int] = []
    passed, remaining = 0, iter(outer)
    low, high = 0, 0
    for start, _ in inner:
        while high <= start:
            passed += high - low
            low, high = next(remaining)
        found.append(passed + start - low)
    return found


def numel(region: Region) -> int:
    """Number of elements in the region; a region without dims is one element."""
    return prod(total(intervals) for intervals in region)


def intersect(left: Region, right: Region) -> Region | None:
    """Elements in both regions as a region, None where there are none."""
    found = []
    for left_intervals, right_intervals in zip(left, right, strict=True):
        common = intersect_intervals(left_intervals, right_intervals)
        if not common:
            return None
        found.append(common)
    return tuple(found)


def boxes(region: Region) -> Iterator[Box]:
    """Boxes of a region in row-major order of their corners."""
    yield from product(*region)


def num_boxes(region: Region) -> int:
    """Number of boxes that a region consists of."""
    return prod(len(intervals) for intervals in region)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Row-major elements [start, stop) of a shape as boxes, in that order; at most 2 per dim.

    >>> flat_boxes((3, 4), 2, 9)
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    inner_shape = shape[1:]
    inner = prod(inner_shape)
    whole = tuple((0, length) for length in inner_shape)
    first, last = -(-start // inner), stop // inner
    if first > last:  # both ends lie inside one row
        row = last
        return [((row, row + 1), *box) for box in flat_boxes(inner_shape, start - row * inner, stop - row * inner)]
    found: list[Box] = []
    if start < first * inner:
        row = first - 1
        found += [((row, row + 1), *box) for box in flat_boxes(inner_shape, start - row * inner, inner)]
    if first < last:
        found.append(((first, last), *whole))
    if last * inner < stop:
        found += [((last, last + 1), *box) for box in flat_boxes(inner_shape, 0, stop - last * inner)]
    return found
