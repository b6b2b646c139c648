"""Least number of elements that any redistribution can send, counted from the layouts alone.

All boxes are cut into cells that no box crosses; within a cell every element has the same fate. Where
nothing is reduced, each rank must receive what it wants and does not have. Where p terms are added up
for k ranks, p - 1 sends bring the terms together, one more where no rank that wants the sum has a term,
and k - 1 take the sum to the others. (The first rank that knows the sum needs all the other terms; every
rank that wants it and is not that one needs a message after that.)
"""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

from tritondt.sharding.intervals import Interval, Intervals, Region
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Replicate

_Positions = frozenset[int]


def fewest_elements(source: Layout, target: Layout) -> int:
    """Number of elements that ranks must send, all together, to get from `source` to `target`.

    >>> from tritondt.sharding.placement import Shard
    >>> rows, columns = (Layout((4,), (Shard(dim),), (8, 4)) for dim in (0, 1))
    >>> whole, terms = (Layout((4,), (kind(),), (8, 4)) for kind in (Replicate, Partial))
    >>> fewest_elements(rows, columns), fewest_elements(rows, whole)
    (24, 96)
    >>> fewest_elements(terms, rows), fewest_elements(terms, whole)
    (96, 192)
    """
    num_terms = prod(source.mesh_shape[axis] for axis in source.axes_where(Partial))
    sources = [source.region(coordinate) for coordinate in source.coordinates()]
    targets = [target.region(coordinate) for coordinate in target.coordinates()]
    cells = [_cells(dim, length, sources + targets) for dim, length in enumerate(source.shape)]
    having = [[_positions(dim, cell, sources) for cell in found] for dim, found in enumerate(cells)]
    wanting = [[_positions(dim, cell, targets) for cell in found] for dim, found in enumerate(cells)]
    everyone = frozenset(range(source.num_ranks))
    total = 0
    for index in product(*(range(len(found)) for found in cells)):
        have = everyone.intersection(*(having[dim][place] for dim, place in enumerate(index)))
        want = everyone.intersection(*(wanting[dim][place] for dim, place in enumerate(index)))
        numel = prod(cells[dim][place][1] - cells[dim][place][0] for dim, place in enumerate(index))
        total += numel * _sends(have, want, num_terms)
    return total


def _cells(dim: int, length: int, regions: list[Region]) -> list[Interval]:
    ends = {0, length}
    for region in regions:
        for interval in region[dim]:
            ends.update(interval)
    return list(pairwise(sorted(ends)))


def _positions(dim: int, cell: Interval, regions: list[Region]) -> _Positions:
    return frozenset(place for place, region in enumerate(regions) if _covers(region[dim], cell))


def _covers(intervals: Intervals, cell: Interval) -> bool:
    return any(start <= cell[0] and cell[1] <= stop for start, stop in intervals)


def _sends(have: _Positions, want: _Positions, num_terms: int) -> int:
    """Number of times that an element must cross between ranks."""
    if num_terms == 1:
        return len(want - have)
    return num_terms + len(want) - 1 - bool(have & want)


def most_received(source: Layout, target: Layout, coordinate: tuple[int, ...]) -> int:
    """Most elements that a rank receives when a sum is made in as many pieces as it has holders.

    With p terms and k holders of the rank's target T: p terms of its piece of T, and the other pieces.

    >>> terms, whole = (Layout((4,), (kind(),), (8, 4)) for kind in (Partial, Replicate))
    >>> most_received(terms, whole, (0,))
    56
    """
    num_terms = prod(source.mesh_shape[axis] for axis in source.axes_where(Partial))
    num_holders = prod(target.mesh_shape[axis] for axis in target.axes_where(Replicate))
    numel = prod(target.local_shape(coordinate))
    piece = -(-numel // num_holders)
    return num_terms * piece + numel - numel // num_holders
