"""Timeline of all ranks in the trace-event format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tritondt.debug.tracing.clock import Alignment
from tritondt.debug.tracing.record import Message, RankRecord

_NOT_ALIGNED = Alignment()
# Which messages match: communicator, exchange, sender, receiver.
_Key = tuple[str, int, int, int]


def trace_events(records: Sequence[RankRecord], alignments: Mapping[int, Alignment]) -> list[dict[str, Any]]:
    """Events of all ranks: each a process, with its threads; a flow from each message's sending to its arrival.

    Times are in us from the first event on. A message of which one side alone was recorded has no flow.

    >>> from tritondt.debug.tracing.record import Span
    >>> events = trace_events([RankRecord(0, 1, spans=[Span("op", "aten.add", 2000, 5000, 7)])], {})
    >>> [(event["ph"], event.get("ts"), event.get("dur")) for event in events]
    [('M', None, None), ('M', None, None), ('M', None, None), ('X', 0.0, 3.0)]
    """
    began = min(
        (_aligned(alignments, record.rank, span.start_ns) for record in records for span in record.spans), default=0
    )
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], int] = {}
    for record in records:
        align = alignments.get(record.rank, _NOT_ALIGNED).align
        events += _names(record, threads)
        for span in record.spans:
            start = align(span.start_ns)
            events.append(
                {
                    "ph": "X",
                    "cat": span.kind,
                    "name": span.name,
                    "ts": (start - began) / 1e3,
                    "dur": (align(span.end_ns) - start) / 1e3,
                    "pid": record.rank,
                    "tid": threads[record.rank, span.thread],
                    **_arguments(record, span.name if span.kind == "exchange" else None),
                }
            )
        for number, mark in enumerate(record.marks_ns, 1):
            name, time = f"end of step {number}", (align(mark) - began) / 1e3
            events.append({"ph": "i", "s": "p", "cat": "step", "name": name, "ts": time, "pid": record.rank, "tid": 0})
    for number, (sent, received, sender, receiver) in enumerate(matched_messages(records)):
        shared = {"cat": "message", "name": f"{sent.num_bytes:,} bytes", "id": number}
        for phase, message, rank in (("s", sent, sender), ("f", received, receiver)):
            # A flow is bound to the slice around its time: the send it is in, and the wait that ends with it.
            time = (_aligned(alignments, rank, message.began_ns) - began) / 1e3
            if phase == "f":
                time = max(time, (_aligned(alignments, rank, message.at_ns) - began) / 1e3 - 1e-3)
            ends = {"bp": "e"} if phase == "f" else {}
            events.append(
                {"ph": phase, **ends, **shared, "ts": time, "pid": rank, "tid": threads[rank, message.thread]}
            )
    return events


def matched_messages(records: Sequence[RankRecord]) -> Iterator[tuple[Message, Message, int, int]]:
    """Messages as they were sent and as they arrived, with the ranks of both."""
    sent: dict[_Key, Message] = {
        (message.communicator, message.sequence, record.rank, message.peer): message
        for record in records
        for message in record.sends
    }
    for record in records:
        for message in record.receives:
            found = sent.get((message.communicator, message.sequence, message.peer, record.rank))
            if found is not None:
                yield found, message, message.peer, record.rank


def _aligned(alignments: Mapping[int, Alignment], rank: int, time_ns: int) -> int:
    return alignments.get(rank, _NOT_ALIGNED).align(time_ns)


def _names(record: RankRecord, threads: dict[tuple[int, int], int]) -> Iterator[dict[str, Any]]:
    """Names of a rank and of its threads, which are numbered from 0: those of the program first."""
    yield {"ph": "M", "name": "process_name", "pid": record.rank, "args": {"name": f"rank {record.rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": record.rank, "args": {"sort_index": record.rank}}
    program = [*record.program_threads]
    found = {span.thread for span in record.spans} | {message.thread for message in (*record.sends, *record.receives)}
    for place, thread in enumerate([*program, *sorted(found - set(program))]):
        threads[record.rank, thread] = place
        name = "program" if place < len(program) or not program else "queue of a communicator"
        yield {"ph": "M", "name": "thread_name", "pid": record.rank, "tid": place, "args": {"name": name}}


def _arguments(record: RankRecord, description: str | None) -> dict[str, Any]:
    found = None if description is None else record.redistributions.get(description)
    return {} if found is None or not found.site else {"args": {"asked for at": found.site}}
