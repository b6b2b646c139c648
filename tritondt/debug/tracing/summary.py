"""Summary of a trace: what of each step was waiting for others, and which redistributions cost most."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tritondt.debug.tracing.clock import Alignment
from tritondt.debug.tracing.record import BLOCKING, RankRecord, Redistribution, Span
from tritondt.debug.tracing.timeline import matched_messages

_NOT_ALIGNED = Alignment()
# Of what a rank waited, so much must be for ranks that came late before they are blamed.
_LATE_SHARE = 0.5
# Elements this wide can travel narrower.
_WIDE_ITEMSIZE = 4

Interval = tuple[int, int]


@dataclass
class StepTimes:
    """Times of one step on one rank, in ns: all of it, communication on any thread, and what the program waited."""

    rank: int
    duration_ns: int
    communication_ns: int
    exposed_ns: int


@dataclass
class Cost:
    """Time of all exchanges of one description, over all ranks; `late_ns` of it was for ranks that came later.

    `operators` has how often each operator asked for such an exchange on the rank where it did so most often.
    """

    description: str
    known: Redistribution
    num_exchanges: int = 0
    sent_bytes: int = 0
    total_ns: int = 0
    exposed_ns: int = 0
    late_ns: int = 0
    late_ranks: Counter[int] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)

    @property
    def suggestion(self) -> str:
        """A way to lower this cost, by what took most of its time."""
        if self.late_ranks and self.late_ns > _LATE_SHARE * self.total_ns:
            (rank, _), *_ = self.late_ranks.most_common(1)
            share = self.late_ns / self.total_ns
            return (
                f"{share:.0%} of the time was for ranks that came late, rank {rank} most often: give it less to do "
                "before, or look at its timeline there"
            )
        (operator, number), *_ = self.operators.most_common(1) or [("", 0)]
        if number > 1:
            return (
                f"{operator} asked for it {number} times on a rank: redistribute its argument once, where it is made, "
                "and keep the result"
            )
        if not self.known.explanation:
            return "its layouts are not known here; look at its timeline"
        if self.known.is_reduction and self.known.replicates:
            return "if each rank needs a part only, ask for Shard in place of Replicate: half of the bytes"
        if self.exposed_ns > self.total_ns / 2:
            return (
                "issue it early: tritondt.prefetch(x, placements), or redistribute(..., async_op=True), and compute "
                "meanwhile"
            )
        if self.known.itemsize >= _WIDE_ITEMSIZE:
            return "wire_dtype=torch.bfloat16 sends half of the bytes, where the rounding can be had"
        return "it is hidden already; no change of it alone makes a step shorter"


@dataclass
class Summary:
    """Summary of a trace: steps, each with its times on all ranks, and costs, the highest first."""

    steps: list[list[StepTimes]]
    costs: list[Cost]
    num_matched: int
    num_unmatched: int


def summarise(records: Sequence[RankRecord], alignments: Mapping[int, Alignment]) -> Summary:
    """Summary of the records of all ranks, each aligned as given."""
    matched = list(matched_messages(records))
    num_received = sum(len(record.receives) for record in records)
    by_step: dict[int, list[StepTimes]] = defaultdict(list)
    for record in records:
        for number, times in enumerate(_step_times(record)):
            by_step[number].append(times)
    costs: dict[str, Cost] = {}
    for record in records:
        _add_costs(costs, record)
    _add_lateness(costs, records, alignments)
    ordered = sorted(costs.values(), key=lambda cost: (-cost.exposed_ns, -cost.total_ns, cost.description))
    return Summary([by_step[number] for number in sorted(by_step)], ordered, len(matched), num_received - len(matched))


def _step_times(record: RankRecord) -> list[StepTimes]:
    """Times of each step, the first from the first span on; without marks all is one step."""
    if not record.spans:
        return []
    edges = [min(span.start_ns for span in record.spans), *record.marks_ns]
    if not record.marks_ns:
        edges.append(max(span.end_ns for span in record.spans))
    program = set(record.program_threads)
    moving = joined((s.start_ns, s.end_ns) for s in record.spans if s.kind in (*BLOCKING, "exchange", "collective"))
    blocked = joined((s.start_ns, s.end_ns) for s in record.spans if s.kind in BLOCKING and s.thread in program)
    return [
        StepTimes(
            record.rank, stop - start, length_within(moving, (start, stop)), length_within(blocked, (start, stop))
        )
        for start, stop in pairwise(edges)
    ]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, in order and apart from each other.

    >>> joined([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def length_within(intervals: Sequence[Interval], bounds: Interval) -> int:
    """Length of what of ordered intervals, apart from each other, lies within bounds.

    >>> length_within([(0, 3), (5, 7)], (2, 6))
    2
    """
    start, stop = bounds
    first = bisect_left(intervals, start, key=lambda interval: interval[1])
    total = 0
    for left, right in intervals[first:]:
        if left >= stop:
            break
        total += min(right, stop) - max(left, start)
    return total


def _add_costs(costs: dict[str, Cost], record: RankRecord) -> None:
    """Adds a rank's exchanges; of each, what its phases on the same thread took, and the operator around it."""
    program = set(record.program_threads)
    asked: dict[str, Counter[str]] = defaultdict(Counter)
    for span, around in _nested(record.spans):
        if span.kind == "exchange":
            cost = _cost_of(costs, span.name, record)
            cost.num_exchanges += 1
            cost.total_ns += span.end_ns - span.start_ns
            operator = next((outer.name for outer in reversed(around) if outer.kind == "op"), None)
            if operator is not None:
                asked[span.name][operator] += 1
        elif span.kind in BLOCKING and span.thread in program:
            outer = next((outer for outer in reversed(around) if outer.kind == "exchange"), None)
            # Of what was issued, the program waits by itself; its exchanges run on another thread.
            name = span.name if outer is None else outer.name
            if name in record.redistributions:
                _cost_of(costs, name, record).exposed_ns += span.end_ns - span.start_ns
    for name, operators in asked.items():
        costs[name].operators |= operators
    for message in record.sends:
        if message.name in record.redistributions:
            _cost_of(costs, message.name, record).sent_bytes += message.num_bytes


