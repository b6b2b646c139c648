"""Clocks of ranks held against that of the first, by pings through a store.

A rank writes a ping and waits for the first rank's answer, which holds the time there. The fastest of many says most:
the first rank's time was read somewhere between the ping and the answer, so it is off by half the round trip at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic_ns
from typing import Any

NUM_PINGS = 16


@dataclass(frozen=True)
class Offset:
    """Nanoseconds to add to a rank's clock for the first rank's, at a time of the rank's; off by `error_ns` at most."""

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class Alignment:
    """Alignment of a rank's clock to the first rank's, by one offset, or by a line through two.

    `is_one_clock` says that both processes read one clock of one machine, whose offset is none.
    """

    offsets: tuple[Offset, ...] = ()
    is_one_clock: bool = False

    def align(self, time_ns: int) -> int:
        """A time of the rank's clock as the first rank's clock shows it.

        >>> Alignment((Offset(0, 100, 5), Offset(1000, 120, 5))).align(500)
        610
        """
        if self.is_one_clock or not self.offsets:
            return time_ns
        first, last = self.offsets[0], self.offsets[-1]
        if first.at_ns == last.at_ns:
            return time_ns + first.offset_ns
        share = (time_ns - first.at_ns) / (last.at_ns - first.at_ns)
        return time_ns + round(first.offset_ns + share * (last.offset_ns - first.offset_ns))

    @property
    def error_ns(self) -> int:
        """Most that an aligned time is off, where the clocks drift evenly."""
        return 0 if self.is_one_clock else max((found.error_ns for found in self.offsets), default=0)

    def __str__(self) -> str:
        if self.is_one_clock:
            return "one clock"
        if not self.offsets:
            return "not aligned"
        found = self.offsets[0]
        return f"offset {found.offset_ns / 1e3:,.1f} us, off by {self.error_ns / 1e3:,.1f} us at most"


def aligned(offsets: tuple[Offset, ...], own_host: str, first_host: str) -> Alignment:
    """Alignment by measured offsets; of processes on one machine, whose offsets do not speak against it, none.

    >>> aligned((Offset(0, 3, 5),), "a", "a").is_one_clock, aligned((Offset(0, 9, 5),), "a", "a").is_one_clock
    (True, False)
    """
    agrees = all(abs(found.offset_ns) <= found.error_ns for found in offsets)
    return Alignment(offsets, own_host == first_host and agrees)


def answer_pings(store: Any, name: str, rank: int, patience: timedelta, now: Callable[[], int] = monotonic_ns) -> None:
    """Answers the pings of a rank, on the first one; RuntimeError where it does not come in time."""
    for number in range(NUM_PINGS):
        key = f"{name}/{rank}/{number}"
        store.wait([f"{key}/ping"], patience)
        store.set(f"{key}/pong", str(now()))


def ping(store: Any, name: str, rank: int, patience: timedelta, now: Callable[[], int] = monotonic_ns) -> Offset:
    """Offset of this rank's clock, from the fastest of its pings; RuntimeError where the first rank does not answer."""
    best: Offset | None = None
    for number in range(NUM_PINGS):
        key = f"{name}/{rank}/{number}"
        began = now()
        store.set(f"{key}/ping", "")
        store.wait([f"{key}/pong"], patience)
        there = int(store.get(f"{key}/pong"))
        ended = now()
        found = Offset((began + ended) // 2, there - (began + ended) // 2, -((began - ended) // 2))
        best = found if best is None or found.error_ns < best.error_ns else best
    assert best is not None, "there is at least one ping"
    return best
