"""Exchanges of a process as the extension has noted their steps: spans and messages of a trace."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tritondt._C import StepTimes
from tritondt.comm.monitor.flight import ExchangeRecord
from tritondt.comm.packing.messages import Slice
from tritondt.debug.tracing.record import Message, Span

# Steps that are named after their exchange: in a timeline they say for what a rank waits.
_NAMED = ("exchange", "send", "wait")
# A message is begun with the first of its rounds, and there with the last; who has packed waits for others'.
_LEAVING, _ARRIVING = ("send", "pack"), ("wait",)


@dataclass(frozen=True)
class Exchange:
    """One exchange of a rank: the thread that ran it, the line of the program that asked for it, what it did when."""

    rank: int
    thread: int
    name: str
    site: str
    is_queued: bool
    spans: list[Span]
    sends: list[Message]
    receives: list[Message]


def exchanges_of(times: StepTimes) -> list[Exchange]:
    """The exchanges of all ranks of this process of which steps were noted, by `times`, which is closed."""
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    told = times.exchanges()
    for number, kind, started, ended, thread in times.steps():
        if number in told:
            spans[number].append(Span(kind, told[number][-1].text if kind in _NAMED else kind, started, ended, thread))
    return [_exchange(*told[number], found) for number, found in spans.items()]


def _exchange(
    rank: int, sequence: int, site: str | None, is_queued: bool, record: ExchangeRecord, spans: list[Span]
) -> Exchange:
    sends = _messages(record, sequence, record.sends, _within(spans, _LEAVING))
    receives = _messages(record, sequence, record.receives, _within(spans, _ARRIVING))
    return Exchange(rank, spans[0].thread, record.text, site or "", is_queued, spans, sends, receives)


def _within(spans: Sequence[Span], kinds: Iterable[str]) -> list[Span]:
    """Spans of the first of `kinds` that there are some of."""
    return next(filter(None, ([span for span in spans if span.kind == kind] for kind in kinds)), [])


def _messages(record: ExchangeRecord, sequence: int, slices: Iterable[Slice], steps: Sequence[Span]) -> list[Message]:
    if not steps:
        return []
    times = steps[0].start_ns, steps[-1].end_ns, steps[0].thread, record.text
    return [Message(record.key, sequence, record.ranks[piece.peer], piece.num_bytes, *times) for piece in slices]
