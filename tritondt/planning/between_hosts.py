"""Redistributions over several hosts, in which the link between them carries each byte once.

Source and target meet in items: an item is the part of one source region that one target region wants. A host holds an
item, or terms of it, or lacks it. An item that a host lacks crosses once, cut among all of the host's ranks, and is
spread inside; terms are reduced inside before they cross. A tuple says which rank is on which host, by position in the
mesh: hosts may lie across any axes, and have different numbers of ranks. Between two meshes the positions are those of
the ranks of either, ascending.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

from tritondt.planning.exchange import Exchange, Part, Route, exchange_of_parts, with_peers
from tritondt.planning.flat_pieces import flat_regions
from tritondt.planning.plan import Step, moves_nothing
from tritondt.sharding import intervals as regions
from tritondt.sharding.coordinates import position_of
from tritondt.sharding.intervals import Region
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Partial, ReduceOp, Shard

Hosts = tuple[int, ...]
Indices = tuple[int, ...]
# Ranks that hold an item: those of the source's layout; a share each of the terms that their host has reduced; of the
# sum of all terms; of what their host wants; those of the target's layout.
Stage = Literal["source", "terms", "sums", "shares", "target"]

# Steps all of whose messages stay inside hosts.
_INSIDE: set[tuple[Stage, Stage]] = {("source", "terms"), ("shares", "target")}
# Listed in 0.5 s. Where there are more, nearly all pairs of ranks have messages, and one exchange is the plan.
MOST_ITEMS = 50_000


class MeshRanks(NamedTuple):
    """Ranks of the world of a source's mesh and of a target's, each in row-major order."""

    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def either(self) -> tuple[int, ...]:
        """Ranks of either mesh, ascending: the positions that hosts and spans count by."""
        return tuple(sorted({*self.source, *self.target}))


class Span(NamedTuple):
    """Elements [start, stop) of an item, in its row-major order, at the rank of a position."""

    position: int
    start: int
    stop: int


class Item(NamedTuple):
    """The part of a source region that a target region wants; both are named by their indices on the axes that cut."""

    number: int
    region: Region
    numel: int
    held_as: Indices
    wanted_as: Indices


class Flow(NamedTuple):
    """Elements [start, stop) of term number `contribution` of an item, from one rank to another or to itself."""

    server: int
    receiver: int
    contribution: int
    start: int
    stop: int


class _Cover(NamedTuple):
    """Hosts that hold all terms of a region; where there are none, some that do together, and the terms of each."""

    full: tuple[int, ...]
    terms_of: Mapping[int, tuple[int, ...]]


class Pairing:
    """The items of a source and a target, and the hosts that hold and want each, on one mesh or between two.

    On one mesh, where `ranks` is None, no axis becomes Partial from source to target. `pairing_of` makes equal ones one
    object.
    """

    def __init__(self, source: Layout, target: Layout, hosts: Hosts, ranks: MeshRanks | None = None) -> None:
        self.source, self.target, self.hosts, self.ranks = source, target, hosts, ranks
        self.route = route = Route(source, target) if ranks is None else Route(source, target, *ranks)
        self.members: Sequence[int] = range(len(hosts)) if ranks is None else ranks.either
        self.reduced_axes, self._kept_axes = route.reduced_axes, tuple(sorted(route.kept_axes))
        self._held_axes = (*self._kept_axes, *source.axes_where(Shard))
        self._wanted_axes = (*self._kept_axes, *target.axes_where(Shard))
        self._ranks_of: dict[int, list[int]] = defaultdict(list)
        self._holders: dict[Indices, dict[int, dict[int, list[int]]]] = {}
        self._wanting: dict[Indices, dict[int, list[int]]] = {}
        self._place = list[int]()
        first = self._enter(route)
        self._num_terms, self._covers = route.contributions, dict[tuple[Indices, Indices], _Cover]()
        self.items = tuple(self._listed(first, route))
        self._bucket_of = self._buckets()
        self._cuts: dict[tuple[int, int], dict[int, tuple[Span, ...]]] = {}

    def _enter(self, route: Route) -> dict[Indices, Coordinate]:
        """Notes what each rank holds and wants; the first coordinate that wants each target region."""
        for position, host in enumerate(self.hosts):
            self._place.append(len(self._ranks_of[host]))
            self._ranks_of[host].append(position)
        place_of = {rank: position for position, rank in enumerate(self.members)}
        sources, targets = (self.members, self.members) if self.ranks is None else self.ranks
        for rank, coordinate in zip(sources, self.source.coordinates(), strict=True):
            position, held = place_of[rank], tuple(coordinate[axis] for axis in self._held_axes)
            terms = self._holders.setdefault(held, {}).setdefault(self.hosts[position], {})
            terms.setdefault(route.contribution(coordinate), []).append(position)
        first = dict[Indices, Coordinate]()
        for rank, coordinate in zip(targets, self.target.coordinates(), strict=True):
            if route.takes_nothing(coordinate):
                continue
            position, wanted = place_of[rank], tuple(coordinate[axis] for axis in self._wanted_axes)
            self._wanting.setdefault(wanted, {}).setdefault(self.hosts[position], []).append(position)
            first.setdefault(wanted, coordinate)
        return first

    def _listed(self, first: Mapping[Indices, Coordinate], route: Route) -> Iterator[Item]:
        """All items with elements, one more than `MOST_ITEMS` at most."""
        number = 0
        for wanted, coordinate in first.items():
            pinned = dict.fromkeys((*route.replica_axes, *self.reduced_axes), 0)
            pinned.update({axis: coordinate[axis] for axis in self._kept_axes})
            for server, region in self.source.holders(self.target.region(coordinate), pinned):
                if number > MOST_ITEMS:
                    return
                held = tuple(server[axis] for axis in self._held_axes)
                yield Item(number, region, regions.numel(region), held, wanted)
                number += 1

    def _buckets(self) -> list[list[Item]]:
        """For each item those that the same hosts hold and the same hosts want, which are cut together."""
        together: dict[object, list[Item]] = {}
        found = []
        # One object for each tuple of hosts, so that a key of many hosts is hashed once for each that wants them.
        wanting = {wanted: tuple(by_host) for wanted, by_host in self._wanting.items()}
        number_of: dict[tuple[int, ...], int] = {}
        numbers = {wanted: number_of.setdefault(hosts, len(number_of)) for wanted, hosts in wanting.items()}
        for item in self.items:
            full, terms_of = self._cover(item)
            bucket = together.setdefault((full, tuple(terms_of), numbers[item.wanted_as]), [])
            bucket.append(item)
            found.append(bucket)
        return found

    def _cover(self, item: Item) -> _Cover:
        key = item.held_as, item.wanted_as
        found = self._covers.get(key)
        if found is None:
            wanting = tuple(self._wanting[item.wanted_as])
            found = self._covers[key] = _cover(self._holders[item.held_as], self._num_terms, wanting)
        return found

    def _contributors(self, item: Item, host: int) -> tuple[int, ...]:
        """Hosts whose terms make up an item for a host: itself alone where it holds all of them."""
        full, terms_of = self._cover(item)
        if not full:
            return tuple(terms_of)
        return (host,) if host in full else (full[host % len(full)],)

    @cached_property
    def are_summed_between(self) -> bool:
        """Whether the terms of any item are on several hosts, none of which has them all."""
        return not all(self._cover(item).full for item in self.items)

    def ranks_at(self, stage: Stage) -> tuple[int, ...] | None:
        """Ranks of the world that may hold items at a stage; None on one mesh."""
        if self.ranks is None:
            return None
        return {"source": self.ranks.source, "target": self.ranks.target}.get(stage, self.ranks.either)

    def num_contributors(self, stage: Stage) -> int:
        """Most terms that come together for an item when it leaves a stage."""
        if stage == "terms":
            return max((self._most_contributors(item) for item in self.items), default=1)
        if stage != "source" or not self.reduced_axes:
            return 1
        return max((len(terms) for held, by_host in self._holders.items() for terms in by_host.values()), default=1)

    def _most_contributors(self, item: Item) -> int:
        full, terms_of = self._cover(item)
        return 1 if full else len(terms_of)

    def between_hosts(self, stages: Sequence[Stage]) -> int:
        """Elements that cross between hosts when the tensor goes through these stages."""
        # Items of a bucket that the same ranks want cross as often.
        often, found = dict[tuple[int, Indices], int](), 0
        for item in self.items:
            key = self._bucket_of[item.number][0].number, item.wanted_as
            if key not in often:
                often[key] = self._crossings(item, stages)
            found += item.numel * often[key]
        return found

    @cached_property
    def least_between_hosts(self) -> int:
        """The fewest elements that can cross between hosts; docs/theory.md has the proof, and where it holds."""
        if not self.reduced_axes:
            return self.between_hosts(("source", "shares", "target"))
        return sum(item.numel * self._least(item) for item in self.items)

    def _least(self, item: Item) -> int:
        full, terms_of = self._cover(item)
        wanting = self._wanting[item.wanted_as]
        if full:
            return sum(host not in full for host in wanting)
        return len(terms_of) + len(wanting) - (2 if any(host in terms_of for host in wanting) else 1)

    def _crossings(self, item: Item, stages: Sequence[Stage]) -> int:
        """How often an item crosses; a number of elements for each of its own, as a sum may be shared among hosts."""
        wanting, is_spread = self._wanting[item.wanted_as], "shares" in stages
        receivers = {host: 1 if is_spread else len(ranks) for host, ranks in wanting.items()}
        if "sums" not in stages or self._as_held("sums", item) != "sums":
            return sum(
                count * sum(other != host for other in self._contributors(item, host))
                for host, count in receivers.items()
            )
        owning, cover = self._owners(item), self._cover(item).terms_of
        gathered = len(cover) - (owning[0] in cover)
        return gathered + sum(receivers.values()) - min(receivers[host] for host in owning)

    def _owners(self, item: Item) -> tuple[int, ...]:
        """Hosts among which the sum of an item is shared: of those that want it, those with terms where there are."""
        wanting, cover = self._wanting[item.wanted_as], self._cover(item).terms_of
        return tuple(host for host in wanting if host in cover) or tuple(wanting)

    def _as_held(self, stage: Stage, item: Item) -> Stage:
        """Stage of an item: where a host has all of its terms, these are summed up there, and stay."""
        return "terms" if stage == "sums" and self._cover(item).full else stage

    def held(self, stage: Stage, item: Item, host: int | None = None) -> list[Span]:
        """Spans of an item at the ranks that hold it at a stage, of one host or of all."""
        stage = self._as_held(stage, item)
        if stage == "source":
            found = self._holders[item.held_as]
            hosts = found if host is None else {host} & found.keys()
            return [Span(rank, 0, item.numel) for each in hosts for ranks in found[each].values() for rank in ranks]
        if stage == "sums":
            return [span for span in self._sums(item) if host in (None, self.hosts[span.position])]
        wanting = self._wanting[item.wanted_as]
        if stage == "terms":
            having = {other for each in wanting for other in self._contributors(item, each)}
        else:
            having = set(wanting)
        if host is not None:
            having &= {host}
        if stage == "target":
            return [Span(rank, 0, item.numel) for each in sorted(having) for rank in wanting[each]]
        return [
            span
            for each in sorted(having)
            for span in (self._cut_on(item, each) if stage == "terms" else self._shares(item, each))
        ]

    def serving(self, stage: Stage, item: Item, receiver: int) -> Sequence[Sequence[Span]]:
        """Spans that serve a receiver of an item, for each term of it."""
        host, stage = self.hosts[receiver], self._as_held(stage, item)
        if stage == "sums":
            return [self._sums(item)]
        if stage == "terms":
            return [self._cut_on(item, other) for other in self._contributors(item, host)]
        if stage == "shares":
            return [self._replica(item, receiver) if self._is_kept(item, host) else self._shares(item, host)]
        if self.reduced_axes:  # inside the host that reduces them
            return [self._served_by(ranks, item, receiver) for ranks in self._reduced_on(item, host)]
        (other,) = self._contributors(item, host)
        if other == host:
            return [self._replica(item, receiver)]
        replicas = self._holders[item.held_as][other][0]
        return [[Span(replicas[part], start, stop) for part, start, stop in cut([item], len(replicas))[item.number]]]

    def _replica(self, item: Item, receiver: int) -> list[Span]:
        return self._served_by(self._holders[item.held_as][self.hosts[receiver]][0], item, receiver)

    def _served_by(self, replicas: Sequence[int], item: Item, receiver: int) -> list[Span]:
        """The receiver itself where it is one of the replicas, else one that as many others take."""
        rank = receiver if receiver in replicas else replicas[self._place[receiver] % len(replicas)]
        return [Span(rank, 0, item.numel)]

    def _reduced_on(self, item: Item, host: int) -> list[list[int]]:
        """Of each term that a host reduces, the ranks there that hold it."""
        full, terms_of = self._cover(item)
        terms = self._holders[item.held_as][host]
        return [terms[number] for number in (sorted(terms) if host in full else terms_of[host])]

    def _is_kept(self, item: Item, host: int) -> bool:
        """Whether ranks of a host keep an item that they hold in the source, each the whole of it."""
        return not self.reduced_axes and host in self._cover(item).full

    def _shares(self, item: Item, host: int) -> list[Span]:
        """Spans of an item that a host wants, at the ranks there that get, or keep, them first."""
        if self._is_kept(item, host):
            return [Span(rank, 0, item.numel) for rank in self._holders[item.held_as][host][0]]
        return self._cut_on(item, host)

    def _cut_on(self, item: Item, host: int) -> list[Span]:
        ranks = self._ranks_of[host]
        return [Span(ranks[part], start, stop) for part, start, stop in self._cut(item, len(ranks))]

    def _sums(self, item: Item) -> list[Span]:
        """Spans of an item of which one rank each has the sum: one with terms of it, on hosts of as many ranks."""
        by_place = sorted((self._place[rank], rank) for host in self._owners(item) for rank in self._ranks_of[host])
        return [Span(by_place[part][1], start, stop) for part, start, stop in self._cut(item, len(by_place))]

    def _cut(self, item: Item, num_parts: int) -> tuple[Span, ...]:
        bucket = self._bucket_of[item.number]
        key = bucket[0].number, num_parts
        if key not in self._cuts:
            self._cuts[key] = cut(bucket, num_parts)
        return self._cuts[key][item.number]

    def flows(self, before: Stage, after: Stage, host: int) -> dict[int, list[tuple[Item, Flow]]]:
        """Parts of items that each rank of a host sends, receives or keeps from one stage to the next."""
        found = defaultdict[int, list[tuple[Item, Flow]]](list)
        for item in self.items:
            serves = (before, after) not in _INSIDE and bool(self.held(before, item, host))
            servings: dict[int, _Serving] = {}
            for span in self.held(after, item, None if serves else host):
                other = self.hosts[span.position]
                if other not in servings or not self._serves_alike(before, item, other):
                    servings[other] = _Serving.of(self.serving(before, item, span.position))
                    if other != host:  # of what goes there, this host sends its own
                        servings[other] = servings[other].of_servers(lambda rank: self.hosts[rank] == host)
                for flow in servings[other].flows(span):
                    for rank in {flow.server, flow.receiver}:
                        if self.hosts[rank] == host:
                            found[rank].append((item, flow))
        return found

    def _serves_alike(self, stage: Stage, item: Item, host: int) -> bool:
        """Whether the same spans serve all receivers of a host."""
        stage = self._as_held(stage, item)
        return stage in ("terms", "sums") or (stage == "shares" and not self._is_kept(item, host))

    def moves(self, before: Stage, after: Stage) -> bool:
        """Whether any rank sends anything from one stage to the next."""
        return any(
            flow.server != span.position
            for item in self.items
            for span in self.held(after, item)
            for flow in _Serving.of(self.serving(before, item, span.position)).flows(span)
        )


class _Serving(NamedTuple):
    """Spans that serve receivers, by term, and the edges of all: terms are added box by box, with equal edges."""

    terms: tuple[tuple[int, Sequence[Span]], ...]
    edges: tuple[int, ...]

    @classmethod
    def of(cls, terms: Sequence[Sequence[Span]]) -> "_Serving":
        edges = {edge for spans in terms for span in spans for edge in span[1:]} if len(terms) > 1 else set()
        return cls(tuple(enumerate(terms)), tuple(sorted(edges)))

    def of_servers(self, takes: Callable[[int], bool]) -> "_Serving":
        """The spans of some servers, with the edges of all."""
        of_term = ((term, [span for span in spans if takes(span.position)]) for term, spans in self.terms)
        return self._replace(terms=tuple((term, spans) for term, spans in of_term if spans))

    def flows(self, wanted: Span) -> Iterator[Flow]:
        """Flows of all terms to a span."""
        for term, spans in self.terms:
            for server, start, stop in spans:
                low, high = max(start, wanted.start), min(stop, wanted.stop)
                if low < high:
                    inner = self.edges[bisect_right(self.edges, low) : bisect_left(self.edges, high)]
                    for first, last in zip([low, *inner], [*inner, high], strict=True):
                        yield Flow(server, wanted.position, term, first, last)


def cut(items: Sequence[Item], num_parts: int) -> dict[int, tuple[Span, ...]]:
    """Items laid end to end and cut into equal parts: spans of each item, by its number, with the number of the part.

    >>> items = [Item(number, (((0, 3),),), 3, (), ()) for number in (0, 1)]
    >>> cut(items, 2)[1], cut(items, 4)[0]
    ((Span(position=1, start=0, stop=3),), (Span(position=0, start=0, stop=2), Span(position=1, start=2, stop=3)))
    """
    length = -(-sum(item.numel for item in items) // num_parts)
    found, passed = dict[int, tuple[Span, ...]](), 0
    for item in items:
        parts = range(passed // length, -(-(passed + item.numel) // length))
        found[item.number] = tuple(
            Span(part, max(part * length - passed, 0), min((part + 1) * length - passed, item.numel)) for part in parts
        )
        passed += item.numel
    return found


def _cover(terms: Mapping[int, Mapping[int, object]], num_terms: int, wanting: Sequence[int]) -> _Cover:
    """The hosts whose terms of a region are added; without one that has all, first those with the most lacking ones.

    Of equals, those that want the sum.
    """
    full = tuple(sorted(host for host, held in terms.items() if len(held) == num_terms))
    terms_of, lacking = dict[int, tuple[int, ...]](), set(range(num_terms))
    if not full and sum(map(len, terms.values())) == num_terms:  # each term is on one host
        return _Cover(full, {host: tuple(sorted(held)) for host, held in sorted(terms.items())})
    while lacking and not full:
        host = min(terms, key=lambda host: (-len(lacking.intersection(terms[host])), host not in wanting, host))
        terms_of[host] = tuple(sorted(lacking.intersection(terms[host])))
        lacking.difference_update(terms_of[host])
    return _Cover(full, dict(sorted(terms_of.items())))


@lru_cache(maxsize=256)
def pairing_of(source: Layout, target: Layout, hosts: Hosts, ranks: MeshRanks | None = None) -> Pairing | None:
    """The pairing of two layouts over hosts; None where its items are too many to be listed."""
    found = Pairing(source, target, hosts, ranks)
    return found if len(found.items) <= MOST_ITEMS else None


# Ranks of one host are asked for one after the other, by whoever counts all of them.
@lru_cache(maxsize=16)
def _flows(pairing: Pairing, before: Stage, after: Stage, host: int) -> dict[int, list[tuple[Item, Flow]]]:
    return pairing.flows(before, after, host)


@dataclass(frozen=True, slots=True)
class HostShares:
    """Shares of a tensor that ranks hold on the way between hosts, in one dense tensor of one dim each."""

    pairing: Pairing
    stage: Stage

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Shape of the mesh; between two meshes the ranks of either are one axis."""
        pairing = self.pairing
        return pairing.source.mesh_shape if pairing.ranks is None else (len(pairing.members),)

    def regions(self, coordinate: Coordinate) -> tuple[Region, ...]:
        """Regions that a coordinate holds, in the order in which they lie in its tensor."""
        position, pairing = position_of(coordinate, self.mesh_shape), self.pairing
        return tuple(
            region
            for item in pairing.items
            for span in pairing.held(self.stage, item, pairing.hosts[position])
            if span.position == position
            for region in flat_regions(item.region, span.start, span.stop)
        )

    @property
    def max_local_numel(self) -> int:
        """Elements of the first rank, about as many as any has."""
        return self.local_shape((0,) * len(self.mesh_shape))[0]

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Shape of the tensor of a coordinate."""
        return (sum(map(regions.numel, self.regions(coordinate))),)

    def __str__(self) -> str:
        return f"{self.stage} of {self.pairing.target} on each host" if self.stage != "sums" else "sums"


@dataclass(frozen=True)
class HostStep(Step):
    """A step between two stages; `is_near` where no rank talks to one of another host."""

    source: Layout | HostShares
    target: Layout | HostShares
    pairing: Pairing
    before: Stage
    after: Stage
    is_last_sum: bool

    @property
    def is_near(self) -> bool:
        """Whether all messages stay inside hosts."""
        return (self.before, self.after) in _INSIDE

    @property
    def target_layout(self) -> Layout:
        """Target of all steps over these hosts."""
        return self.pairing.target

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Shape of the tensor that the step writes at a coordinate."""
        return self.target.local_shape(coordinate)

    @cached_property
    def reduce_op(self) -> ReduceOp | None:
        """Operation on terms where the step reduces."""
        if self.kind != "reduce":
            return None
        placement = self.pairing.source.placements[self.pairing.reduced_axes[0]]
        assert isinstance(placement, Partial), f"axis {self.pairing.reduced_axes[0]} of {self.source} is not Partial"
        return "sum" if placement.reduce_op == "avg" else placement.reduce_op

    @cached_property
    def divisor(self) -> int:
        """Divisor of a mean, applied once, where its last terms are added."""
        layout = self.pairing.source
        averaged = (axis for axis in self.pairing.reduced_axes if layout.placements[axis] == Partial("avg"))
        return prod(layout.mesh_shape[axis] for axis in averaged) if self.is_last_sum else 1

    @property
    def fill_op(self) -> None:
        """None: every element is written."""

    @cached_property
    def moving_axes(self) -> tuple[int, ...]:
        """All axes, unless nobody sends anything."""
        return () if self.kind == "local" else tuple(range(len(self.pairing.source.mesh_shape)))

    def fill_op_of(self, rank: int) -> ReduceOp | None:
        """Op whose identity fills the target of a rank: of those of the target's mesh that take nothing."""
        coordinate = self.target_coordinate(rank) if isinstance(self.target, Layout) else None
        if coordinate is None or not self.pairing.route.takes_nothing(coordinate):
            return None
        placements = self.pairing.target.placements
        return next(placement.reduce_op for placement in placements if isinstance(placement, Partial))

    def exchange_of(self, rank: int) -> Exchange:
        """Sends, receives and keeps of a rank; peers are ranks as well."""
        members = self.pairing.members
        if rank not in members:
            return Exchange((), (), ())
        return with_peers(self._exchange_at(members.index(rank)), members)

    def exchange(self, coordinate: Coordinate) -> Exchange:
        """Sends, receives and keeps of the rank at `coordinate` on one mesh; peers are mesh positions."""
        return self._exchange_at(self.pairing.source.position(coordinate))

    def _exchange_at(self, own: int) -> Exchange:
        sends, receives = defaultdict[int, list[Part]](list), defaultdict[int, list[Part]](list)
        flows = _flows(self.pairing, self.before, self.after, self.pairing.hosts[own]).get(own, [])
        for item, (server, receiver, contribution, start, stop) in flows:
            parts = [Part(region, contribution) for region in flat_regions(item.region, start, stop)]
            if server == own:
                sends[receiver] += parts
            if receiver == own:
                receives[server] += parts
        return exchange_of_parts(sends, receives, own, 0 if self.kind == "reduce" else 1)


