"""Sends, receives and keeps of one rank when a tensor goes from one layout to another.

Every receiver needs its target region. Elements that the receiver holds already stay. The rest comes from the ranks
that hold it, and along an axis where the source is replicated, from those at the receiver's own index. So a rank
receives exactly the elements that it lacks. Where the source is Partial, every contributor sends its term.

Two layouts on different meshes of one world, and lists of tensors, are the same with more boxes:
`exchange_across` and `merge`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tritondt.planning.flat_pieces import FlatPieces, Holding
from tritondt.sharding import intervals as regions
from tritondt.sharding.coordinates import position_of
from tritondt.sharding.intervals import Region
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Part:
    """A region of one tensor; where the source is Partial, its term number `contribution`."""

    region: Region
    contribution: int = 0
    tensor: int = 0

    @property
    def numel(self) -> int:
        """Number of elements in the part."""
        return regions.numel(self.region)


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that go from one rank to another, one after the other, each row-major in global index order."""

    peer: int
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the message."""
        return sum(part.numel for part in self.parts)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sends, receives and keeps of one rank; `keeps` are parts that never leave the rank.

    `contributions` is how many terms every received or kept element has, per tensor: 1 where nothing is reduced, and 0
    where regions have different numbers of them.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    keeps: tuple[Part, ...]
    contributions: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Route:
    """Servers and receivers between two holdings, on one mesh or, with ranks given, between two meshes of a world."""

    source: Holding
    target: Holding
    source_ranks: Sequence[int] | None = None
    target_ranks: Sequence[int] | None = None

    @property
    def crosses(self) -> bool:
        """Whether source and target lie on different meshes."""
        return self.source_ranks is not None

    @cached_property
    def source_layout(self) -> Layout:
        """Layout under the source."""
        assert isinstance(self.source, Layout), f"an exchange starts from a layout, not from {self.source}"
        return self.source

    @cached_property
    def target_layout(self) -> Layout:
        """Layout under the target, before that is cut into flat pieces."""
        return self.target.layout if isinstance(self.target, FlatPieces) else self.target

    @cached_property
    def kept_axes(self) -> frozenset[int]:
        """Axes along which no rank talks to another: Partial before and after, or a shard that becomes a term."""
        if self.crosses:
            return frozenset()
        pairs = zip(self.source_layout.placements, self.target_layout.placements, strict=True)
        return frozenset(axis for axis, pair in enumerate(pairs) if _stays(*pair))

    @cached_property
    def reduced_axes(self) -> tuple[int, ...]:
        """Source axes whose terms are added up on the way."""
        return tuple(axis for axis in self.source_layout.axes_where(Partial) if axis not in self.kept_axes)

    @cached_property
    def contributions(self) -> int:
        """Number of terms that arrive for every element."""
        return prod(self.source_layout.mesh_shape[axis] for axis in self.reduced_axes)

    @cached_property
    def replica_axes(self) -> tuple[int, ...]:
        """Source axes along which all coordinates hold equal values."""
        return self.source_layout.axes_where(Replicate)

    @cached_property
    def single_axes(self) -> tuple[int, ...]:
        """Target axes where only index 0 takes the values: new terms of a sum or a product."""
        return tuple(
            axis
            for axis, placement in enumerate(self.target_layout.placements)
            if axis not in self.kept_axes
            and isinstance(placement, Partial)
            and placement.reduce_op in ("sum", "product")
        )

    def contribution(self, source_coordinate: Coordinate) -> int:
        """Number of the term that a source coordinate holds, in coordinate order."""
        axes, sizes = self.reduced_axes, self.source_layout.mesh_shape
        return position_of([source_coordinate[axis] for axis in axes], [sizes[axis] for axis in axes])

    def serving_indices(self, target_coordinate: Coordinate) -> dict[int, int]:
        """Source indices of the servers of a receiver, on the axes where there is a choice."""
        if not self.crosses:
            return {axis: target_coordinate[axis] for axis in (*self.replica_axes, *self.kept_axes)}
        assert self.source_ranks is not None
        assert self.target_ranks is not None
        position = self.target_layout.position(target_coordinate)
        own = _position_of(self.source_ranks, self.target_ranks[position])
        if own is not None:
            coordinate = self.source_layout.coordinate(own)
            return {axis: coordinate[axis] for axis in self.replica_axes}
        found = {}
        for axis in self.replica_axes:  # receivers outside the source mesh are dealt out evenly
            position, found[axis] = divmod(position, self.source_layout.mesh_shape[axis])
        return found

    def takes_nothing(self, target_coordinate: Coordinate) -> bool:
        """Whether a target coordinate holds only the identity of a new Partial."""
        return any(target_coordinate[axis] for axis in self.single_axes)

    def servers(self, target_coordinate: Coordinate) -> Iterator[tuple[Coordinate, Region]]:
        """Source coordinates that serve a receiver, each with the region it serves."""
        if self.takes_nothing(target_coordinate):
            return
        pinned = self.serving_indices(target_coordinate)
        for wanted in self.target.regions(target_coordinate):
            yield from self.source_layout.holders(wanted, pinned)

    def receiving_indices(self, source_coordinate: Coordinate) -> dict[int, int] | None:
        """Target indices of a server's receivers, on the axes where they are known; None where it serves nobody."""
        pinned = dict.fromkeys(self.single_axes, 0)
        if not self.crosses:
            for axis in (*self.replica_axes, *self.kept_axes):
                if pinned.setdefault(axis, source_coordinate[axis]) != source_coordinate[axis]:
                    return None
        return pinned

    def receivers(self, source_coordinate: Coordinate) -> Iterator[tuple[Coordinate, Region]]:
        """Target coordinates that a source coordinate serves, each with the region it is served."""
        pinned = self.receiving_indices(source_coordinate)
        if pinned is None:
            return
        own = self.source_layout.region(source_coordinate)
        for coordinate, common in self.target.holders(own, pinned):
            if self.crosses and any(
                source_coordinate[axis] != index for axis, index in self.serving_indices(coordinate).items()
            ):
                continue
            if isinstance(self.target, Layout):
                yield coordinate, common
                continue
            for wanted in self.target.regions(coordinate):
                found = regions.intersect(common, wanted)
                if found is not None:
                    yield coordinate, found


