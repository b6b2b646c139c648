"""Fans: senders that send the same amounts to the same ranks, of which a redistribution has few on many ranks.

All of S0 -> S1 on 65,536 ranks is one fan of 4,294,967,296 messages. Amounts are products of counts per dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from tritondt.errors import LayoutError
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Plan, Step
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Intervals, Region
from tritondt.sharding.layout import Coordinate, Layout

# Pairs of a sender's and a receiver's part of one dim that are listed, at some 3 us each.
MOST_PAIRS = 5_000_000
# What a flat piece of a box that is held in part counts for.
_PIECE_PAIRS = 5


class Fan(NamedTuple):
    """Senders, and what each of them sends to which rank, itself included, in ascending order of receivers."""

    senders: torch.Tensor
    receivers: torch.Tensor
    num_bytes: torch.Tensor

    @property
    def kept(self) -> torch.Tensor:
        """Bytes that each sender keeps."""
        place = torch.searchsorted(self.receivers, self.senders).clamp_(max=len(self.receivers) - 1)
        return torch.where(self.receivers[place] == self.senders, self.num_bytes[place], 0)


def fans(plan: Plan, itemsize: int) -> Iterator[Fan]:
    """Fans of all steps of a plan whose messages hold elements of `itemsize` bytes.

    Raises LayoutError where too many pairs of parts would have to be listed.

    >>> from tritondt.planning.cost import CostTable
    >>> from tritondt.planning.planner import make_plan
    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((2,), parse_placements(text), (6, 2)) for text in ("S0", "R"))
    >>> [[values.tolist() for values in fan] for fan in fans(make_plan(source, target, 4, CostTable()), 4)]
    [[[0, 1], [0, 1], [24, 24]]]
    """
    for step in plan.steps:
        if not step.moving_axes:
            continue
        found = _kind_of(step)(plan, step)
        senders: dict[Any, list[int]] = defaultdict(list)
        for rank, coordinate in enumerate(plan.source.coordinates()):
            key = found.key(coordinate)
            if key is not None:
                senders[key].append(rank)
        for key, ranks in senders.items():
            receivers, numels = found.receivers(key)
            order = receivers.argsort()
            if len(order):
                yield Fan(torch.tensor(ranks), receivers[order], numels[order] * itemsize)


def _kind_of(step: Step) -> type[_Fans]:
    if isinstance(step.source, FlatPieces):
        return _GatherFans
    return _PieceFans if isinstance(step.target, FlatPieces) else _ExchangeFans


class _Fans(ABC):
    """Senders of one step told apart by what they send to whom."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self._plan, self._step = plan, step
        shape = plan.source.mesh_shape
        self._strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self._num_pairs = 0

    @abstractmethod
    def key(self, coordinate: Coordinate) -> Any:
        """A key that is equal for senders that send alike; None for a sender that sends nothing."""

    @abstractmethod
    def receivers(self, key: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranks that senders of a key send to, and how many elements."""

    def _position(self, indices: Mapping[int, int]) -> int:
        return sum(self._strides[axis] * index for axis, index in indices.items())

    def _along(self, axes: tuple[int, ...]) -> torch.Tensor:
        """Distances in position of all choices of indices on these axes, in row-major order of the axes."""
        return _outer([torch.arange(self._plan.source.mesh_shape[a]) * self._strides[a] for a in axes])

    def _count(self, num_pairs: int) -> None:
        self._num_pairs += num_pairs
        if self._num_pairs > MOST_PAIRS:
            source, target = self._plan.source, self._plan.target
            raise LayoutError(
                f"{source} -> {target} of {source.shape} on {source.num_ranks:,} ranks has more than {MOST_PAIRS:,} "
                "different pairs of parts, too many to be listed for a picture or a topology; what each rank sends and "
                "receives is counted without (--all-ranks, rank_totals)"
            )


class _ExchangeFans(_Fans):
    """Fans of an exchange between boxes, or of a reduction into boxes."""

    def __init__(self, plan: Plan, step: Step) -> None:
        super().__init__(plan, step)
        self._route = step.route
        self._layout: Layout = self._route.target_layout
        cutting = {axis for axes in self._layout.axes_of_dim for axis in axes}
        self._idle = [axis for axis in range(len(self._layout.mesh_shape)) if axis not in cutting]
        self._found: dict[tuple[int, Intervals, tuple[int | None, ...]], bytes] = {}

    def key(self, coordinate: Coordinate) -> Any:
        pinned = self._route.receiving_indices(coordinate)
        if pinned is None:
            return None
        own = self._route.source_layout.region(coordinate)
        parts = tuple(self._parts(dim, intervals, pinned) for dim, intervals in enumerate(own))
        return (parts, tuple(pinned.get(axis) for axis in self._idle)) if all(parts) else None

    def receivers(self, key: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts, idle = key
        pairs = [torch.frombuffer(bytearray(found), dtype=torch.int64).view(-1, 2) for found in parts]
        free = tuple(axis for axis, index in zip(self._idle, idle, strict=True) if index is None)
        pinned = {axis: index for axis, index in zip(self._idle, idle, strict=True) if index is not None}
        places = _outer([pair[:, 0] for pair in pairs] + [self._along(free)]) + self._position(pinned)
        numels = torch.ones(1, dtype=torch.int64)
        for pair in pairs:
            numels = (numels[:, None] * pair[:, 1]).flatten()
        return places, numels.repeat_interleave(len(places) // max(len(numels), 1))

    def _parts(self, dim: int, own: Intervals, pinned: Mapping[int, int]) -> bytes:
        """Receivers' parts of what a sender holds of a dim, each as its distance in position and number of indices."""
        key = dim, own, tuple(pinned.get(axis) for axis in self._layout.axes_of_dim[dim])
        found = self._found.get(key)
        if found is None:
            parts = array("q")
            for indices, common in self._layout.dim_holders(dim, own, pinned):
                parts.extend((self._position(dict(indices)), regions.total(common)))
            self._count(len(parts) // 2)
            found = self._found[key] = parts.tobytes()
        return found


class _PieceFans(_Fans):
    """Fans of a reduction into flat pieces of boxes, which senders hold whole or in part."""

    def key(self, coordinate: Coordinate) -> Any:
        route = self._step.route
        pinned = route.receiving_indices(coordinate)
        return None if pinned is None else (route.source_layout.region(coordinate), tuple(sorted(pinned.items())))

    def receivers(self, key: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own, items = key
        pieces, pinned = self._step.target, dict(items)
        assert isinstance(pieces, FlatPieces), f"{self._step} ends in flat pieces"
        places, numels = array("q"), array("q")
        for box, common in pieces.layout.holders(own, dict.fromkeys(pieces.axes, 0) | pinned):
            whole = common == pieces.layout.region(box)
            self._count(pieces.parts if whole else _PIECE_PAIRS * pieces.parts)
            for part in range(pieces.parts):
                holder = pieces.coordinate_of_part(box, part)
                if any(holder[axis] != index for axis, index in pinned.items()):
                    continue
                numel = _numel(pieces, holder) if whole else _common_numel(pieces, holder, common)
                if numel:
                    places.append(self._position(dict(enumerate(holder))))
                    numels.append(numel)
        return torch.tensor(places, dtype=torch.int64), torch.tensor(numels, dtype=torch.int64)


class _GatherFans(_Fans):
    """Fans of a gather: a rank sends its flat piece to all that share the box."""

    def key(self, coordinate: Coordinate) -> Any:
        pieces = self._step.source
        assert isinstance(pieces, FlatPieces), f"{self._step} gathers flat pieces"
        start, stop = pieces.bounds(coordinate)
        return (pieces.coordinate_of_part(coordinate, 0), stop - start) if stop > start else None

    def receivers(self, key: Any) -> tuple[torch.Tensor, torch.Tensor]:
        box, numel = key
        pieces = self._step.source
        assert isinstance(pieces, FlatPieces), f"{self._step} gathers flat pieces"
        places = self._along(pieces.axes) + self._position(dict(enumerate(box)))
        return places, torch.full_like(places, numel)


def _numel(pieces: FlatPieces, holder: Coordinate) -> int:
    start, stop = pieces.bounds(holder)
    return stop - start


def _common_numel(pieces: FlatPieces, holder: Coordinate, own: Region) -> int:
    found = (regions.intersect(own, region) for region in pieces.regions(holder))
    return sum(regions.numel(common) for common in found if common is not None)


def _outer(distances: list[torch.Tensor]) -> torch.Tensor:
    """Sums of one of each, in row-major order."""
    found = torch.zeros(1, dtype=torch.int64)
    for each in distances:
        found = (found[:, None] + each).flatten()
    return found
