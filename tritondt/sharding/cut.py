"""Division of the indices of one tensor dim by one mesh axis.

Cuts nest: the second axis that shards a dim cuts what the first left it, laid end to end. Every question is
answered by arithmetic on piece bounds, or by bisection where the sizes are given, never by listing pieces.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
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


class Cut(ABC):
    """Division of a dim of `length` indices among the `parts` coordinates of one axis; `Shard.cut` makes it.

    Callers ask the cut which indices coordinates hold: a new kind of cut is a subclass, and a form of Shard.
    """

    __slots__ = ()

    parts: int
    length: int

    @property
    @abstractmethod
    def is_even(self) -> bool:
        """Whether all coordinates take equally many of all indices."""

    @abstractmethod
    def bounds(self, held: int, index: int) -> Interval:
        """Positions [start, stop) that piece `index` takes of `held` positions, where the piece is one run of them."""

    @abstractmethod
    def piece(self, held: Intervals, index: int) -> Intervals:
        """Indices of the dim that piece `index` takes of the indices `held`."""

    @abstractmethod
    def pieces_meeting(self, held: Intervals, wanted: Intervals) -> list[int]:
        """Numbers of the pieces of `held` that hold any index of `wanted`, ascending."""

    @abstractmethod
    def largest(self, held: int) -> int:
        """Most positions that any piece takes of `held` positions; an upper bound where that depends on which."""


def chunk_bounds(length: int, parts: int, index: int) -> Interval:
    """Positions [start, stop) of chunk `index` of `length` positions in `parts`, as `ChunkCut(parts, length)` has them.

    >>> [chunk_bounds(10, 4, index) for index in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    step = (length + parts - 1) // parts
    return least(index * step, length), least((index + 1) * step, length)


@dataclass(frozen=True, slots=True)
class ChunkCut(Cut):
    """Division in one piece for each coordinate, as torch.chunk cuts, or in one of each of several blocks.

    A block is the dim divided by `repeats`; what is held of a block, laid end to end, is cut in pieces of
    ceil(units / parts) units, trailing pieces short or empty.
    """

    parts: int
    length: int
    unit: int = 1
    sizes: Sequence[int] | None = None
    repeats: int = 1
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(accumulate(self.sizes or ())))

    @property
    def is_even(self) -> bool:
        """Whether all coordinates take equally many of all indices."""
        return self.sizes is None and self.length % (self.parts * self.unit * self.repeats) == 0

    def bounds(self, held: int, index: int) -> Interval:
        """Positions [start, stop) that piece `index` takes of `held` positions.

        >>> [ChunkCut(4, 10).bounds(10, i) for i in range(4)]
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
        if self.repeats == 1 and len(held) == 1:  # without the loops, in a third of the time
            ((low, high),) = held
            start, stop = self.bounds(high - low, index)
            return ((low + start, low + stop),) if start < stop else ()
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


@dataclass(frozen=True, slots=True)
class BlockCyclicCut(Cut):
    """Division in blocks of `block` positions, dealt to the coordinates in turns; the last block may be short.

    Source: the block-cyclic distribution of ScaLAPACK, whose NUMROC counts what a process has (with a block size NB,
    and the first block on process 0).
    """

    parts: int
    length: int
    block: int

    @property
    def is_even(self) -> bool:
        """Whether all coordinates take equally many of all indices."""
        return self.length % self._period == 0

    @property
    def _period(self) -> int:
        """Positions in which every coordinate has one block."""
        return self.parts * self.block

    def bounds(self, held: int, index: int) -> Interval:
        """Positions of the one run that a lone coordinate takes; no other is asked for runs (`Shard.is_one_run`)."""
        assert self.parts == 1, f"piece {index} of {self} is several blocks, not one run"
        return 0, held

    def piece(self, held: Intervals, index: int) -> Intervals:
        """Indices of the dim that piece `index` takes of the indices `held`.

        >>> BlockCyclicCut(2, 7, 2).piece(((0, 7),), 0), BlockCyclicCut(2, 7, 2).piece(((0, 1), (3, 7)), 1)
        (((0, 2), (4, 6)), ((4, 6),))
        """
        if self.parts == 1:
            return held
        found: list[Interval] = []
        first, passed = index * self.block, 0
        for low, high in held:
            end = passed + high - low
            # The first block of the piece that ends behind `passed` positions.
            start = max((passed - first - self.block) // self._period + 1, 0) * self._period + first
            while start < end:
                found.append((low - passed + max(start, passed), low - passed + min(start + self.block, end)))
                start += self._period
            passed = end
        return merge(found)

    def pieces_meeting(self, held: Intervals, wanted: Intervals) -> list[int]:
        """Numbers of the pieces of `held` that hold any index of `wanted`, ascending."""
        common = intersect_intervals(held, wanted)
        found: set[int] = set()
        for position, (start, stop) in zip(positions(held, common), common, strict=True):
            first, last = position // self.block, (position + stop - start - 1) // self.block
            if last - first + 1 >= self.parts:
                return list(range(self.parts))
            found.update(block % self.parts for block in range(first, last + 1))
        return sorted(found)

    def largest(self, held: int) -> int:
        """Most positions that any piece takes of `held` positions: those of the first piece.

        >>> BlockCyclicCut(2, 7, 2).largest(7)
        4
        """
        rounds, rest = divmod(held, self._period)
        return rounds * self.block + min(rest, self.block)


def _grouped_by_block(held: Intervals, size: int) -> Iterator[Interval]:
    """Bounds of the blocks of `size` indices that meet `held`, ascending."""
    done = -1
    for start, stop in held:
        for block in range(max(start // size, done + 1), -(-stop // size)):
            yield block * size, (block + 1) * size
            done = block