def _stays(source: Placement, target: Placement) -> bool:
    if not isinstance(target, Partial):
        return False
    if isinstance(source, Partial):
        return source.reduce_op == target.reduce_op
    # A mean of one shard and identities is not the shard, so a shard is gathered before it becomes P(avg).
    return isinstance(source, Shard) and target.reduce_op != "avg"


def _position_of(ranks: Sequence[int], rank: int) -> int | None:
    try:
        return ranks.index(rank)
    except ValueError:
        return None


def exchange(source: Holding, target: Holding, coordinate: Coordinate) -> Exchange:
    """Sends, receives and keeps of the rank at `coordinate` on one mesh; peers are row-major mesh positions.

    >>> found = exchange(Layout((2,), (Shard(0),), (3, 2)), Layout((2,), (Shard(1),), (3, 2)), (1,))
    >>> [(message.peer, message.parts[0].region) for message in found.receives]
    [(0, (((0, 2),), ((1, 2),)))]
    """
    route = Route(source, target)
    position = route.source_layout.position(coordinate)
    return _exchange(
        route, coordinate, coordinate, position, route.source_layout.position, route.target_layout.position
    )


def exchange_across(
    source: Holding, source_ranks: Sequence[int], target: Holding, target_ranks: Sequence[int], rank: int
) -> Exchange:
    """Sends, receives and keeps of `rank` between two meshes of a world; peers are ranks of the world.

    `source_ranks` and `target_ranks` list the meshes' ranks in row-major order; they may share ranks.
    """
    route = Route(source, target, source_ranks, target_ranks)
    source_layout, target_layout = route.source_layout, route.target_layout
    source_position, target_position = _position_of(source_ranks, rank), _position_of(target_ranks, rank)
    return _exchange(
        route,
        None if source_position is None else source_layout.coordinate(source_position),
        None if target_position is None else target_layout.coordinate(target_position),
        rank,
        lambda coordinate: source_ranks[source_layout.position(coordinate)],
        lambda coordinate: target_ranks[target_layout.position(coordinate)],
    )


