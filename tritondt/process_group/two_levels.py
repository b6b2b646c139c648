"""Collectives of ranks on several hosts as stages: exchanges among the ranks of a host, and of all ranks between hosts.

Each host receives once what it lacks, cut among its ranks, and terms are reduced inside before they cross. Of h hosts
each sends at most (h - 1)/h of a tensor for a reduce-scatter and for an all-gather, twice that for an all-reduce; a
broadcast brings a tensor once to each. With two hosts an all-reduce is one exchange between them, of the same bytes.
Messages of one rank to one rank, and few bytes, go as they are: between hosts, and inside them apart from that.

Stages name tensors by their place in one list, in which sources come first, then targets, then a scratch tensor.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from tritondt.planning.between_hosts import divisor_on_hosts
from tritondt.process_group.collective import (
    SHORT_BYTES,
    Arrival,
    Collective,
    PeerSpan,
    Reduction,
    Span,
    TermExchange,
    cut,
)

# Stages of one collective, at most: as many numbers are free for its exchanges. Lists of tensors that lie apart take as
# many turns as a rank of the smallest host has tensors in its share; longer ones go as if each rank were a host.
MOST_STAGES = 60
# Stages beside such turns, at most: of an all-reduce among more than two hosts, two between hosts and two inside.
_NUM_OTHER_STAGES = 4


class Stage(NamedTuple):
    """One exchange: among this host's ranks, by their numbers there, where it `is_near`, else among all ranks."""

    what: Collective | TermExchange
    is_near: bool = False


class Division(NamedTuple):
    """A term of a mean that a rank, alone on its host, divides before anything is sent: from one span to another."""

    source: Span
    target: Span
    reduction: Reduction


class Stages(NamedTuple):
    """The exchanges of one rank, in order, what it divides before them, and the bytes of its scratch tensor."""

    stages: tuple[Stage, ...]
    scratch_bytes: int = 0
    divisions: tuple[Division, ...] = ()


