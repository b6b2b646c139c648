"""Files of flight recorders as values; csrc/flight/flight_json.cpp writes them."""

from __future__ import annotations

from dataclasses import dataclass

STATES = ("issued", "packing", "exchanging", "unpacking", "done", "failed")


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
