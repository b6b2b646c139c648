"""Findings from the recorders of all ranks: pure functions from files to findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tritondt.cli.flight.entry import Entry, Flight

Exchange = tuple[str | None, int]  # a communicator and the number of an exchange there


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that has not ended: since when, in seconds, and for whom where that is known."""

    rank: int
    entry: Entry
    seconds: float

    @property
    def peer(self) -> int | None:
        """Rank that is waited for."""
        return self.entry.peer if self.entry.peer >= 0 else None


@dataclass(frozen=True, slots=True)
class Failure:
    """An operation that failed."""

    rank: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Divergence:
    """One exchange that ranks issued differently, with the operations of each group of ranks, the largest group
    first.
    """

    exchange: Exchange
    sides: tuple[tuple[tuple[int, ...], Entry], ...]


@dataclass(frozen=True, slots=True)
class Behind:
    """A rank that never issued an exchange that others are stuck in; `last` is its last issued entry, if any."""

    rank: int
    exchange: Exchange
    waiting: tuple[int, ...]
    last: Entry | None


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that is wrong, and the numbers of ranks and operations looked at."""

    world_size: int
    num_entries: int
    missing: tuple[int, ...]
    waits: tuple[Wait, ...]
    failures: tuple[Failure, ...]
    divergence: Divergence | None
    behind: tuple[Behind, ...]
    cycles: tuple[tuple[Wait, ...], ...]

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.missing or self.waits or self.failures or self.divergence or self.behind)


def examine(flights: Sequence[Flight], patience_s: float = 1.0) -> Findings:
    """All findings; an operation under way for less than `patience_s` seconds is none."""
    world_size = flights[0].world_size
    waits = find_waits(flights, patience_s)
    failures = find_failures(flights)
    return Findings(
        world_size=world_size,
        num_entries=sum(len(flight.entries) for flight in flights),
        missing=tuple(sorted(set(range(world_size)) - {flight.rank for flight in flights})),
        waits=waits,
        failures=failures,
        divergence=find_divergence(flights),
        behind=find_behind(flights, waits, failures),
        cycles=find_cycles(waits),
    )


def find_waits(flights: Iterable[Flight], patience_s: float) -> tuple[Wait, ...]:
    """First unfinished operation of each rank and communicator; those behind it wait for it alone."""
    found = []
    for flight in flights:
        first: dict[str | None, Entry] = {}
        for entry in flight.entries:
            if entry.is_unfinished:
                first.setdefault(entry.communicator, entry)
        waits = (Wait(flight.rank, entry, flight.written_at - entry.issued_at) for entry in first.values())
        found += [wait for wait in waits if wait.seconds >= patience_s]
    return tuple(found)


def find_failures(flights: Iterable[Flight]) -> tuple[Failure, ...]:
    """Failed operations, the first one first: later ones are often its consequence."""
    found = [Failure(flight.rank, entry) for flight in flights for entry in flight.entries if entry.state == "failed"]
    return tuple(sorted(found, key=lambda failure: failure.entry.ended_at or failure.entry.issued_at))


def find_divergence(flights: Iterable[Flight]) -> Divergence | None:
    """First exchange to which ranks came with different fingerprints."""
    issued: defaultdict[Exchange, list[tuple[int, Entry]]] = defaultdict(list)
    for flight in flights:
        for entry in flight.entries:
            issued[entry.exchange].append((flight.rank, entry))
    differing = [
        (min(entry.issued_at for _, entry in members), exchange)
        for exchange, members in issued.items()
        if len({entry.fingerprint for _, entry in members}) > 1
    ]
    if not differing:
        return None
    # By number within a communicator, by time among communicators.
    _, (communicator, _) = min(differing, key=lambda found: found[0])
    exchange = min((found for _, found in differing if found[0] == communicator), key=lambda found: found[1])
    sides: defaultdict[int, list[tuple[int, Entry]]] = defaultdict(list)
    for rank, entry in issued[exchange]:
        sides[entry.fingerprint].append((rank, entry))
    by_size = sorted(sides.values(), key=lambda members: (-len(members), members[0][0]))
    return Divergence(exchange, tuple((tuple(rank for rank, _ in members), members[0][1]) for members in by_size))


def find_behind(flights: Sequence[Flight], waits: Iterable[Wait], failures: Iterable[Failure]) -> tuple[Behind, ...]:
    """Ranks that never issued an exchange that others wait for, or waited for until they failed.

    A rank belongs to a communicator where it has issued something there, or where somebody waits for it. An
    exchange that others issued after the rank's file was written says nothing about the rank.
    """
    stuck: defaultdict[Exchange, list[tuple[int, Entry]]] = defaultdict(list)
    stopped: tuple[Wait | Failure, ...] = (*waits, *failures)
    for found in stopped:
        if isinstance(found, Wait) or found.entry.peer >= 0:
            stuck[found.entry.exchange].append((found.rank, found.entry))
    behind: dict[tuple[int, str | None], Behind] = {}
    for exchange, waiting in sorted(stuck.items(), key=lambda item: item[0][1]):
        since = min(entry.issued_at for _, entry in waiting)
        named = {entry.peer for _, entry in waiting}
        for flight in flights:
            there = [entry for entry in flight.entries if entry.communicator == exchange[0]]
            if flight.written_at < since or not (there or flight.rank in named):
                continue
            if all(entry.sequence < exchange[1] for entry in there):
                last = flight.entries[-1] if flight.entries else None
                ranks = tuple(sorted(rank for rank, _ in waiting))
                behind.setdefault((flight.rank, exchange[0]), Behind(flight.rank, exchange, ranks, last))
    return tuple(behind.values())


def find_cycles(waits: Iterable[Wait]) -> tuple[tuple[Wait, ...], ...]:
    """Ranks that wait for each other in a circle, in different exchanges; each circle once, its lowest rank first.

    In one exchange, ranks that name each other wait for a third, or for bytes that are on their way.
    """
    by_rank: defaultdict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        if wait.peer is not None and wait.peer != wait.rank:
            by_rank[wait.rank].append(wait)
    found: dict[frozenset[int], tuple[Wait, ...]] = {}
    for start in sorted(by_rank):
        circle = _shortest_circle(start, by_rank)
        if circle and len({wait.entry.exchange for wait in circle}) > 1:
            found.setdefault(frozenset(wait.rank for wait in circle), circle)
    return tuple(found.values())


def _shortest_circle(start: int, by_rank: Mapping[int, Sequence[Wait]]) -> tuple[Wait, ...]:
    """Fewest waits that lead from `start` back to it; empty where none do."""
    ways: dict[int, tuple[Wait, ...]] = {start: ()}
    queue = [start]
    for rank in queue:
        for wait in by_rank.get(rank, ()):
            way = (*ways[rank], wait)
            if wait.peer == start:
                return way
            if wait.peer is not None and wait.peer not in ways:
                ways[wait.peer] = way
                queue.append(wait.peer)
    return ()
