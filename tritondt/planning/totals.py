"""Totals of every rank in a redistribution, without listing its messages: worlds of 65,536 ranks in seconds.

Who serves whom is a product over the dims and over the axes that cut none, so that the number of a rank's peers, and of
the elements that go to them, are products of counts per dim. Only flat pieces of boxes that senders hold in part are
listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tritondt.errors import LayoutError
from tritondt.planning.between_hosts import HostStep
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Plan, Step
from tritondt.planning.spread import Spread
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Intervals, Region
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Replicate

# Pieces of boxes that are listed one by one, at some 3 us each.
MOST_PIECES = 2_000_000


@dataclass(frozen=True)
class RankTotals:
    """Bytes sent, bytes received and messages sent of every rank, by its position in the mesh."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    messages: tuple[int, ...]

    @property
    def spreads(self) -> dict[str, Spread]:
        """Spreads of bytes sent, bytes received and messages sent."""
        values = {"sent bytes": self.sent, "received bytes": self.received, "messages": self.messages}
        return {name: Spread.of(each) for name, each in values.items()}


def rank_totals(plan: Plan, itemsize: int) -> RankTotals:
    """Totals of all steps of a plan whose messages hold elements of `itemsize` bytes.

    Raises LayoutError where too many pieces would have to be listed.

    >>> from tritondt.planning.cost import CostTable
    >>> from tritondt.planning.planner import make_plan
    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((2,), parse_placements(text), (5, 2)) for text in ("S0", "R"))
    >>> rank_totals(make_plan(source, target, 4, CostTable()), 4)
    RankTotals(sent=(24, 16), received=(16, 24), messages=(1, 1))
    """
    num_ranks = plan.source.num_ranks
    sent, received, messages = ([0] * num_ranks for _ in range(3))
    for step in plan.steps:
        if not step.moving_axes:
            continue
        totals = _totals_of(plan, step)
        for rank, coordinate in enumerate(plan.source.coordinates()):
            sent_numel, received_numel, num_messages = totals.of(coordinate)
            sent[rank] += sent_numel * itemsize
            received[rank] += received_numel * itemsize
            messages[rank] += num_messages
    return RankTotals(tuple(sent), tuple(received), tuple(messages))


def _totals_of(plan: Plan, step: Step) -> "_ListedTotals | _GatherTotals | _ExchangeTotals":
    if isinstance(step, HostStep):
        return _ListedTotals(step)
    return _GatherTotals(step) if isinstance(step.source, FlatPieces) else _ExchangeTotals(plan, step)


class _ListedTotals:
    """Totals of a step that knows hosts: the messages of each rank are listed."""

    def __init__(self, step: HostStep) -> None:
        self._step = step

    def of(self, coordinate: Coordinate) -> tuple[int, int, int]:
        """Elements that a coordinate sends and receives, and messages that it sends."""
        found = self._step.exchange(coordinate)
        sent, received = (sum(message.numel for message in each) for each in (found.sends, found.receives))
        return sent, received, len(found.sends)


