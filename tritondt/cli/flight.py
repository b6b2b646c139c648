"""`doctor flight`: who waits for whom, from the files of flight recorders, which csrc/flight/flight_json.cpp writes.

Files become values, these become findings by pure functions, and findings become sentences.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from tritondt.cli.foreign_files import ForeignFileError, parse, printable, read_text

STATES = ("issued", "packing", "exchanging", "unpacking", "done", "failed")
VERSION = 1
_MAX_RANKS = 1 << 20  # ranks without a file are listed
Exchange = tuple[str | None, int]  # a communicator and the number of an exchange there


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation of one rank; times in seconds since 1970, None where it has not come so far."""

    number: int
    communicator: str | None
    sequence: int
    operation: str | None
    fingerprint: int
    state: str
    site: str | None
    peer: int
    issued_at: float
    started_at: float | None
    ended_at: float | None
    error: str | None
    sent_bytes: int
    received_bytes: int

    @property
    def is_done(self) -> bool:
        """Whether the operation ended well."""
        return self.state == "done"

    @property
    def is_unfinished(self) -> bool:
        """Whether the operation has neither ended well nor failed."""
        return self.state not in ("done", "failed")

    @property
    def exchange(self) -> tuple[str | None, int]:
        """Name of the operation on all ranks: the communicator and the number there."""
        return self.communicator, self.sequence


@dataclass(frozen=True, slots=True)
class Flight:
    """File of one rank; entries in the order in which they were issued."""

    rank: int
    world_size: int
    host: str
    pid: int
    written_at: float
    reason: str
    entries: tuple[Entry, ...]


class FlightFileError(Exception):
    """A file or a folder that does not hold what flight recorders write."""


def read_flights(folder: Path) -> tuple[Flight, ...]:
    """Files rank-*.json of `folder`, by rank, of one world; FlightFileError for anything else."""
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise FlightFileError(f"{folder} holds no file rank-*.json; flight recorders write one per rank")
    flights = sorted((_read(path) for path in paths), key=lambda flight: flight.rank)
    sizes = {flight.world_size: flight.rank for flight in flights}
    if len(sizes) > 1:
        (one, rank), (other, other_rank) = list(sizes.items())[:2]
        raise FlightFileError(
            f"{folder} holds files of different worlds: rank {rank} is of {one} ranks, rank {other_rank} of {other}"
        )
    return tuple(flights)


def parse_flight(text: str) -> Flight:
    """Content of one file; FlightFileError says what is wrong in it."""
    try:
        found = parse(text)
    except ForeignFileError as error:
        raise FlightFileError(str(error)) from error
    if not isinstance(found, dict) or "version" not in found:
        raise FlightFileError("it is no flight recorder's: it has no version")
    if found["version"] != VERSION:
        raise FlightFileError(f"it has version {found['version']!r:.100}; this program reads version {VERSION}")
    _check(found, {**get_type_hints(Flight), "written_at": str, "entries": list}, "the file")
    rank, world_size = found["rank"], found["world_size"]
    if not 0 <= rank < world_size:
        raise FlightFileError(f"its rank is {rank} of {world_size}; ranks go from 0 to the world's size - 1")
    if world_size > _MAX_RANKS:
        raise FlightFileError(f"its world has {world_size} ranks; at most {_MAX_RANKS} are allowed")
    try:
        written_at = datetime.fromisoformat(found["written_at"]).timestamp()
    except (ValueError, OverflowError) as error:
        raise FlightFileError(f"its written_at is no time: {error}") from error
    entries = tuple(_entry(place, item) for place, item in enumerate(found["entries"]))
    return Flight(rank, world_size, found["host"], found["pid"], written_at, found["reason"], entries)


def _read(path: Path) -> Flight:
    try:
        flight = parse_flight(read_text(path))
    except (FlightFileError, ForeignFileError) as error:
        raise FlightFileError(f"{path} is refused: {error}") from error
    named = re.fullmatch(r"rank-(\d+)\.json", path.name)
    if named is None or int(named[1]) != flight.rank:
        raise FlightFileError(f"{path} is refused: it is of rank {flight.rank}, whose file is rank-{flight.rank}.json")
    return flight


def _entry(place: int, found: Any) -> Entry:
    if not isinstance(found, dict):
        raise FlightFileError(f"entry {place} is {found!r:.100}; it must be an object")
    _check(found, get_type_hints(Entry), f"entry {place}")
    if found["state"] not in STATES:
        raise FlightFileError(f"entry {place} has state {found['state']!r:.100}; allowed are {', '.join(STATES)}")
    return Entry(**{field.name: found[field.name] for field in fields(Entry)})