def _exchange(
    route: Route,
    source_coordinate: Coordinate | None,
    target_coordinate: Coordinate | None,
    own: int,
    source_peer: Callable[[Coordinate], int],
    target_peer: Callable[[Coordinate], int],
) -> Exchange:
    sends: dict[int, list[Part]] = {}
    receives: dict[int, list[Part]] = {}
    if target_coordinate is not None:
        for coordinate, region in route.servers(target_coordinate):
            receives.setdefault(source_peer(coordinate), []).append(Part(region, route.contribution(coordinate)))
    if source_coordinate is not None:
        contribution = route.contribution(source_coordinate)
        for coordinate, region in route.receivers(source_coordinate):
            sends.setdefault(target_peer(coordinate), []).append(Part(region, contribution))
    return exchange_of_parts(sends, receives, own, route.contributions)


def exchange_of_parts(
    sends: dict[int, list[Part]], receives: dict[int, list[Part]], own: int, contributions: int
) -> Exchange:
    """Exchange of a rank by the parts that it sends to each rank, itself too, and receives from each."""
    keeps = receives.pop(own, [])
    assert sorted(sends.pop(own, []), key=_part_key) == sorted(keeps, key=_part_key), (
        f"rank {own} keeps {keeps}, which is not what it would send itself"
    )
    for parts in (*sends.values(), *receives.values()):
        parts.sort(key=_part_key)
    return Exchange(
        _messages(sends, own), _messages(receives, own), tuple(sorted(keeps, key=_part_key)), (contributions,)
    )


def renumber_peers(exchange: Exchange, ranks: Sequence[int]) -> Exchange:
    """The exchange with each peer, a position in `ranks`, renumbered to the place of its rank in ascending order.

    Peers of a mesh become peers of the communicator of its ranks.

    >>> exchange = Exchange((Message(0, ()), Message(2, ())), (), ())
    >>> [message.peer for message in renumber_peers(exchange, (7, 3, 5)).sends]
    [2, 1]
    """
    place_of = {rank: place for place, rank in enumerate(sorted(ranks))}
    return with_peers(exchange, [place_of[rank] for rank in ranks])


def with_peers(exchange: Exchange, peer_of: Mapping[int, int] | Sequence[int]) -> Exchange:
    """The exchange with `peer_of[peer]` in place of each peer.

    >>> with_peers(Exchange((Message(1, ()),), (), ()), (7, 3)).sends[0].peer
    3
    """
    sends, receives = (
        tuple(Message(peer_of[message.peer], message.parts) for message in messages)
        for messages in (exchange.sends, exchange.receives)
    )
    return replace(exchange, sends=sends, receives=receives)


def _part_key(part: Part) -> tuple[int, Region]:
    return part.contribution, part.region


def _messages(parts_of_peer: dict[int, list[Part]], own: int) -> tuple[Message, ...]:
    """One message per peer, in the order own + 1, own + 2, ... around, so that no rank is the first peer of all."""
    behind = sorted(peer for peer in parts_of_peer if peer < own)
    ahead = sorted(peer for peer in parts_of_peer if peer > own)
    return tuple(Message(peer, tuple(parts_of_peer[peer])) for peer in (*ahead, *behind))


def merge(exchanges: Sequence[Exchange], own: int, itemsizes: Sequence[int]) -> Exchange:
    """Exchanges of several tensors as one, with one message per peer; part.tensor is the number of the tensor.

    Parts of wider elements come first, so that without padding every part starts on a multiple of its own.
    """
    sends: dict[int, list[Part]] = {}
    receives: dict[int, list[Part]] = {}
    keeps: list[Part] = []
    for tensor in sorted(range(len(exchanges)), key=lambda tensor: -itemsizes[tensor]):
        single = exchanges[tensor]
        for found, messages in ((sends, single.sends), (receives, single.receives)):
            for message in messages:
                found.setdefault(message.peer, []).extend(replace(part, tensor=tensor) for part in message.parts)
        keeps += (replace(part, tensor=tensor) for part in single.keeps)
    contributions = tuple(count for single in exchanges for count in single.contributions)
    return Exchange(_messages(sends, own), _messages(receives, own), tuple(keeps), contributions)
