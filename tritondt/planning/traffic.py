"""Bytes that move in a redistribution: from which rank to which, how many, counted here for everybody who asks.

Three functions answer, the dearest first. All messages are listed for pictures and links of small worlds. The totals
of each rank are counted without a list: who serves whom is a product over the dims and over the axes that cut none, so
that 65,536 ranks take seconds. The busiest rank's share is estimated in closed form, for prices.
"""

from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from tritondt.errors import LayoutError
from tritondt.planning.between_hosts import Hosts, HostStep
from tritondt.planning.collectives import Collective, group_of
from tritondt.planning.exchange import Exchange, Route
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.host_counts import HostCounts, Pairs
from tritondt.planning.plan import Plan, Step, common_cuts
from tritondt.planning.spread import Spread
from tritondt.sharding import intervals as regions
from tritondt.sharding.coordinates import coordinate_at, position_of
from tritondt.sharding.cut import chunk_bounds
from tritondt.sharding.intervals import Intervals, Region
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Replicate, Shard
from tritondt.sharding.strides import dense_strides

# Listing them takes 20 s where one of 65,536 ranks sends to all the others.
MOST_MESSAGES = 200_000
# Pairs of a sender's and a receiver's part that are listed, at some 3 us each.
MOST_PAIRS = 5_000_000
# Pairs that a flat piece of a box counts for of which a sender holds a part.
_PIECE_PAIRS = 2


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

    Raises LayoutError where too many pairs of parts would have to be listed.

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
        traffic = step_traffic(step)
        for rank, coordinate in enumerate(plan.source.coordinates()):
            kept = traffic.kept(coordinate)
            num_receivers, numel = traffic.counts(traffic.served(coordinate))
            sent[rank] += (numel - kept) * itemsize
            received[rank] += (traffic.arriving(coordinate) - kept) * itemsize
            messages[rank] += num_receivers - (kept > 0)
    return RankTotals(tuple(sent), tuple(received), tuple(messages))