def _nested(spans: Sequence[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Each span, with those of its thread around it, the outermost first."""
    for thread in {span.thread for span in spans}:
        ordered = sorted((span for span in spans if span.thread == thread), key=lambda s: (s.start_ns, -s.end_ns))
        around: list[Span] = []
        for span in ordered:
            while around and around[-1].end_ns <= span.start_ns:
                around.pop()
            yield span, around
            around.append(span)


def _cost_of(costs: dict[str, Cost], name: str, record: RankRecord) -> Cost:
    found = costs.get(name)
    if found is None:
        found = costs[name] = Cost(name, record.redistributions.get(name, Redistribution("")))
    return found


def _add_lateness(costs: dict[str, Cost], records: Sequence[RankRecord], alignments: Mapping[int, Alignment]) -> None:
    """Adds how long each wait was for the rank that sent last, and had not begun to send when the wait began."""
    last: dict[tuple[str, int, int], tuple[int, int]] = {}
    waits: dict[tuple[str, int, int], tuple[str, int, int]] = {}
    for sent, received, sender, receiver in matched_messages(records):
        key = received.communicator, received.sequence, receiver
        began = alignments.get(sender, _NOT_ALIGNED).align(sent.began_ns)
        last[key] = max(last.get(key, (began, sender)), (began, sender))
        align = alignments.get(receiver, _NOT_ALIGNED).align
        waits[key] = received.name, align(received.began_ns), align(received.at_ns)
    for key, (began, sender) in last.items():
        name, start, stop = waits[key]
        late = min(began, stop) - start
        if late > 0 and name in costs:
            costs[name].late_ns += late
            costs[name].late_ranks[sender] += 1
