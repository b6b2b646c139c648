"""Reading of the files of a folder; a file that no flight recorder wrote is refused with the place in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tritondt.cli.flight.entry import STATES, Entry, Flight
from tritondt.cli.foreign_files import ForeignFileError, parse, read_text

VERSION = 1
_MAX_RANKS = 1 << 20  # ranks without a file are listed
_NUMBER = (int, float)
_ENTRY_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "communicator": (str, type(None)),
    "sequence": (int,),
    "operation": (str, type(None)),
    "fingerprint": (int,),
    "state": (str,),
    "site": (str, type(None)),
    "peer": (int,),
    "issued_at": _NUMBER,
    "started_at": (*_NUMBER, type(None)),
    "ended_at": (*_NUMBER, type(None)),
    "error": (str, type(None)),
    "sent_bytes": (int,),
    "received_bytes": (int,),
}
_FILE_KINDS: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "world_size": (int,),
    "host": (str,),
    "pid": (int,),
    "written_at": (str,),
    "reason": (str,),
    "entries": (list,),
}


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
    _check(found, _FILE_KINDS, "the file")
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
    _check(found, _ENTRY_KINDS, f"entry {place}")
    if found["state"] not in STATES:
        raise FlightFileError(f"entry {place} has state {found['state']!r:.100}; allowed are {', '.join(STATES)}")
    return Entry(**{name: found[name] for name in _ENTRY_KINDS})


def _check(found: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], where: str) -> None:
    for name, allowed in kinds.items():
        if name not in found:
            raise FlightFileError(f"{where} has no {name}")
        if not isinstance(found[name], allowed) or isinstance(found[name], bool):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise FlightFileError(f"{where} has {name} {found[name]!r:.100}; it must be {names}")