def host_forms(
    source: Layout, target: Layout, hosts: Hosts, ranks: MeshRanks | None = None
) -> list[tuple[int, tuple[HostStep, ...]]]:
    """Forms that know hosts, each with the elements that cross between these; none where items cannot be listed.

    On one mesh no axis becomes Partial from `source` to `target`.
    """
    if ranks is None and moves_nothing(source, target):
        return []
    pairing = pairing_of(source, target, hosts, ranks)
    if pairing is None:
        return []
    stages: list[tuple[Stage, ...]] = [("source", "target"), ("source", "shares", "target")]
    if pairing.reduced_axes:
        stages = [("source", "terms", "target"), ("source", "terms", "shares", "target")]
        if pairing.are_summed_between:
            stages += [("source", "terms", "sums", "target"), ("source", "terms", "sums", "shares", "target")]
    return [(pairing.between_hosts(each), _steps(pairing, each)) for each in stages]


def _steps(pairing: Pairing, stages: Sequence[Stage]) -> tuple[HostStep, ...]:
    holdings = [
        pairing.source if stage == "source" else pairing.target if stage == "target" else HostShares(pairing, stage)
        for stage in stages
    ]
    reducing = [pairing.num_contributors(stage) > 1 for stage in stages[:-1]]
    last_sum = max((number for number, reduces in enumerate(reducing) if reduces), default=0)
    return tuple(
        HostStep(
            "reduce" if reduces else "exchange" if pairing.moves(*stages[number : number + 2]) else "local",
            holdings[number],
            holdings[number + 1],
            source_ranks=pairing.ranks_at(stages[number]),
            target_ranks=pairing.ranks_at(stages[number + 1]),
            pairing=pairing,
            before=stages[number],
            after=stages[number + 1],
            is_last_sum=number == last_sum,
        )
        for number, reduces in enumerate(reducing)
    )