@dataclass(frozen=True)
class RankTraffic:
    """Bytes and messages of a redistribution; `links` has bytes by sender and receiver, as positions in the mesh."""

    num_ranks: int
    links: Mapping[tuple[int, int], int]
    messages: tuple[int, ...]

    @cached_property
    def sent(self) -> list[int]:
        """Bytes that each rank sends."""
        return self._sums(0)

    @cached_property
    def received(self) -> list[int]:
        """Bytes that each rank receives."""
        return self._sums(1)

    def _sums(self, end: int) -> list[int]:
        found = [0] * self.num_ranks
        for link, num_bytes in self.links.items():
            found[link[end]] += num_bytes
        return found

    @property
    def spreads(self) -> dict[str, Spread]:
        """Spreads of bytes sent, bytes received and messages sent."""
        return RankTotals(tuple(self.sent), tuple(self.received), self.messages).spreads

    def blocks(self, most: int) -> tuple[list[list[int]], int]:
        """Bytes between groups of neighbouring ranks, at most `most` groups, a row for each sending one; ranks a group.

        >>> RankTraffic(4, {(0, 1): 5, (0, 3): 7}, (2, 0, 0, 0)).blocks(2)
        ([[5, 7], [0, 0]], 2)
        """
        size = -(-self.num_ranks // most)
        count = -(-self.num_ranks // size)
        rows = [[0] * count for _ in range(count)]
        for (sender, receiver), num_bytes in self.links.items():
            rows[sender // size][receiver // size] += num_bytes
        return rows, size


def rank_traffic(plan: Plan, itemsize: int) -> RankTraffic:
    """Traffic of all steps of a plan whose messages hold elements of `itemsize` bytes.

    Raises LayoutError where there are more than 200,000 messages.

    >>> from tritondt.planning.cost import CostTable
    >>> from tritondt.planning.planner import make_plan
    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((2,), parse_placements(text), (5, 2)) for text in ("S0", "R"))
    >>> rank_traffic(make_plan(source, target, 4, CostTable()), 4).links
    {(0, 1): 24, (1, 0): 16}
    """
    links: dict[tuple[int, int], int] = defaultdict(int)
    messages = [0] * plan.source.num_ranks
    total = 0
    for step in plan.steps:
        of_hosts = step_traffic(step) if isinstance(step, HostStep) and step.moving_axes else None
        for rank, coordinate in enumerate(plan.source.coordinates()) if step.moving_axes else ():
            if step.collective is not None:
                group, numel = ring_of(step, step.collective, rank)
                links[rank, group[(group.index(rank) + 1) % len(group)]] += numel * itemsize
                messages[rank] += 1
                continue
            sends = (
                _sends(step.exchange(coordinate)) if of_hosts is None else _receivers(of_hosts.served(coordinate), rank)
            )
            total += len(sends)
            if total > MOST_MESSAGES:
                raise LayoutError(
                    f"{plan.source} -> {plan.target} of {plan.source.shape} has more than {MOST_MESSAGES:,} messages "
                    f"between its {plan.source.num_ranks:,} ranks, too many to be listed for a picture or a topology; "
                    "what each rank sends and receives is counted without (--all-ranks, rank_totals)"
                )
            messages[rank] += len(sends)
            for peer, numel in sends:
                links[rank, peer] += numel * itemsize
    return RankTraffic(plan.source.num_ranks, dict(links), tuple(messages))


def _sends(found: Exchange) -> list[tuple[int, int]]:
    return [(message.peer, message.numel) for message in found.sends]


def _receivers(served: tuple[Pairs, ...], own: int) -> list[tuple[int, int]]:
    """Receivers of a product of one factor, and elements for each."""
    pairs = array("q", *served) if served else array("q")
    return [pair for pair in zip(pairs[::2], pairs[1::2], strict=True) if pair[0] != own]


def elements_between_hosts(
    steps: Iterable[Step], hosts: Mapping[int, int] | Hosts, ranks: Iterable[int]
) -> dict[tuple[int, int], int]:
    """Elements that some ranks receive from other hosts in all of some steps, by sending and receiving host.

    `hosts` has the number of the host of each position in the mesh, and `ranks` are such positions; between two meshes
    those of each rank of either, and such ranks. Of a collective of NCCL the elements are those of rings that pass
    through host after host and share the ranks' links: each rank receives an equal part.

    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((4,), parse_placements(text), (8,)) for text in ("S0", "R"))
    >>> elements_between_hosts([Step("exchange", source, target)], (0, 0, 1, 1), [0, 2])
    {(1, 0): 4, (0, 1): 4}
    """
    found: dict[tuple[int, int], int] = defaultdict(int)
    moving = [step for step in steps if step.moving_axes]
    for rank in ranks if hosts else ():
        for step in moving:
            if step.collective is not None:
                for pair, numel in _share_of_rings(step, step.collective, hosts, rank):
                    found[pair] += numel
                continue
            for message in step.exchange_of(rank).receives:
                if hosts[message.peer] != hosts[rank]:
                    found[hosts[message.peer], hosts[rank]] += message.numel
    return dict(found)


def _share_of_rings(
    step: Step, collective: Collective, hosts: Mapping[int, int] | Hosts, rank: int
) -> Iterator[tuple[tuple[int, int], int]]:
    """Elements that a rank receives from other hosts as its part of a collective's rings, by hosts that send them."""
    group, moved = ring_of(step, collective, rank)
    in_turn = sorted({hosts[position] for position in group})
    place, count = group.index(rank), len(group)
    part = moved * (place + 1) // count - moved * place // count
    for before, after in zip(in_turn[-1:] + in_turn[:-1], in_turn, strict=True):
        if before != after:
            yield (before, after), part


def ring_of(step: Step, collective: Collective, rank: int) -> tuple[tuple[int, ...], int]:
    """The group of a rank in a step that is a collective of NCCL, and the elements that each of it sends in a ring."""
    coordinate = coordinate_at(rank, step.source.mesh_shape)
    whole = step.target_layout if collective.op is None else step.route.source_layout
    group = group_of(step.source.mesh_shape, collective.axes, coordinate)
    return group, collective._replace(numel=prod(whole.local_shape(coordinate))).moved_elements


def crossing_elements(step: Step, hosts: Hosts) -> int | None:
    """Elements that all ranks of a step on one mesh send to other hosts, without a list of the messages.

    `hosts` has the host of each position in the mesh. None where too many pairs of ranks, or of parts, would have to be
    listed.

    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((4,), parse_placements(text), (8,)) for text in ("S0", "R"))
    >>> crossing_elements(Step("exchange", source, target), (0, 0, 1, 1))
    16
    """
    if not step.moving_axes:
        return 0
    traffic, num_pairs, found = step_traffic(step), 0, 0
    # Senders that send alike send as much to each host.
    to_host_of: dict[tuple[Pairs, ...], dict[int, int]] = {}
    try:
        for rank, coordinate in enumerate(product(*map(range, step.source.mesh_shape))):
            served = traffic.served(coordinate)
            num_receivers, numel = traffic.counts(served)
            if served not in to_host_of:
                num_pairs += num_receivers
                if num_pairs > MOST_PAIRS:
                    return None
                to_host_of[served] = _numel_to_hosts(served, hosts)
            found += numel - to_host_of[served].get(hosts[rank], 0)
    except LayoutError:
        return None
    return found


def _numel_to_hosts(served: tuple[Pairs, ...], hosts: Hosts) -> dict[int, int]:
    """Elements by host of the receivers of a product of pairs; none of no pairs."""
    found = {0: 1} if served else {}
    for factor in served:
        pairs = array("q", factor)
        places, numels = pairs[::2], pairs[1::2]
        found = {
            position + place: numel * times
            for position, numel in found.items()
            for place, times in zip(places, numels, strict=True)
        }
    to_host: dict[int, int] = defaultdict(int)
    for position, numel in found.items():
        to_host[hosts[position]] += numel
    return to_host


class StepTraffic(ABC):
    """Elements that the ranks of a step send, keep and receive, without a list of the messages."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._num_pairs = 0
        self._counts: dict[Pairs, tuple[int, int]] = {}

    @abstractmethod
    def served(self, coordinate: Coordinate) -> tuple[Pairs, ...]:
        """Ranks that a coordinate sends to, itself too, with the elements for each; () where there are none.

        They are all choices of one pair of each factor: at the sum of the distances, with the product of the elements.
        Senders of equal ones send alike.
        """

    @abstractmethod
    def kept(self, coordinate: Coordinate) -> int:
        """Elements that a coordinate sends to itself."""

    @abstractmethod
    def arriving(self, coordinate: Coordinate) -> int:
        """Elements that reach a coordinate from all ranks, itself too."""

    def counts(self, factors: tuple[Pairs, ...]) -> tuple[int, int]:
        """Number of ranks of a product, and of all their elements; each factor is added up once."""
        number = numel = 1 if factors else 0
        for factor in factors:
            found = self._counts.get(factor)
            if found is None:
                pairs = array("q", factor)
                found = self._counts[factor] = len(pairs) // 2, sum(pairs[1::2])
            number, numel = number * found[0], numel * found[1]
        return number, numel

    def count_pairs(self, num_pairs: int) -> None:
        """Counts pairs that are listed, and refuses too many."""
        self._num_pairs += num_pairs
        if self._num_pairs > MOST_PAIRS:
            layout = self._step.target_layout
            raise LayoutError(
                f"{self._step} of {layout.shape} on {layout.num_ranks:,} ranks has more than {MOST_PAIRS:,} different "
                "pairs of parts, too many to be counted among all ranks; explain one rank"
            )


def step_traffic(step: Step) -> StepTraffic:
    """Counts of a step on one mesh, whatever its kind."""
    if isinstance(step, HostStep):
        return _HostTraffic(step)
    if step.collective is not None:
        return _RingTraffic(step, step.collective)
    if isinstance(step.source, FlatPieces):
        return _GatherTraffic(step, step.source)
    return _PieceTraffic(step, step.target) if isinstance(step.target, FlatPieces) else _RouteTraffic(step)


class _HostTraffic(StepTraffic):
    """A step that knows hosts; what ranks keep is counted as far as it makes senders equal."""

    def __init__(self, step: HostStep) -> None:
        super().__init__(step)
        self._of_ranks = HostCounts(step.pairing, step.before, step.after, self.count_pairs)

    def _position(self, coordinate: Coordinate) -> int:
        return position_of(coordinate, self._step.source.mesh_shape)

    def served(self, coordinate: Coordinate) -> tuple[Pairs, ...]:
        found = self._of_ranks.served[self._position(coordinate)]
        return (found,) if found else ()

    def kept(self, coordinate: Coordinate) -> int:
        return self._of_ranks.kept[self._position(coordinate)]

    def arriving(self, coordinate: Coordinate) -> int:
        return self._of_ranks.arriving[self._position(coordinate)]


class _RingTraffic(StepTraffic):
    """A collective of NCCL, as a ring of each group in the order of its ranks."""

    def __init__(self, step: Step, collective: Collective) -> None:
        super().__init__(step)
        self._collective = collective

    def served(self, coordinate: Coordinate) -> tuple[Pairs, ...]:
        rank = position_of(coordinate, self._step.source.mesh_shape)
        group, numel = ring_of(self._step, self._collective, rank)
        return (array("q", (group[(group.index(rank) + 1) % len(group)], numel)).tobytes(),)

    def kept(self, coordinate: Coordinate) -> int:
        return 0

    def arriving(self, coordinate: Coordinate) -> int:
        return ring_of(self._step, self._collective, position_of(coordinate, self._step.source.mesh_shape))[1]


class _Holders:
    """Coordinates of a layout that hold any of a region, as a product; each of its factors is listed once."""

    def __init__(self, layout: Layout, traffic: StepTraffic) -> None:
        self._layout, self._traffic = layout, traffic
        cutting = {axis for axes in layout.axes_of_dim for axis in axes}
        self._idle = [axis for axis in range(len(layout.mesh_shape)) if axis not in cutting]
        self._strides = dense_strides(layout.mesh_shape)
        self._found: dict[tuple[int, Intervals, tuple[int | None, ...]], Pairs] = {}
        self._along: dict[tuple[int | None, ...], Pairs] = {}

    def of(self, wanted: Region, pinned: Mapping[int, int]) -> tuple[Pairs, ...]:
        """As `Layout.holders` would list them."""
        parts = tuple(self._parts(dim, intervals, pinned) for dim, intervals in enumerate(wanted))
        return (*parts, self._copies(tuple(pinned.get(axis) for axis in self._idle))) if all(parts) else ()

    def _parts(self, dim: int, wanted: Intervals, pinned: Mapping[int, int]) -> Pairs:
        key = dim, wanted, tuple(pinned.get(axis) for axis in self._layout.axes_of_dim[dim])
        found = self._found.get(key)
        if found is None:
            parts = array("q")
            for indices, common in self._layout.dim_holders(dim, wanted, pinned):
                parts.extend((sum(self._strides[axis] * index for axis, index in indices), regions.total(common)))
            self._traffic.count_pairs(len(parts) // 2)
            found = self._found[key] = parts.tobytes()
        return found

    def _copies(self, indices: tuple[int | None, ...]) -> Pairs:
        """Coordinates along the axes that cut nothing, at the given indices and at all of the others."""
        found = self._along.get(indices)
        if found is None:
            found = self._along[indices] = _places(self._layout, dict(zip(self._idle, indices, strict=True)), 1)
        return found


class _RouteTraffic(StepTraffic):
    """An exchange between boxes, or a reduction into boxes."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._route = step.route
        self._servers, self._receivers = (
            _Holders(layout, self) for layout in (self._route.source_layout, self._route.target_layout)
        )
        self._last: tuple[Coordinate, tuple[Region, dict[int, int] | None]] | None = None
        self._last_wanted: tuple[Coordinate, tuple[Region, ...]] | None = None
        placements = self._route.source_layout.placements
        self._has_all = not any(isinstance(placements[axis], Shard) for axis in self._route.kept_axes)

    def served(self, coordinate: Coordinate) -> tuple[Pairs, ...]:
        own, pinned = self._held(coordinate)
        return () if pinned is None else self._served(own, pinned)

    def _held(self, coordinate: Coordinate) -> tuple[Region, dict[int, int] | None]:
        """Region of a sender and indices of its receivers, found once for its two questions."""
        if self._last is None or self._last[0] != coordinate:
            route = self._route
            self._last = coordinate, (route.source_layout.region(coordinate), route.receiving_indices(coordinate))
        return self._last[1]

    def _served(self, own: Region, pinned: Mapping[int, int]) -> tuple[Pairs, ...]:
        return self._receivers.of(own, pinned)

    def kept(self, coordinate: Coordinate) -> int:
        own, pinned = self._held(coordinate)
        if pinned is None or any(coordinate[axis] != index for axis, index in pinned.items()):
            return 0
        return sum(_common(own, wanted) for wanted in self._wanted(coordinate))

    def _wanted(self, coordinate: Coordinate) -> tuple[Region, ...]:
        """Regions of a receiver, found once for its two questions."""
        if self._last_wanted is None or self._last_wanted[0] != coordinate:
            self._last_wanted = coordinate, self._route.target.regions(coordinate)
        return self._last_wanted[1]

    def arriving(self, coordinate: Coordinate) -> int:
        if self._route.takes_nothing(coordinate):
            return 0
        wanted = self._wanted(coordinate)
        if self._has_all:  # each term of each wanted element arrives once
            return self._route.contributions * sum(map(regions.numel, wanted))
        serving = self._route.serving_indices(coordinate)
        return sum(self.counts(self._servers.of(each, serving))[1] for each in wanted)


class _PieceTraffic(_RouteTraffic):
    """A reduction into flat pieces of boxes, which senders hold whole or in part."""

    def __init__(self, step: Step, pieces: FlatPieces) -> None:
        super().__init__(step)
        self._pieces = pieces
        self._found: dict[tuple[Region, tuple[tuple[int, int], ...]], tuple[Pairs, ...]] = {}

    def _served(self, own: Region, pinned: Mapping[int, int]) -> tuple[Pairs, ...]:
        key = own, tuple(sorted(pinned.items()))
        if key not in self._found:
            pairs = array("q", self._listed(own, pinned))
            self._found[key] = (pairs.tobytes(),) if pairs else ()
        return self._found[key]

    def _listed(self, own: Region, pinned: Mapping[int, int]) -> Iterator[int]:
        pieces = self._pieces
        for box, common in pieces.layout.holders(own, {**dict.fromkeys(pieces.axes, 0), **pinned}):
            is_whole, size = common == pieces.layout.region(box), regions.numel(common)
            self.count_pairs(pieces.parts if is_whole else _PIECE_PAIRS * pieces.parts)
            for part in range(pieces.parts):
                holder = pieces.coordinate_of_part(box, part)
                if any(holder[axis] != index for axis, index in pinned.items()):
                    continue
                if is_whole:
                    start, stop = chunk_bounds(size, pieces.parts, part)
                    numel = stop - start
                else:
                    numel = sum(_common(common, wanted) for wanted in pieces.regions(holder))
                if numel:
                    yield from (pieces.layout.position(holder), numel)


class _GatherTraffic(StepTraffic):
    """A gather: a rank sends its flat piece to all that share the box, and receives theirs."""

    def __init__(self, step: Step, pieces: FlatPieces) -> None:
        super().__init__(step)
        self._pieces = pieces
        self._found: dict[tuple[Coordinate, int], tuple[Pairs, ...]] = {}
        self._boxes: dict[Coordinate, int] = {}

    def served(self, coordinate: Coordinate) -> tuple[Pairs, ...]:
        numel = self.kept(coordinate)
        if not numel:
            return ()
        key = tuple(0 if axis in self._pieces.axes else index for axis, index in enumerate(coordinate)), numel
        if key not in self._found:
            shared = {axis: None if axis in self._pieces.axes else index for axis, index in enumerate(coordinate)}
            self._found[key] = (_places(self._pieces.layout, shared, numel),)
        return self._found[key]

    def kept(self, coordinate: Coordinate) -> int:
        start, stop = chunk_bounds(self.arriving(coordinate), self._pieces.parts, self._pieces.part(coordinate))
        return stop - start

    def arriving(self, coordinate: Coordinate) -> int:
        """Elements of the box, which all ranks along the axes of the pieces share."""
        box = tuple(0 if axis in self._pieces.axes else index for axis, index in enumerate(coordinate))
        found = self._boxes.get(box)
        if found is None:
            found = self._boxes[box] = prod(self._pieces.layout.local_shape(coordinate))
        return found


def _places(layout: Layout, indices: Mapping[int, int | None], numel: int) -> Pairs:
    """Coordinates at the given indices, at all of an axis where that is None, with `numel` elements each."""
    choices = []
    for axis, stride in enumerate(dense_strides(layout.mesh_shape)):
        index = indices.get(axis, 0)
        choices.append([place * stride for place in (range(layout.mesh_shape[axis]) if index is None else [index])])
    return array("q", (number for each in product(*choices) for number in (sum(each), numel))).tobytes()


def _common(one: Region, other: Region) -> int:
    found = regions.intersect(one, other)
    return 0 if found is None else regions.numel(found)


def estimated_elements(step: Step) -> float:
    """Elements that the busiest rank receives, as a real number so that equal forms compare equal; no rank is counted.

    Exact where all pieces are equal.
    """
    if isinstance(step.source, FlatPieces):
        return step.source.layout.max_local_numel * (1 - 1 / step.source.parts)
    wanted = step.target_layout.max_local_numel / (step.target.parts if isinstance(step.target, FlatPieces) else 1)
    return wanted * (step.route.contributions - _own_fraction(step.route))


def _own_fraction(route: Route) -> float:
    """Least fraction of a target region of which the receiving rank holds a term."""
    fraction = 1.0
    for source_parts, target_parts in _parts_of_dims(route):
        if source_parts > 1 and target_parts > 1:
            return 0.0
        fraction /= source_parts
    return fraction


def estimated_peers(step: Step) -> int:
    """Ranks that the busiest rank talks to: its servers or its receivers, whichever are more; no rank is counted."""
    if isinstance(step.source, FlatPieces):
        return step.source.parts - 1
    route = step.route
    sizes = route.source_layout.mesh_shape
    servers = receivers = prod(sizes[axis] for axis in route.reduced_axes)
    pieces = step.target.axes if isinstance(step.target, FlatPieces) else ()
    fixed = {*route.replica_axes, *route.kept_axes, *route.reduced_axes}
    for source_parts, target_parts in _parts_of_dims(route):
        servers *= _overlapping(source_parts, target_parts)
        receivers *= _overlapping(target_parts, source_parts)
    if not pieces:  # along a reduced axis that the target cuts, the cut has counted its pieces already
        receivers //= prod(sizes[axis] for axis in route.reduced_axes)
        fixed -= set(route.reduced_axes)
    for axis in route.target_layout.axes_where(Replicate):
        if axis not in fixed:
            receivers *= sizes[axis]
    own = 1 if _own_fraction(route) > 0 else 0
    return max(servers, receivers) - own


def _parts_of_dims(route: Route) -> Iterator[tuple[int, int]]:
    """Per dim, numbers of parts into which source and target cut the interval that they do not cut alike."""
    source, target = route.source_layout, route.target_layout
    for dim, (source_axes, target_axes) in enumerate(zip(source.axes_of_dim, target.axes_of_dim, strict=True)):
        common = len(common_cuts(source, target, dim))
        moving = [axis for axis in source_axes[common:] if axis not in route.kept_axes]
        yield (
            prod(source.mesh_shape[axis] for axis in moving),
            prod(target.mesh_shape[axis] for axis in target_axes[common:]),
        )


def _overlapping(parts: int, others: int) -> int:
    """Greatest number of `parts` equal pieces of an interval that meet one of `others` equal pieces."""
    if others % parts == 0 or parts % others == 0:
        return max(1, parts // others)
    return min(parts, -(-parts // others) + 1)
