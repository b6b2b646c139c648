"""Places of parameters' shards in one flat tensor: first all that rank 0 holds, then all of rank 1, and so on.

So what a rank holds of a group is one run of memory, which is sent from there as it lies, and lands there.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from tritondt.kernels.boxes import CastBox, CopyBox
from tritondt.sharding.coordinates import coordinate_at
from tritondt.sharding.cut import ChunkCut
from tritondt.sharding.strides import dense_strides


class Member(NamedTuple):
    """Shape of a parameter as a rank computes with it, and the dim that the data axis cuts.

    `cuts` are the sizes of the axes that cut one after the other, where the data axis stands for several.
    """

    shape: tuple[int, ...]
    dim: int
    cuts: tuple[int, ...] = ()

    def bounds(self, num_ranks: int, rank: int) -> tuple[int, int]:
        """Indices [start, stop) of the cut dim that a rank holds.

        >>> [Member((5,), 0, (2, 2)).bounds(4, rank) for rank in range(4)]  # 3 and 2, each cut again
        [(0, 2), (2, 3), (3, 4), (4, 5)]
        """
        start, stop = 0, self.shape[self.dim]
        sizes = self.cuts or (num_ranks,)
        for size, index in zip(sizes, coordinate_at(rank, sizes), strict=True):
            first, last = ChunkCut(size, stop - start).bounds(stop - start, index)
            start, stop = start + first, start + last
        return start, stop

    def shard_shape(self, num_ranks: int, rank: int) -> tuple[int, ...]:
        """Shape of a rank's shard."""
        start, stop = self.bounds(num_ranks, rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])


class Place(NamedTuple):
    """Shard of a member: its number, the rank that holds it, its offset in the flat tensor, and its shape."""

    member: int
    rank: int
    offset: int
    shape: tuple[int, ...]


class FlatLayout:
    """Places of the shards of `members` on `num_ranks` ranks; each rank has `num_more` elements of its own besides.

    >>> flat = FlatLayout([Member((3, 2), 0), Member((2,), 0)], 2)
    >>> flat.lengths, [place.offset for place in flat.places]
    ((5, 3), [0, 4, 5, 7])
    """

    def __init__(self, members: Sequence[Member], num_ranks: int, num_more: int = 0) -> None:
        self.members, self.num_ranks, self.num_more = tuple(members), num_ranks, num_more
        self.places: list[Place] = []
        lengths, offset = [], 0
        for rank in range(num_ranks):
            start = offset
            for number, member in enumerate(self.members):
                shape = member.shard_shape(num_ranks, rank)
                self.places.append(Place(number, rank, offset, shape))
                offset += prod(shape)
            offset += num_more
            lengths.append(offset - start)
        self.lengths, self.numel = tuple(lengths), offset

    def of_rank(self, rank: int) -> list[Place]:
        """Places of a rank's shards, with offsets from the start of what the rank holds."""
        start = self.starts[rank]
        return [place._replace(offset=place.offset - start) for place in self.places if place.rank == rank]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offsets at which what each rank holds begins."""
        return tuple(sum(self.lengths[:rank]) for rank in range(self.num_ranks))

    def more(self, rank: int) -> tuple[int, int]:
        """Range in the flat tensor of a rank's elements besides."""
        stop = self.starts[rank] + self.lengths[rank]
        return stop - self.num_more, stop

    def gathers(self, offsets: Sequence[int], itemsize: int) -> list[CopyBox]:
        """Copies out of the flat tensor to dense members that lie at `offsets` in one target."""
        return [
            CopyBox(
                0,
                0,
                place.offset,
                offsets[place.member] + self._offset(place, strides),
                itemsize,
                place.shape,
                dense_strides(place.shape),
                strides,
            )
            for place in self.places
            if prod(place.shape)
            for strides in (dense_strides(self.members[place.member].shape),)
        ]

    def cuts(self, rank: int, offsets: Sequence[int], itemsize: int) -> list[CopyBox]:
        """Copies of what a rank holds, out of dense members that lie at `offsets` in one source."""
        boxes = []
        for place in self.of_rank(rank):
            strides = dense_strides(self.members[place.member].shape)
            start = offsets[place.member] + self._offset(place, strides)
            if prod(place.shape):
                boxes.append(
                    CopyBox(0, 0, start, place.offset, itemsize, place.shape, strides, dense_strides(place.shape))
                )
        return boxes

    def scatters(self, strides: Sequence[tuple[int, ...] | None]) -> list[CastBox]:
        """Copies of members, tensors with `strides`, to the flat tensor; a member without strides is left out.

        Member number i of those that are there is source number i.
        """
        present = [number for number, found in enumerate(strides) if found is not None]
        boxes = []
        for place in self.places:
            own = strides[place.member]
            if own is not None and prod(place.shape) > 0:
                source = present.index(place.member)
                offset = self._offset(place, own)
                boxes.append(CastBox(source, 0, offset, place.offset, place.shape, own, dense_strides(place.shape)))
        return boxes

    def _offset(self, place: Place, strides: tuple[int, ...]) -> int:
        """Offset of a shard in its member."""
        member = self.members[place.member]
        return member.bounds(self.num_ranks, place.rank)[0] * strides[member.dim]