def _check(found: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """FlightFileError unless there is a value of its kind for each name; whole numbers are floats as well."""
    for name, kind in kinds.items():
        allowed = list(get_args(kind) or (kind,))
        if float in allowed:
            allowed.insert(0, int)
        if name not in found:
            raise FlightFileError(f"{where} has no {name}")
        if not isinstance(found[name], tuple(allowed)) or isinstance(found[name], bool):
            names = " or ".join("null" if each is type(None) else each.__name__ for each in allowed)
            raise FlightFileError(f"{where} has {name} {found[name]!r:.100}; it must be {names}")


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


def verdict(findings: Findings) -> str:
    """Likeliest cause in one sentence; causes come before their consequences."""
    own = [failure for failure in findings.failures if failure.entry.peer < 0]
    wanted = [wait for wait in findings.waits if wait.peer in findings.missing]
    if findings.divergence is not None:
        return _emit_divergence(findings.divergence)
    if wanted:
        waiting = [wait.rank for wait in wanted if wait.peer == wanted[0].peer]
        return (
            f"{_ranks([wanted[0].entry.peer])} left no file, and {_ranks(waiting)} {_verb(waiting, 'wait')} for it "
            f"in {_operation(wanted[0].entry)}"
        )
    if own:
        return _emit_failure(own[0])
    if findings.behind:
        return _emit_behind(findings.behind[0])
    if findings.cycles:
        return _emit_cycle(findings.cycles[0])
    if findings.failures:
        return _emit_failure(findings.failures[0])
    if findings.waits:
        return _emit_wait(max(findings.waits, key=lambda wait: wait.seconds))
    if findings.missing:
        return f"{_ranks(findings.missing)} left no file; the others ended all they began"
    return f"nothing is wrong: {findings.world_size} ranks ended all of {findings.num_entries} recorded operations"


def tell(findings: Findings) -> Iterator[str]:
    """Lines of the report: the verdict, and a line for each finding."""
    yield verdict(findings)
    if findings.missing:
        yield from ("", "no file:", f"  {_ranks(findings.missing)} of {findings.world_size}")
    if findings.divergence is not None:
        yield from ("", f"ranks diverge at {_exchange(findings.divergence.exchange)}:")
        for ranks, entry in findings.divergence.sides:
            yield f"  {_ranks(ranks)}: {_what(entry)}"
    for title, lines in (
        ("behind:", map(_emit_behind, findings.behind)),
        ("failed, the first one first:", map(_emit_failure, findings.failures)),
        ("wait for each other:", map(_emit_cycle, findings.cycles)),
        ("under way:", map(_emit_wait, findings.waits)),
    ):
        texts = [f"  {line}" for line in lines]
        if texts:
            yield from ("", title, *texts)


def fields_of(findings: Findings) -> dict[str, Any]:
    """Findings as plain values, for programs."""
    found = asdict(findings)
    divergence = found["divergence"]
    for each in [*found["behind"], *([divergence] if divergence else [])]:
        each["communicator"], each["sequence"] = each.pop("exchange")
    if divergence:
        divergence["sides"] = [{"ranks": list(ranks), "entry": entry} for ranks, entry in divergence["sides"]]
    return {
        "verdict": verdict(findings),
        "ok": findings.is_clean,
        **found,
        "cycles": [[wait.rank for wait in circle] for circle in findings.cycles],
        "waits": [{**asdict(wait), "peer": wait.peer} for wait in findings.waits],
    }


def _emit_divergence(found: Divergence) -> str:
    (ranks, entry), (others, other) = found.sides[:2]
    return (
        f"ranks diverge at {_exchange(found.exchange)}: {_ranks(ranks)} issued {_what(entry)}, "
        f"{_ranks(others)} {_what(other)}"
    )


def _emit_behind(found: Behind) -> str:
    last = "it issued nothing" if found.last is None else f"its last was {_operation(found.last)}"
    return (
        f"rank {found.rank} never issued {_exchange(found.exchange)} that {_ranks(found.waiting)} "
        f"{_verb(found.waiting, 'wait')} for; {last}"
    )


def _emit_failure(found: Failure) -> str:
    return f"rank {found.rank} failed in {_operation(found.entry)}: {found.entry.error or 'no error was recorded'}"


def _emit_cycle(found: Sequence[Wait]) -> str:
    parts = [f"rank {wait.rank} for rank {wait.peer} in {_operation(wait.entry)}" for wait in found]
    return f"{_ranks([wait.rank for wait in found])} wait for each other in a circle: {', '.join(parts)}"


def _emit_wait(found: Wait) -> str:
    if found.peer is None:
        doing = {"issued": "has not begun", "exchanging": "waits in"}.get(
            found.entry.state, f"is {found.entry.state} in"
        )
    else:
        doing = f"waits for rank {found.peer} in"
    return f"rank {found.rank} {doing} {_operation(found.entry)}, since {found.seconds:.1f} s"


def _operation(entry: Entry) -> str:
    return f"{_exchange(entry.exchange)}, {_what(entry)}"


def _what(entry: Entry) -> str:
    operation = entry.operation or "an operation without a description"
    return operation if entry.site is None else f"{operation} at {entry.site}"


def _exchange(exchange: tuple[str | None, int]) -> str:
    communicator, sequence = exchange
    return f"exchange {sequence}" + ("" if communicator is None else f" of {communicator}")


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks as text: `rank 2`, `ranks 0, 1, 3`, and runs of four and more as `ranks 0-6`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(runs) == 1 and len(runs[0]) == 1 else "ranks ") + ", ".join(parts)


def _verb(ranks: Sequence[int], verb: str) -> str:
    return verb if len(set(ranks)) > 1 else f"{verb}s"


def flight(folder: Path, patience_s: float, as_json: bool) -> None:
    """Prints the findings; ends with status 1 if something is wrong, 2 if a file cannot be read."""
    try:
        findings = examine(read_flights(folder), patience_s)
    except FlightFileError as error:
        raise click.UsageError(printable(str(error))) from error
    if as_json:
        click.echo(json.dumps(fields_of(findings), indent=2))
    else:
        for line in tell(findings):
            click.echo(printable(line))
    if not findings.is_clean:
        raise click.exceptions.Exit(1)
