"""Division of the indices of one tensor dim by one mesh axis.

Cuts nest: the second axis that shards a dim cuts what the first left it, laid end to end. Every question is
answered by arithmetic on piece bounds, or by bisection where the sizes are given, never by listing pieces.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from tritondt.sharding.intervals import (
    Interval,
    Intervals,
    at_positions,
    intersect_intervals,
    merge,
    positions,
    total,
)
from tritondt.sharding.lengths import hint_of, least


@dataclass(frozen=True, slots=True)
class Cut:
    """Division of a dim of `length` indices among the `parts` coordinates of one axis.

    A block is the dim divided by `repeats`; what is held of a block, laid end to end, is cut in pieces of
    ceil(units / parts) units, trailing pieces short or empty.
    """

    parts: int
    length: int
    unit: int = 1
    sizes: tuple[int, ...] | None = None
    repeats: int = 1
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(accumulate(self.sizes or ())))

    def bounds(self, held: int, index: int) -> Interval:
        """Positions [start, stop) that piece `index` takes of `held` positions.

        >>> [Cut(4, 10).bounds(10, i) for i in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
        """
        if self.sizes is not None:
            return self._ends[index] - self.sizes[index], self._ends[index]
        step = self._step(held)
        return least(index * step, held), least((index + 1) * step, held)

    def indices(self, held: int, start: int, stop: int) -> range:
        """Numbers of the pieces that meet positions [start, stop), which is not empty, of `held` positions."""
        if self.sizes is not None:
            return range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1)
        step = self._step(held)
        return range(start // step, -(-stop // step))

    def piece(self, held: Intervals, index: int) -> Intervals:
        """Indices of the dim that piece `index` takes of the indices `held`."""
        return merge(
            interval
            for block in self._blocks(held)
            for interval in at_positions(block, *self.bounds(total(block), index))
        )

    def pieces_meeting(self, held: Intervals, wanted: Intervals) -> list[int]:
        """Numbers of the pieces of `held` that hold any index of `wanted`, ascending."""
        found: set[int] = set()
        for block in self._blocks(held):
            common = intersect_intervals(block, wanted)
            size = total(block)
            for position, (start, stop) in zip(positions(block, common), common, strict=True):
                found.update(self.indices(size, position, position + stop - start))
        return [index for index in sorted(found) if self.sizes is None or self.sizes[index]]

    def largest(self, held: int) -> int:
        """Most positions that any piece takes of `held` positions; an upper bound where blocks are held in part."""
        if self.sizes is not None:
            return max(self.sizes) * self.repeats
        if self.repeats == 1:
            return min(self._step(held), held)
        # A block of which h is held gives at most h/parts and a part of a unit; a whole one gives its first piece.
        rounded = (held + self.repeats * self.unit * (self.parts - 1)) // self.parts
        block = hint_of(self.length) // self.repeats
        return min(held, rounded, self.repeats * min(self._step(block), block))

    def _step(self, held: int) -> int:
        step = (held // self.unit + self.parts - 1) // self.parts * self.unit
        # Of a length left open no piece is looked for by its place, for which a step of 0 would be none.
        return max(self.unit, step) if isinstance(step, int) else step

    def _blocks(self, held: Intervals) -> Iterator[Intervals]:
        """Indices held of each block, for the blocks of which any are held."""
        if self.repeats == 1:
            if held:
                yield held
            return
        size = self.length // self.repeats
        for start, stop in _grouped_by_block(held, size):
            yield intersect_intervals(held, ((start, stop),))


def _grouped_by_block(held: Intervals, size: int) -> Iterator[Interval]:
    """Bounds of the blocks of `size` indices that meet `held`, ascending."""
    done = -1
    for start, stop in held:
        for block in range(max(start // size, done + 1), -(-stop // size)):
            yield block * size, (block + 1) * size
            done = block