class Hosts:
    """The hosts of a group's ranks, `of_rank` by number, as rank `own` sees them."""

    def __init__(self, of_rank: Sequence[int], own: int) -> None:
        self.of_rank, self.own, self.size = tuple(of_rank), own, len(of_rank)
        self.own_host = self.of_rank[own]
        self.numbers = sorted(set(self.of_rank))
        self.near = self.members(self.own_host)
        self.own_near = self.near.index(own)
        self.others = tuple(rank for rank in range(self.size) if self.of_rank[rank] != self.own_host)

    def members(self, host: int) -> tuple[int, ...]:
        """The ranks of a host.

        >>> Hosts((0, 1, 1, 0), 2).members(0)
        (0, 3)
        """
        return tuple(rank for rank, at in enumerate(self.of_rank) if at == host)

    @property
    def saves(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them: else bytes cross once as they are."""
        return 1 < len(self.numbers) < self.size


def stages(collective: Collective, hosts: Hosts, num_sources: int, num_targets: int) -> Stages | None:
    """The stages of a collective of so many tensors on this rank; None where all are one exchange of all ranks.

    Alike on all ranks, as the number of exchanges between hosts is, and on the ranks of a host that of those inside.
    """
    if not hosts.saves:
        return None
    build = _Build(hosts, num_sources + num_targets)
    if collective.reduction is not None:
        if _is_short(collective):
            return None
        _reduce(build, collective, collective.reduction, num_sources)
    elif collective.is_for_all:
        places = {rank: _shifted(span, num_sources) for rank, span in collective.receives}
        sent = next((span for rank, span in collective.leaving), places.get(hosts.own, _NONE))
        lengths = {rank: span[2] for rank, span in places.items()} | ({hosts.own: sent[2]} if sent[2] else {})
        if sum(lengths.values()) <= SHORT_BYTES:
            build.split(collective, num_sources)
        else:
            build.spread(places, sent, lengths)
    else:
        build.split(collective, num_sources)
    # A host of few ranks has more stages inside than one of many, and all ranks are to find the same.
    is_long = build.most_turns + _NUM_OTHER_STAGES > MOST_STAGES
    return None if is_long else Stages(tuple(build.stages), build.scratch_bytes, tuple(build.divisions))


_NONE: Span = (0, 0, 0)


def _is_short(collective: Collective) -> bool:
    """Whether terms are few enough to cross as they are, by one exchange instead of several."""
    pieces = collective.pieces
    num_bytes = pieces[0][2] * (collective.size - 1) if _is_of_one_span(collective) else sum(each[2] for each in pieces)
    return num_bytes <= SHORT_BYTES


def _is_of_one_span(collective: Collective) -> bool:
    return collective.root >= 0 or collective.is_of_all


def _shifted(span: Span, count: int) -> Span:
    return span[0] + count, span[1], span[2]


def _part(span: Span, start: int, end: int) -> Span:
    """Bytes of a span from one to another."""
    return span[0], span[1] + start, end - start


class _Shared(NamedTuple):
    """A part of the span of `rank`, from byte `start` of it to byte `end`, in the share of one of several ranks."""

    rank: int
    start: int
    end: int


def shares(lengths: Sequence[tuple[int, int]], count: int, unit: int = 1) -> list[list[_Shared]]:
    """Spans of some ranks, by rank and bytes, end to end, in `count` equal shares, cut at multiples of `unit` bytes.

    >>> [[tuple(each) for each in share] for share in shares([(4, 6), (7, 2)], 2)]
    [[(4, 0, 4)], [(4, 4, 6), (7, 0, 2)]]
    """
    ends = list(accumulate(num_bytes for _, num_bytes in lengths))
    total = ends[-1] if ends else 0
    found = list[list[_Shared]]()
    for low, high in pairwise(total // unit * number // count * unit for number in range(count + 1)):
        parts = []
        for (rank, num_bytes), end in zip(lengths, ends, strict=True):
            first, last = max(low - end + num_bytes, 0), min(high - end + num_bytes, num_bytes)
            if first < last:
                parts.append(_Shared(rank, first, last))
        found.append(parts)
    return found


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Spans of which those that follow each other in memory are one."""
    found = list[Span]()
    for span in spans:
        tensor, start, num_bytes = found[-1] if found else _NONE
        if found and span[0] == tensor and span[1] == start + num_bytes:
            found[-1] = tensor, start, num_bytes + span[2]
        else:
            found.append(span)
    return found


class _Build:
    """The stages of one rank while they are listed; the scratch tensor is number `scratch`."""

    def __init__(self, hosts: Hosts, scratch: int) -> None:
        self.hosts, self.stages = hosts, list[Stage]()
        self._scratch, self.scratch_bytes = scratch, 0
        self.most_turns = 0  # of any host: alike on all ranks
        self.divisions = list[Division]()
        self._near_divisor = 1

    def divide_inside(self, reduction: Reduction) -> Reduction:
        """The reduction of what hosts send, once each has divided its own sum of float16, which would else overflow.

        The sum of all terms has accumulators of float32, as it has on one host.
        """
        if reduction.dtype == "float16" and reduction.divisor > 1:
            most = max(len(self.hosts.members(host)) for host in self.hosts.numbers)
            self._near_divisor = divisor_on_hosts(reduction.divisor, most)
        return reduction._replace(divisor=reduction.divisor // self._near_divisor)

    def of_one_rank(self, term: Span, reduction: Reduction) -> Span:
        """The sum of a host of one rank: its term as it is, or divided where all hosts divide theirs."""
        if self._near_divisor == 1 or not term[2]:
            return term
        divided = self.scratch(term[2])
        self.divisions.append(Division(term, divided, reduction._replace(divisor=self._near_divisor)))
        return divided

    def scratch(self, num_bytes: int) -> Span:
        """A span of the scratch tensor that nothing else has."""
        start = self.scratch_bytes
        self.scratch_bytes += -(-num_bytes // 64) * 64
        return self._scratch, start, num_bytes

    def near(self, sends: Sequence[Span], receives: Sequence[Span]) -> None:
        """A stage that moves to each rank of this host a span, and of each; none where there is but one rank."""
        hosts = self.hosts
        if len(hosts.near) > 1:
            leaving, coming = (
                tuple((number, span) for number, span in enumerate(spans) if span[2] and number != hosts.own_near)
                for spans in (sends, receives)
            )
            self.stages.append(Stage(Collective(hosts.own_near, len(hosts.near), leaving, coming), is_near=True))

    def _count_turns(self, spans: Mapping[int, Span], unit: int) -> None:
        """Counts the turns in which the host that needs most moves its ranks' shares of the spans of other hosts."""
        most = 0
        for host in self.hosts.numbers:
            count = len(self.hosts.members(host))
            others = [(rank, span[2]) for rank, span in spans.items() if self.hosts.of_rank[rank] != host]
            for share in shares(others, count, unit) if count > 1 else ():
                most = max(most, len(_merged(_part(spans[rank], start, end) for rank, start, end in share)))
        self.most_turns += most

    def split(self, collective: Collective, num_sources: int) -> None:
        """Moves each message as it is, to other hosts first and then inside this one."""
        hosts, leaving = self.hosts, collective.sends
        coming = [(rank, _shifted(span, num_sources)) for rank, span in collective.receives]
        far = Collective(hosts.own, hosts.size, self._far(leaving), self._far(coming))
        self.stages.append(Stage(far))
        size = len(hosts.near)
        if size > 1:
            most_spans = min(collective.most_spans, size - 1)
            near = Collective(hosts.own_near, size, self._inside(leaving), self._inside(coming), most_spans)
            self.stages.append(Stage(near, is_near=True))

    def _far(self, spans: Iterable[PeerSpan]) -> tuple[PeerSpan, ...]:
        """Spans of other hosts, and of this rank itself, which it copies while messages are under way."""
        own, near = self.hosts.own, self.hosts.near
        return tuple((rank, span) for rank, span in spans if rank == own or rank not in near)

    def _inside(self, spans: Iterable[PeerSpan]) -> tuple[PeerSpan, ...]:
        """Spans of other ranks of this host, by their numbers there."""
        own, near = self.hosts.own, self.hosts.near
        return tuple((near.index(rank), span) for rank, span in spans if rank != own and rank in near)

    def near_gather(self, pieces: Sequence[Span], own: Span) -> None:
        """A stage that moves this rank's span to all of this host, and the others' to `pieces`, by number there."""
        if any(piece[2] for piece in pieces):
            self.near([own] * len(pieces), pieces)

    def near_reduce(self, pieces: Sequence[Span], result: Span, reduction: Reduction) -> None:
        """A stage that reduces a piece for each rank of this host, this rank's to `result`."""
        own, size = self.hosts.own_near, len(self.hosts.near)
        if any(piece[2] for piece in pieces):
            receives = tuple((number, result) for number in range(size))
            inside = reduction._replace(divisor=self._near_divisor)
            collective = Collective(own, size, tuple(enumerate(pieces)), receives, size - 1, inside)
            self.stages.append(Stage(collective, is_near=True))

    def spread(self, places: Mapping[int, Span], sent: Span, lengths: Mapping[int, int]) -> None:
        """Moves the span of every rank to all, of so many bytes; this rank's is at `sent`, and wanted at `places`."""
        hosts = self.hosts
        by_rank = [(rank, lengths[rank]) for rank in sorted(lengths) if lengths[rank]]
        sends, receives = list[PeerSpan](), list[PeerSpan]()
        of_near = list[list[_Shared]]()
        self._count_turns({rank: places.get(rank, sent) for rank, _ in by_rank}, 1)
        for host in hosts.numbers:
            members = hosts.members(host)
            lacking = shares([each for each in by_rank if hosts.of_rank[each[0]] != host], len(members))
            if host == hosts.own_host:
                of_near = lacking
            for member, share in zip(members, lacking, strict=True):
                sends += [(member, _part(sent, start, end)) for rank, start, end in share if rank == hosts.own]
        receives = [(rank, _part(places[rank], start, end)) for rank, start, end in of_near[hosts.own_near]]
        if sent[2] and hosts.own in places and places[hosts.own] != sent:
            sends.append((hosts.own, sent))
            receives.append((hosts.own, places[hosts.own]))
        self.stages.append(Stage(Collective(hosts.own, hosts.size, tuple(sends), tuple(receives))))
        own = [places.get(rank, sent if rank == hosts.own else _NONE) for rank in hosts.near]
        self.near_gather(own, sent)
        fragments = [_merged(_part(places[rank], start, end) for rank, start, end in share) for share in of_near]
        for pieces in _in_turns(fragments):
            self.near_gather(pieces, pieces[hosts.own_near])

    def reduce_scatter(self, pieces: Sequence[Span], target: Span, reduction: Reduction) -> None:
        """Reduces a piece for each rank, this rank's to `target`."""
        hosts, partial = self.hosts, target
        self._count_turns({rank: piece for rank, piece in enumerate(pieces) if piece[2]}, reduction.itemsize)
        others = [(rank, pieces[rank][2]) for rank in hosts.others if pieces[rank][2]]
        of_near = shares(others, len(hosts.near), reduction.itemsize)
        if len(hosts.near) == 1:
            pieces = [self.of_one_rank(piece, reduction) for piece in pieces]
            partial = pieces[hosts.own]
        leaving = [(rank, _part(pieces[rank], start, end)) for rank, start, end in of_near[hosts.own_near]]
        if len(hosts.near) > 1:
            self.near_reduce([pieces[rank] for rank in hosts.near], target, reduction)
            fragments = [_merged(_part(pieces[rank], start, end) for rank, start, end in share) for share in of_near]
            reduced = self.scratch(sum(span[2] for _, span in leaving))
            first = 0
            for turn in _in_turns(fragments):
                end = first + turn[hosts.own_near][2]
                self.near_reduce(turn, _part(reduced, first, end), reduction)
                first = end
            starts = accumulate((span[2] for _, span in leaving), initial=0)
            leaving = [
                (rank, _part(reduced, start, start + span[2]))
                for (rank, span), start in zip(leaving, starts, strict=False)
            ]
        arrivals = list[Arrival]()
        for term, host in enumerate(hosts.numbers):
            if host == hosts.own_host:
                continue
            members = hosts.members(host)
            lengths = [(rank, each[2]) for rank, each in enumerate(pieces) if hosts.of_rank[rank] != host and each[2]]
            for peer, share in zip(members, shares(lengths, len(members), reduction.itemsize), strict=True):
                arrivals += [Arrival(peer, term, start, end - start) for rank, start, end in share if rank == hosts.own]
        self.exchange_terms(leaving, arrivals, partial, target, reduction)

    def exchange_terms(
        self,
        leaving: Sequence[PeerSpan],
        arrivals: Sequence[Arrival],
        own: Span,
        target: Span,
        reduction: Reduction,
    ) -> None:
        """A stage that reduces the hosts' terms of `target`, of which this host's is at `own`."""
        number, count = self.hosts.numbers.index(self.hosts.own_host), len(self.hosts.numbers)
        exchange = TermExchange(tuple(leaving), tuple(arrivals), own, target, number, count, reduction)
        self.stages.append(Stage(exchange))

    def reduce_whole(
        self, term: Span, target: Span | None, readers: Sequence[int], reduction: Reduction
    ) -> Sequence[Span]:
        """Reduces a term of all ranks, piece by piece on the hosts of `readers`; returns the pieces by number there.

        Terms are reduced inside, cut among a host's ranks, and each rank sends its piece to readers who have a part of
        it. Pieces are parts of `target`; a rank without one has its own, in the scratch tensor, and knows no other.
        """
        hosts = self.hosts
        cuts = {host: cut(term[2], len(hosts.members(host)), reduction.itemsize) for host in hosts.numbers}
        _, low, num_bytes = cuts[hosts.own_host][hosts.own_near]
        pieces = [_NONE] * len(hosts.near)
        if target is not None:
            pieces = [_part(target, start, start + count) for _, start, count in cuts[hosts.own_host]]
        elif len(hosts.near) > 1:
            pieces[hosts.own_near] = self.scratch(num_bytes)
        place = partial = pieces[hosts.own_near]
        if len(hosts.near) == 1:
            partial = self.of_one_rank(term, reduction)
        else:
            inside = [_part(term, start, start + count) for _, start, count in cuts[hosts.own_host]]
            self.near_reduce(inside, place, reduction)
        leaving, arrivals = list[PeerSpan](), list[Arrival]()
        for number, host in enumerate(hosts.numbers):
            if host == hosts.own_host:
                continue
            for peer, (_, start, count) in zip(hosts.members(host), cuts[host], strict=True):
                first, last = max(start, low) - low, min(start + count, low + num_bytes) - low
                if first < last and peer in readers:
                    leaving.append((peer, _part(partial, first, last)))
                if first < last and hosts.own in readers:
                    arrivals.append(Arrival(peer, number, first, last - first))
        both = (partial, place) if hosts.own in readers else (_NONE, _NONE)
        self.exchange_terms(leaving, arrivals, *both, reduction)
        return pieces


def _in_turns(fragments: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """The first span of each list, then the second, and so on; of no bytes where a list has no more.

    >>> _in_turns([[(0, 0, 4), (1, 0, 2)], [(0, 4, 6)]])
    [[(0, 0, 4), (0, 4, 6)], [(1, 0, 2), (0, 0, 0)]]
    """
    most = max(map(len, fragments), default=0)
    return [[each[turn] if turn < len(each) else _NONE for each in fragments] for turn in range(most)]


def _reduce(build: _Build, collective: Collective, reduction: Reduction, num_sources: int) -> None:
    hosts, pieces, reduction = build.hosts, collective.pieces, build.divide_inside(reduction)
    if not _is_of_one_span(collective):
        build.reduce_scatter(pieces, _shifted(collective.result, num_sources), reduction)
        return
    term, root = pieces[0], collective.root
    target = _shifted(term, num_sources)
    if root >= 0:
        _reduce_to(build, term, target, root, reduction)
    elif len(hosts.numbers) == 2:
        found = build.reduce_whole(term, target, range(hosts.size), reduction)
        build.near_gather(found, found[hosts.own_near])
    else:
        of_hosts = cut(term[2], len(hosts.numbers), reduction.itemsize)
        places = dict[int, Span]()
        for host, (_, start, num_bytes) in zip(hosts.numbers, of_hosts, strict=True):
            members = hosts.members(host)
            for rank, (_, first, count) in zip(members, cut(num_bytes, len(members), reduction.itemsize), strict=True):
                places[rank] = _part(target, start + first, start + first + count)
        terms = [(term[0], places[rank][1], places[rank][2]) for rank in range(hosts.size)]
        build.reduce_scatter(terms, places[hosts.own], reduction)
        build.spread(places, places[hosts.own], {rank: span[2] for rank, span in places.items()})


def _reduce_to(build: _Build, term: Span, target: Span, root: int, reduction: Reduction) -> None:
    """Reduces a term to the root's target: piece by piece on the ranks of its host, which send it theirs."""
    hosts = build.hosts
    readers = hosts.members(hosts.of_rank[root])
    # Whoever is not the root has the result nowhere, and keeps its term.
    pieces = build.reduce_whole(term, target if hosts.own == root else None, readers, reduction)
    if hosts.own not in readers:
        return
    root_near, own = readers.index(root), hosts.own_near
    to_root = [pieces[own] if number == root_near else _NONE for number in range(len(pieces))]
    build.near(to_root, pieces if own == root_near else [_NONE] * len(pieces))
