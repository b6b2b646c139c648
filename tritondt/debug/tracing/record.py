"""Record of one rank's part in a trace: plain values, which travel between processes as JSON."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

# Kinds of spans. "exchange" holds pack, send, keep, wait and unpack of one exchange; "redistribution" the exchanges of
# a plan of several steps; "wait" is also of a program's thread for what was issued, and for torch's collectives.
KINDS = ("op", "redistribution", "exchange", "pack", "send", "keep", "wait", "unpack", "collective")
# What a program's thread does for no other reason than that others have not come, or bytes have not.
BLOCKING = ("send", "wait")


class Span(NamedTuple):
    """Time from `start_ns` to `end_ns` of the rank's clock that one thread spent on something of a kind."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    thread: int


class Message(NamedTuple):
    """A message to `peer`, or from it, in exchange `sequence` of a communicator; when it was sent, or had arrived.

    `began_ns` is when the rank began to send, or to wait.
    """

    communicator: str
    sequence: int
    peer: int
    num_bytes: int
    began_ns: int
    at_ns: int
    thread: int
    name: str


@dataclass(frozen=True)
class Redistribution:
    """Facts about the exchanges of one description: who asked, and the explanation where the layouts are known."""

    site: str
    explanation: str = ""
    is_reduction: bool = False
    replicates: bool = False
    itemsize: int = 0


@dataclass
class RankRecord:
    """All that a rank has recorded; `program_threads` are those that are no queue of a communicator.

    `marks_ns` end steps. `dropped` counts spans for which there was no room; `failure` says why the program ended.
    `host` is equal for ranks that read one clock; `offsets` are of that clock, as `clock.Offset` has them.
    """

    rank: int
    num_ranks: int
    host: str = ""
    process: int = 0
    spans: list[Span] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    redistributions: dict[str, Redistribution] = field(default_factory=dict)
    program_threads: list[int] = field(default_factory=list)
    marks_ns: list[int] = field(default_factory=list)
    dropped: int = 0
    failure: str = ""
    offsets: list[tuple[int, int, int]] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """The record, compressed."""
        return zlib.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def from_bytes(cls, content: bytes) -> RankRecord:
        """The record that `to_bytes` has written.

        >>> record = RankRecord(1, 2, spans=[Span("op", "aten.add", 3, 5, 7)])
        >>> RankRecord.from_bytes(record.to_bytes()) == record
        True
        """
        fields = json.loads(zlib.decompress(content))
        for name, kind in (("spans", Span), ("sends", Message), ("receives", Message)):
            fields[name] = [kind(*item) for item in fields[name]]
        fields["offsets"] = [tuple(offset) for offset in fields["offsets"]]
        found = fields["redistributions"].items()
        fields["redistributions"] = {text: Redistribution(**values) for text, values in found}
        return cls(**fields)
