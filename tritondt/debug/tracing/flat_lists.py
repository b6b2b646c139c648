"""Flat lists of what a recording keeps while a program runs, and the rows that are made of them afterwards.

A tuple for each span would be one more object for the garbage collector to visit, which collects the more often for it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tritondt.comm.packing.messages import Slice
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.debug.tracing.record import Message


class Exchanged(NamedTuple):
    """Messages of one exchange, to peers or from them."""

    communicator: PackedCommunicator
    sequence: int
    slices: Sequence[Slice]
    began_ns: int
    at_ns: int
    thread: int
    name: str


def rows(values: Sequence[Any], width: int) -> Iterator[tuple[Any, ...]]:
    """Rows of so many values each.

    >>> list(rows([1, 2, 3, 4], 2))
    [(1, 2), (3, 4)]
    """
    columns = iter(values)
    return zip(*[columns] * width, strict=True)


def messages_of_rank(values: Sequence[Any], rank: int) -> list[Message]:
    """Messages that a flat list of Exchanged has of one rank."""
    exchanges = (Exchanged(*row) for row in rows(values, len(Exchanged._fields)))
    return [message for found in exchanges if found.communicator._rank == rank for message in _messages(found)]


def _messages(found: Exchanged) -> list[Message]:
    key, ranks = found.communicator._key, found.communicator._ranks
    times = (found.began_ns, found.at_ns, found.thread, found.name)
    return [Message(key, found.sequence, ranks[piece.peer], piece.num_bytes, *times) for piece in found.slices]
