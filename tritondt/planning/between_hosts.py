"""Redistributions over several hosts, in which the link between them carries each byte once.

Source and target meet in items: an item is the part of one source region that one target region wants. A host holds an
item, or terms of it, or lacks it. An item that a host lacks crosses once, cut among all of the host's ranks, and is
spread inside; terms are reduced inside before they cross. A tuple says which rank is on which host, by position in the
mesh: hosts may lie across any axes, and have different numbers of ranks. Between two meshes the positions are those of
the ranks of either, ascending.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heapreplace
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
# Ranks of which all forms are made, to be weighed by time. Of more, making and pricing a form takes seconds.
MOST_WEIGHED = 64
# Listed in a second or two, with two for each rank. Where there are more, nearly all pairs of ranks have messages, and
# one exchange is the plan.
MOST_ITEMS, _ITEMS_OF_A_RANK = 50_000, 2


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


@dataclass(frozen=True, eq=False, slots=True)
class Cover:
    """Hosts that hold all terms of a region; where there are none, some that do together, and the terms of each.

    Covers of the same hosts have the same number.
    """

    full: tuple[int, ...]
    terms_of: Mapping[int, tuple[int, ...]]
    place_of: Mapping[int, int]
    number: int


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
        self.ranks_of: dict[int, list[int]] = defaultdict(list)
        self.holders: dict[Indices, dict[int, dict[int, list[int]]]] = {}
        self.wanting: dict[Indices, dict[int, list[int]]] = {}
        self._place = list[int]()
        self.held_by, self._wanted_by = dict[int, Indices](), dict[int, Indices]()
        first = self._enter(route)
        self._num_terms, self._covers = route.contributions, dict[tuple[Indices, int | None], Cover]()
        self._numbers_of_hosts = dict[tuple[tuple[int, ...], ...], int]()
        self.num_wanting = self._numbered_wanting()
        self.items = tuple(self._listed(first, route))
        self.are_listed = len(self.items) <= self._most_items
        self.cover_of = tuple(map(self._cover, self.items if self.are_listed else ()))
        self._bucket_of = self._buckets()
        self._cuts: dict[tuple[int, int], dict[int, tuple[Span, ...]]] = {}
        self._served: dict[tuple[int, int], Mapping[int, Sequence[int]]] = {}
        self._sums_of: dict[tuple[int, int], tuple[list[int], dict[int, int]]] = {}

    def _enter(self, route: Route) -> dict[Indices, Coordinate]:
        """Notes what each rank holds and wants; the first coordinate that wants each target region."""
        for position, host in enumerate(self.hosts):
            self._place.append(len(self.ranks_of[host]))
            self.ranks_of[host].append(position)
        place_of = {rank: position for position, rank in enumerate(self.members)}
        sources, targets = (self.members, self.members) if self.ranks is None else self.ranks
        for rank, coordinate in zip(sources, self.source.coordinates(), strict=True):
            position, held = place_of[rank], tuple(coordinate[axis] for axis in self._held_axes)
            terms = self.holders.setdefault(held, {}).setdefault(self.hosts[position], {})
            terms.setdefault(route.contribution(coordinate), []).append(position)
            self.held_by[position] = held
        first = dict[Indices, Coordinate]()
        for rank, coordinate in zip(targets, self.target.coordinates(), strict=True):
            if route.takes_nothing(coordinate):
                continue
            position, wanted = place_of[rank], tuple(coordinate[axis] for axis in self._wanted_axes)
            self.wanting.setdefault(wanted, {}).setdefault(self.hosts[position], []).append(position)
            self._wanted_by[position] = wanted
            first.setdefault(wanted, coordinate)
        return first

    @property
    def _most_items(self) -> int:
        return max(MOST_ITEMS, _ITEMS_OF_A_RANK * len(self.hosts))

    def _numbered_wanting(self) -> dict[Indices, int]:
        """A number for the hosts that want each target region, equal for the same hosts."""
        number_of: dict[tuple[int, ...], int] = {}
        return {
            wanted: number_of.setdefault(tuple(by_host), len(number_of)) for wanted, by_host in self.wanting.items()
        }

    def _listed(self, first: Mapping[Indices, Coordinate], route: Route) -> Iterator[Item]:
        """All items with elements, one more than may be listed at most."""
        number, most = 0, self._most_items
        for wanted, coordinate in first.items():
            pinned = dict.fromkeys((*route.replica_axes, *self.reduced_axes), 0)
            pinned.update({axis: coordinate[axis] for axis in self._kept_axes})
            for server, region in self.source.holders(self.target.region(coordinate), pinned):
                held = tuple(server[axis] for axis in self._held_axes)
                yield Item(number, region, regions.numel(region), held, wanted)
                number += 1
                if number > most:
                    return

    def _buckets(self) -> list[list[Item]]:
        """For each item those that the same hosts hold and the same hosts want, which are cut together."""
        together: dict[tuple[int, int], list[Item]] = {}
        found = []
        for item, cover in zip(self.items, self.cover_of, strict=False):
            bucket = together.setdefault((cover.number, self.num_wanting[item.wanted_as]), [])
            bucket.append(item)
            found.append(bucket)
        return found

    def _cover(self, item: Item) -> Cover:
        """The cover of an item, one for all that the same ranks hold where it is the same whoever wants them."""
        found = self._covers.get((item.held_as, None))
        key = item.held_as, self.num_wanting[item.wanted_as]
        if found is None:
            found = self._covers.get(key)
        if found is None:
            terms, wanting = self.holders[item.held_as], self.wanting[item.wanted_as]
            full = tuple(sorted(host for host, held in terms.items() if len(held) == self._num_terms))
            is_of_all = not full and sum(map(len, terms.values())) == self._num_terms
            if is_of_all:
                terms_of = {host: tuple(sorted(terms[host])) for host in sorted(terms)}
            else:
                terms_of = {} if full else _chosen(terms, self._num_terms, wanting)
            hosts = full, tuple(terms_of)
            number = self._numbers_of_hosts.setdefault(hosts, len(self._numbers_of_hosts))
            found = Cover(full, terms_of, {host: place for place, host in enumerate(full or terms_of)}, number)
            self._covers[(item.held_as, None) if full or is_of_all else key] = found
        return found

    def contributors(self, item: Item, host: int) -> tuple[int, ...]:
        """Hosts whose terms make up an item for a host: itself alone where it holds all of them."""
        cover = self.cover_of[item.number]
        return (_contributor(cover, host),) if cover.full else tuple(cover.terms_of)

    def served_by(self, item: Item, host: int) -> Sequence[int]:
        """Hosts that want an item and get it of a host, itself too, where hosts hold the whole of it."""
        cover, wanting = self.cover_of[item.number], self.wanting[item.wanted_as]
        if len(cover.full) == 1:
            return tuple(wanting) if host == cover.full[0] else ()
        key = cover.number, self.num_wanting[item.wanted_as]
        if key not in self._served:
            found = defaultdict[int, list[int]](list)
            for other in wanting:
                found[_contributor(cover, other)].append(other)
            self._served[key] = found
        return self._served[key].get(host, ())

    def has_terms(self, item: Item, host: int) -> bool:
        """Whether a host adds terms of an item that it, or another, wants."""
        cover = self.cover_of[item.number]
        return bool(self.served_by(item, host)) if cover.full else host in cover.terms_of

    @cached_property
    def are_summed_between(self) -> bool:
        """Whether the terms of any item are on several hosts, none of which has them all."""
        return not all(cover.full for cover in self.cover_of)

    def ranks_at(self, stage: Stage) -> tuple[int, ...] | None:
        """Ranks of the world that may hold items at a stage; None on one mesh."""
        if self.ranks is None:
            return None
        return {"source": self.ranks.source, "target": self.ranks.target}.get(stage, self.ranks.either)

    def num_contributors(self, stage: Stage) -> int:
        """Most terms that come together for an item when it leaves a stage."""
        if stage == "terms":
            return max((len(cover.terms_of) or 1 for cover in self.cover_of), default=1)
        if stage != "source" or not self.reduced_axes:
            return 1
        return max((len(terms) for held, by_host in self.holders.items() for terms in by_host.values()), default=1)

    def between_hosts(self, stages: Sequence[Stage]) -> int:
        """Elements that cross between hosts when the tensor goes through these stages."""
        # Items of a bucket that the same ranks want cross as often.
        often, found = dict[tuple[int, Indices], int](), 0
        for item, cover in zip(self.items, self.cover_of, strict=True):
            key = cover.number, item.wanted_as
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
        cover, wanting = self.cover_of[item.number], self.wanting[item.wanted_as]
        common = _common(cover.place_of, wanting)
        if cover.full:
            return len(wanting) - len(common)
        return len(cover.terms_of) + len(wanting) - (2 if common else 1)

    def _crossings(self, item: Item, stages: Sequence[Stage]) -> int:
        """How often an item crosses; a number of elements for each of its own, as a sum may be shared among hosts."""
        cover, wanting, is_spread = self.cover_of[item.number], self.wanting[item.wanted_as], "shares" in stages
        num_receivers = len(wanting) if is_spread else self._num_wanting_ranks[item.wanted_as]

        def receivers(host: int) -> int:
            return 1 if is_spread else len(wanting[host])

        if cover.full or "sums" not in stages:
            num_sent = 1 if cover.full else len(cover.terms_of)
            return num_receivers * num_sent - sum(map(receivers, _common(cover.place_of, wanting)))
        owning = self._owners(item)
        return len(cover.terms_of) - (owning[0] in cover.terms_of) + num_receivers - min(map(receivers, owning))

    @cached_property
    def _num_wanting_ranks(self) -> dict[Indices, int]:
        return {wanted: sum(map(len, by_host.values())) for wanted, by_host in self.wanting.items()}

    def _owners(self, item: Item) -> tuple[int, ...]:
        """Hosts among which the sum of an item is shared: of those that want it, those with terms where there are."""
        wanting, cover = self.wanting[item.wanted_as], self.cover_of[item.number].terms_of
        return tuple(host for host in wanting if host in cover) or tuple(wanting)

    def as_held(self, stage: Stage, item: Item) -> Stage:
        """Stage of an item: where a host has all of its terms, these are summed up there, and stay."""
        return "terms" if stage == "sums" and self.cover_of[item.number].full else stage

    def held(self, stage: Stage, item: Item, host: int) -> Sequence[Span]:
        """Spans of an item at the ranks of a host that hold it at a stage."""
        stage = self.as_held(stage, item)
        if stage == "source":
            terms = self.holders[item.held_as].get(host, {})
            return [Span(rank, 0, item.numel) for ranks in terms.values() for rank in ranks]
        if stage == "sums":
            return [span for rank in self.ranks_of[host] for span in self.own(stage, item, rank)]
        if stage == "terms":
            return self.cut_on(item, host) if self.has_terms(item, host) else ()
        ranks = self.wanting[item.wanted_as].get(host, ())
        if stage == "target":
            return [Span(rank, 0, item.numel) for rank in ranks]
        return self._shares(item, host) if ranks else ()

    def own(self, stage: Stage, item: Item, position: int) -> Sequence[Span]:
        """The span of an item that one rank holds at a stage, or none."""
        stage, host = self.as_held(stage, item), self.hosts[position]
        if stage == "source":
            is_held = self.held_by.get(position) == item.held_as
        elif stage == "target":
            is_held = self._wanted_by.get(position) == item.wanted_as
        elif stage == "sums":
            ranks, part_of = self._summing(item)
            return self._part(item, len(ranks), part_of.get(position, -1), position)
        else:
            has_any = self.has_terms(item, host) if stage == "terms" else host in self.wanting[item.wanted_as]
            if not has_any:
                return ()
            if stage == "terms" or not self.is_kept(item, host):
                return self._part(item, len(self.ranks_of[host]), self._place[position], position)
            is_held = self.held_by.get(position) == item.held_as
        return (Span(position, 0, item.numel),) if is_held else ()

    def _part(self, item: Item, num_parts: int, part: int, position: int) -> Sequence[Span]:
        spans = self.cut(item, num_parts)
        place = part - spans[0].position
        return (spans[place]._replace(position=position),) if 0 <= place < len(spans) else ()

    def serving(self, stage: Stage, item: Item, receiver: int) -> Sequence[Sequence[Span]]:
        """Spans that serve a receiver of an item, for each term of it."""
        host, stage = self.hosts[receiver], self.as_held(stage, item)
        if stage == "sums":
            return [self.sums(item)]
        if stage == "terms":
            return [self.cut_on(item, other) for other in self.contributors(item, host)]
        if stage == "shares":
            return [self._replica(item, receiver) if self.is_kept(item, host) else self._shares(item, host)]
        if self.reduced_axes:  # inside the host that reduces them
            return [self._served_by(ranks, item, receiver) for ranks in self.reduced_on(item, host)]
        (other,) = self.contributors(item, host)
        if other == host:
            return [self._replica(item, receiver)]
        return [self.dealt(item, other)]

    def dealt(self, item: Item, host: int) -> list[Span]:
        """Spans of an item that the ranks of a host which hold the whole of it send to other hosts."""
        replicas = self.holders[item.held_as][host][0]
        return [Span(replicas[part], start, stop) for part, start, stop in cut([item], len(replicas))[item.number]]

    def _replica(self, item: Item, receiver: int) -> list[Span]:
        return self._served_by(self.holders[item.held_as][self.hosts[receiver]][0], item, receiver)

    def _served_by(self, replicas: Sequence[int], item: Item, receiver: int) -> list[Span]:
        return [Span(self.replica_for(replicas, receiver), 0, item.numel)]

    def replica_for(self, replicas: Sequence[int], receiver: int) -> int:
        """The receiver itself where it is one of the replicas, else one that as many others take."""
        return receiver if receiver in replicas else replicas[self._place[receiver] % len(replicas)]

    def reduced_on(self, item: Item, host: int) -> list[list[int]]:
        """Of each term that a host reduces, the ranks there that hold it."""
        cover, terms = self.cover_of[item.number], self.holders[item.held_as][host]
        return [terms[number] for number in (sorted(terms) if cover.full else cover.terms_of[host])]

    def is_kept(self, item: Item, host: int) -> bool:
        """Whether ranks of a host keep an item that they hold in the source, each the whole of it."""
        return not self.reduced_axes and host in self.holders[item.held_as]

    def _shares(self, item: Item, host: int) -> list[Span]:
        """Spans of an item that a host wants, at the ranks there that get, or keep, them first."""
        if self.is_kept(item, host):
            return [Span(rank, 0, item.numel) for rank in self.holders[item.held_as][host][0]]
        return self.cut_on(item, host)

    def cut_on(self, item: Item, host: int) -> list[Span]:
        """Spans of an item that is cut among the ranks of a host."""
        ranks = self.ranks_of[host]
        return [Span(ranks[part], start, stop) for part, start, stop in self.cut(item, len(ranks))]

    def sums(self, item: Item) -> list[Span]:
        """Spans of an item of which one rank each has the sum: one with terms of it, on hosts of as many ranks."""
        ranks = self._summing(item)[0]
        return [Span(ranks[part], start, stop) for part, start, stop in self.cut(item, len(ranks))]

    def _summing(self, item: Item) -> tuple[list[int], dict[int, int]]:
        """Ranks that have a part of the sum of an item, in the order of the parts, and the part of each."""
        key = self.cover_of[item.number].number, self.num_wanting[item.wanted_as]
        if key not in self._sums_of:
            summing = (rank for host in self._owners(item) for rank in self.ranks_of[host])
            found = sorted(summing, key=lambda rank: (self._place[rank], rank))
            self._sums_of[key] = found, {rank: part for part, rank in enumerate(found)}
        return self._sums_of[key]

    def cut(self, item: Item, num_parts: int) -> tuple[Span, ...]:
        """Spans of an item, with the number of the part, where its bucket is cut into parts."""
        bucket = self._bucket_of[item.number]
        key = bucket[0].number, num_parts
        if key not in self._cuts:
            self._cuts[key] = cut(bucket, num_parts)
        return self._cuts[key][item.number]

    def flows(self, before: Stage, after: Stage, position: int) -> Iterator[tuple[Item, Flow]]:
        """Parts of items that a rank sends, receives or keeps from one stage to the next, each once."""
        for item in self.items:
            for span in self.own(before, item, position):
                yield from ((item, flow) for flow in self._sent(before, after, item, span) if flow.receiver != position)
            for wanted in self.own(after, item, position):
                edges = self._edges(before, item)
                for term, spans in enumerate(self.serving(before, item, position)):
                    yield from ((item, flow) for flow in _flows(term, spans, wanted, edges))

    def _sent(self, before: Stage, after: Stage, item: Item, span: Span) -> Iterator[Flow]:
        """Flows from the rank of a span of an item that it holds before."""
        host, stage, goal = self.hosts[span.position], self.as_held(before, item), self.as_held(after, item)
        cover, edges = self.cover_of[item.number], self._edges(before, item)
        if stage == goal == "terms":  # on the host that has all of them, where they stay
            return
        term = cover.place_of[host] if stage == "terms" and not cover.full else 0
        if goal == "sums":
            for wanted in overlapping(self.sums(item), span.start, span.stop):
                yield from _flows(term, (span,), wanted, edges)
            return
        far = self.dealt(item, host) if stage == "source" and not self.reduced_axes else (span,)
        far = [each for each in far if each.position == span.position]
        for other in self.receiving(before, after, item, host):
            for wanted in self.held(after, item, other):
                if other == host and (stage == "source" or (stage == "shares" and self.is_kept(item, host))):
                    for number, spans in enumerate(self.serving(before, item, wanted.position)):
                        if spans[0].position == span.position:
                            yield from _flows(number, spans, wanted, ())
                else:
                    yield from _flows(term, far, wanted, edges)

    def receiving(self, before: Stage, after: Stage, item: Item, host: int) -> Sequence[int]:
        """Hosts whose ranks get an item of those of a host that holds it, from one stage to the next but sums."""
        if (before, after) in _INSIDE:
            return (host,)
        if self.as_held(before, item) != "source" and not self.cover_of[item.number].full:
            return tuple(self.wanting[item.wanted_as])
        return self.served_by(item, host)

    def _edges(self, stage: Stage, item: Item) -> tuple[int, ...]:
        """Edges of the spans that serve an item: terms are added box by box, with equal edges."""
        cover = self.cover_of[item.number]
        if self.as_held(stage, item) != "terms" or len(cover.terms_of) < 2:
            return ()
        counted = cover.terms_of if len(self.host_sizes) > 1 else [next(iter(cover.terms_of))]
        sizes = {len(self.ranks_of[host]) for host in counted}
        return tuple(sorted({edge for size in sizes for span in self.cut(item, size) for edge in span[1:]}))

    @cached_property
    def host_sizes(self) -> list[int]:
        """Numbers of ranks that hosts have, each once."""
        return sorted(set(map(len, self.ranks_of.values())))

    def common_hosts(self, item: Item) -> list[int]:
        """Hosts that want an item and have it, or terms of it, already."""
        return _common(self.cover_of[item.number].place_of, self.wanting[item.wanted_as])

    def _hosts_at(self, stage: Stage, item: Item) -> Iterable[int]:
        """Hosts that may hold an item at a stage."""
        stage, cover = self.as_held(stage, item), self.cover_of[item.number]
        if stage == "source":
            return self.holders[item.held_as]
        if stage == "sums":
            return self._owners(item)
        return (cover.full or cover.terms_of) if stage == "terms" else self.wanting[item.wanted_as]

    def moves(self, before: Stage, after: Stage) -> bool:
        """Whether any rank sends anything from one stage to the next."""
        return any(
            flow.server != flow.receiver
            for item in self.items
            for host in self._hosts_at(before, item)
            for span in self.held(before, item, host)
            for flow in self._sent(before, after, item, span)
        )


def _contributor(cover: Cover, host: int) -> int:
    """Host that serves another one, or itself, where hosts hold the whole of an item."""
    return host if host in cover.place_of else cover.full[host % len(cover.full)]


def _common(one: Mapping[int, object], other: Mapping[int, object]) -> list[int]:
    fewer, more = sorted((one, other), key=len)
    return [host for host in fewer if host in more]


def _flows(term: int, spans: Sequence[Span], wanted: Span, edges: Sequence[int]) -> Iterator[Flow]:
    """Flows of a term to a span, cut at these edges."""
    for server, start, stop in spans:
        low, high = max(start, wanted.start), min(stop, wanted.stop)
        if low < high:
            inner = edges[bisect_right(edges, low) : bisect_left(edges, high)]
            for first, last in zip([low, *inner], [*inner, high], strict=True):
                yield Flow(server, wanted.position, term, first, last)


def overlapping(spans: Sequence[Span], start: int, stop: int) -> Sequence[Span]:
    """Spans that have any of the elements [start, stop), of ascending ones.

    >>> overlapping([Span(7, 0, 2), Span(8, 2, 4), Span(9, 4, 6)], 3, 4)
    [Span(position=8, start=2, stop=4)]
    """
    low = bisect_right(spans, start, key=lambda span: span.stop)
    return spans[low : bisect_left(spans, stop, key=lambda span: span.start)]


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


def _chosen(
    terms: Mapping[int, Mapping[int, object]], num_terms: int, wanting: Container[int]
) -> dict[int, tuple[int, ...]]:
    """Hosts whose terms of a region are added, of which none has all: first those with the most lacking ones.

    Of equals, those that want the sum.
    """
    found, lacking = dict[int, tuple[int, ...]](), set(range(num_terms))
    # No host ever has more lacking terms than when it was last looked at.
    heap = [(-len(held), host not in wanting, host) for host, held in terms.items()]
    heapify(heap)
    while lacking:
        key = heap[0]
        now = lacking.intersection(terms[key[2]])
        if -len(now) != key[0]:
            heapreplace(heap, (-len(now), *key[1:]))
            continue
        heappop(heap)
        found[key[2]] = tuple(sorted(now))
        lacking -= now
    return dict(sorted(found.items()))


def divisor_on_hosts(mean_of: int, num_terms: int) -> int:
    """The factor of a mean's divisor by which each host divides its sum of float16, of at most so many terms.

    The result is no larger than a term, and fits the dtype. The sum of all hosts, in float32, is divided by the rest of
    the divisor. A power of two is taken where there is one: it divides floats exactly.

    >>> divisor_on_hosts(8, 3), divisor_on_hosts(6, 3), divisor_on_hosts(7, 4)
    (4, 3, 7)
    """
    power = 1 << (num_terms - 1).bit_length()
    if mean_of % power == 0:
        return power
    return next((found for found in range(num_terms, mean_of) if mean_of % found == 0), mean_of)


@lru_cache(maxsize=256)
def pairing_of(source: Layout, target: Layout, hosts: Hosts, ranks: MeshRanks | None = None) -> Pairing | None:
    """The pairing of two layouts over hosts; None where its items are too many to be listed."""
    found = Pairing(source, target, hosts, ranks)
    return found if found.are_listed else None


@lru_cache(maxsize=64)
def _regions(pairing: Pairing, stage: Stage, position: int) -> tuple[Region, ...]:
    return tuple(
        region
        for item in pairing.items
        for span in pairing.own(stage, item, position)
        for region in flat_regions(item.region, span.start, span.stop)
    )


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
        return _regions(self.pairing, self.stage, position_of(coordinate, self.mesh_shape))

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
    divisors: tuple[int, int]

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

    @property
    def divisor(self) -> int:
        """Divisor of a mean, applied once, where its last terms are added."""
        return self.divisors[0]

    def divisor_of(self, is_of_float16: bool) -> int:
        """Divisor of this step's sums: of float16 a factor of the mean's, as the sum of a host would overflow."""
        return self.divisors[is_of_float16]

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
        return _exchange(self.pairing, self.before, self.after, own, 0 if self.kind == "reduce" else 1)


# Prices and explanations ask for the exchanges of one rank, several times.
@lru_cache(maxsize=16)
def _exchange(pairing: Pairing, before: Stage, after: Stage, own: int, contributions: int) -> Exchange:
    sends, receives = defaultdict[int, list[Part]](list), defaultdict[int, list[Part]](list)
    for item, (server, receiver, contribution, start, stop) in pairing.flows(before, after, own):
        parts = [Part(region, contribution) for region in flat_regions(item.region, start, stop)]
        if server == own:
            sends[receiver] += parts
        if receiver == own:
            receives[server] += parts
    return exchange_of_parts(sends, receives, own, contributions)


def host_forms(
    source: Layout, target: Layout, hosts: Hosts, ranks: MeshRanks | None = None
) -> list[tuple[int, tuple[HostStep, ...]]]:
    """Forms that know hosts, each with the elements that cross between these; none where items cannot be listed.

    Of more than 64 ranks, those with the fewest elements, and of them those with the fewest steps. On one mesh no axis
    becomes Partial from `source` to `target`.
    """
    if ranks is None and moves_nothing(source, target):
        return []
    pairing = pairing_of(source, target, hosts, ranks)
    if pairing is None:
        return []
    found = ways(pairing)
    keys = [(pairing.between_hosts(each), len(each)) for each in found]
    least = min(keys)
    made = [(key[0], each) for key, each in zip(keys, found, strict=True) if key == least or len(hosts) <= MOST_WEIGHED]
    return [(crossing, steps_through(pairing, each)) for crossing, each in made]


def ways(pairing: Pairing) -> list[tuple[Stage, ...]]:
    """Stages that a tensor may go through."""
    if not pairing.reduced_axes:
        return [("source", "target"), ("source", "shares", "target")]
    found: list[tuple[Stage, ...]] = [("source", "terms", "target"), ("source", "terms", "shares", "target")]
    if pairing.are_summed_between:
        found += [("source", "terms", "sums", "target"), ("source", "terms", "sums", "shares", "target")]
    return found


def steps_through(pairing: Pairing, stages: Sequence[Stage]) -> tuple[HostStep, ...]:
    """The steps from each of some stages to the next."""
    holdings = [
        pairing.source if stage == "source" else pairing.target if stage == "target" else HostShares(pairing, stage)
        for stage in stages
    ]
    num_terms = [pairing.num_contributors(stage) for stage in stages[:-1]]
    divisors = _divisors(pairing, num_terms)
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
            divisors=divisors[number],
        )
        for number, reduces in enumerate(count > 1 for count in num_terms)
    )


def _divisors(pairing: Pairing, num_terms: Sequence[int]) -> list[tuple[int, int]]:
    """Divisors of each step of a mean, to which so many terms come: as a rule, and where messages are of float16."""
    layout, found = pairing.source, [(1, 1)] * len(num_terms)
    averaged = (axis for axis in pairing.reduced_axes if layout.placements[axis] == Partial("avg"))
    mean_of = prod(layout.mesh_shape[axis] for axis in averaged)
    *reducing, last = [number for number, count in enumerate(num_terms) if count > 1] or [0]
    on_hosts = 1
    for number in reducing:
        on_hosts = divisor_on_hosts(mean_of, num_terms[number]) if mean_of > 1 else 1
        found[number] = 1, on_hosts
    found[last] = mean_of, mean_of // on_hosts
    return found