class _Holders:
    """Numbers of coordinates of a layout that hold any of a region, and of elements that all of them hold of it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        cutting = {axis for axes in layout.axes_of_dim for axis in axes}
        self._idle = [axis for axis in range(len(layout.mesh_shape)) if axis not in cutting]
        self._found: dict[tuple[int, Intervals, tuple[int | None, ...]], tuple[int, int]] = {}

    def count(self, wanted: Region, pinned: Mapping[int, int]) -> tuple[int, int]:
        """As `Layout.holders` would list them."""
        number = numel = prod(self._layout.mesh_shape[axis] for axis in self._idle if axis not in pinned)
        for dim, intervals in enumerate(wanted):
            key = dim, intervals, tuple(pinned.get(axis) for axis in self._layout.axes_of_dim[dim])
            found = self._found.get(key)
            if found is None:
                found = self._found[key] = self._layout.count_holders(dim, intervals, pinned)
            number, numel = number * found[0], numel * found[1]
        return number, numel


class _ExchangeTotals:
    """Totals of an exchange, or of a reduction into boxes or into flat pieces."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self._plan, self._route = plan, step.route
        self._pieces = step.target if isinstance(step.target, FlatPieces) else None
        self._servers, self._receivers = _Holders(self._route.source_layout), _Holders(self._route.target_layout)
        self._num_listed = 0

    def of(self, coordinate: Coordinate) -> tuple[int, int, int]:
        """Elements that a coordinate sends and receives, and messages that it sends."""
        route = self._route
        own = route.source_layout.region(coordinate)
        pinned = route.receiving_indices(coordinate)
        number = numel = kept = 0
        if pinned is not None:
            number, numel = self._receivers_of(own, pinned)
            if all(coordinate[axis] == index for axis, index in pinned.items()):
                kept = sum(_common(own, wanted) for wanted in route.target.regions(coordinate))
        received = 0
        if not route.takes_nothing(coordinate):
            serving = route.serving_indices(coordinate)
            received = sum(self._servers.count(wanted, serving)[1] for wanted in route.target.regions(coordinate))
        return numel - kept, received - kept, number - (kept > 0)

    def _receivers_of(self, own: Region, pinned: dict[int, int]) -> tuple[int, int]:
        pieces = self._pieces
        if pieces is None:
            return self._receivers.count(own, pinned)
        assert set(pieces.axes) <= set(pieces.layout.axes_where(Replicate)), f"{pieces} are of boxes that are shared"
        number = numel = 0
        for coordinate, common in pieces.layout.holders(own, dict.fromkeys(pieces.axes, 0) | pinned):
            if common == pieces.layout.region(coordinate) and not pinned.keys() & set(pieces.axes):
                num_found, found = -(-regions.numel(common) // _piece_numel(pieces, coordinate)), regions.numel(common)
            else:
                num_found, found = self._listed(pieces, coordinate, common, pinned)
            number, numel = number + num_found, numel + found
        return number, numel

    def _listed(
        self, pieces: FlatPieces, coordinate: Coordinate, common: Region, pinned: Mapping[int, int]
    ) -> tuple[int, int]:
        """Pieces of the box of a coordinate that hold any of `common`, and elements of it in them."""
        number = numel = 0
        self._num_listed += pieces.parts
        if self._num_listed > MOST_PIECES:
            source, target = self._plan.source, self._plan.target
            raise LayoutError(
                f"{source} -> {target} of {source.shape} reduces into more than {MOST_PIECES:,} pieces of boxes of "
                f"which ranks hold parts, too many to be counted among {source.num_ranks:,} ranks; explain one rank"
            )
        for part in range(pieces.parts):
            holder = pieces.coordinate_of_part(coordinate, part)
            if any(holder[axis] != index for axis, index in pinned.items() if axis in pieces.axes):
                continue
            found = sum(_common(common, wanted) for wanted in pieces.regions(holder))
            number, numel = number + (found > 0), numel + found
        return number, numel


class _GatherTotals:
    """Totals of a gather: a rank sends its flat piece to all that share the box, and receives theirs."""

    def __init__(self, step: Step) -> None:
        assert isinstance(step.source, FlatPieces), f"{step} gathers flat pieces"
        self._pieces = step.source

    def of(self, coordinate: Coordinate) -> tuple[int, int, int]:
        """Elements that a coordinate sends and receives, and messages that it sends."""
        start, stop = self._pieces.bounds(coordinate)
        others = self._pieces.parts - 1
        whole = prod(self._pieces.layout.local_shape(coordinate))
        return (stop - start) * others, whole - (stop - start), others if stop > start else 0


def _piece_numel(pieces: FlatPieces, coordinate: Coordinate) -> int:
    """Elements of the first flat piece of a coordinate's box, which has the most of all pieces; at least 1."""
    return max(1, -(-prod(pieces.layout.local_shape(coordinate)) // pieces.parts))


def _common(one: Region, other: Region) -> int:
    found = regions.intersect(one, other)
    return 0 if found is None else regions.numel(found)
