"""Merging of records: clocks, flows between ranks, what of a step was exposed, and what is suggested."""

import re
import threading
from datetime import timedelta
from time import monotonic_ns
from typing import Any

import pytest
import torch.distributed as dist

from tritondt.debug.tracing.clock import Alignment, Offset, aligned, answer_pings, ping
from tritondt.debug.tracing.record import Message, RankRecord, Redistribution, Span
from tritondt.debug.tracing.summary import Cost, summarise
from tritondt.debug.tracing.summary_text import summary_fields, summary_text
from tritondt.debug.tracing.timeline import trace_events

PATIENCE = timedelta(seconds=60)
US = 1000
PROGRAM, QUEUE = 11, 12


def test_a_clock_that_is_off_is_found_to_be_so_within_the_error_that_is_said():
    off = 7_000_000_123
    store = dist.HashStore()
    answering = threading.Thread(target=answer_pings, args=(store, "before", 3, PATIENCE))
    answering.start()
    found = ping(store, "before", 3, PATIENCE, lambda: monotonic_ns() - off)
    answering.join()
    assert abs(found.offset_ns - off) <= found.error_ns
    alignment = aligned((found,), "there", "here")
    assert not alignment.is_one_clock
    assert abs(alignment.align(found.at_ns) - (found.at_ns + off)) <= alignment.error_ns
    # Of one machine they are one clock, unless the pings say otherwise.
    assert not aligned((found,), "here", "here").is_one_clock


def test_a_first_rank_that_does_not_answer_is_an_error():
    with pytest.raises(RuntimeError):
        ping(dist.HashStore(), "before", 1, timedelta(milliseconds=1))


def two_ranks(shift: int) -> tuple[list[RankRecord], dict[int, Alignment]]:
    """Rank 0 sends at 10 us, rank 1 at 60 us of a clock that is `shift` ns behind; each waits until 70 us."""
    records = []
    for rank, began in ((0, 10), (1, 60)):

        def at(microseconds: float, late: int = shift * rank) -> int:
            return int(microseconds * US) - late

        name = "step 1 of 1 (exchange (S0) -> (S1)) of (8, 8) float32"
        spans = [
            Span("op", "aten.add.Tensor", at(began - 5), at(75), PROGRAM),
            Span("exchange", name, at(began), at(72), PROGRAM),
            Span("send", name, at(began), at(began + 1), PROGRAM),
            Span("wait", name, at(began + 2), at(70), PROGRAM),
            Span("exchange", "issued", at(80), at(90), QUEUE),
            Span("wait", "issued", at(80), at(90), QUEUE),
        ]
        sent = Message("all", 1, 1 - rank, 128, at(began), at(began + 1), PROGRAM, name)
        received = Message("all", 1, 1 - rank, 128, at(began + 2), at(70), PROGRAM, name)
        known = {name: Redistribution("train.py:3", "explained", itemsize=4), "issued": Redistribution("")}
        records.append(RankRecord(rank, 2, "", 0, spans, [sent], [received], known, [PROGRAM], [at(100)]))
    return records, {1: Alignment((Offset(0, shift, 0),))}


def test_messages_are_flows_between_the_right_slices_on_one_clock():
    events = trace_events(*two_ranks(5_000_000))
    flows: dict[int, dict[str, Any]] = {event["id"]: {} for event in events if event["ph"] in "sf"}
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert len(flows) == 2
    for flow in flows.values():
        assert flow["s"]["pid"] == 1 - flow["f"]["pid"]
        assert (flow["s"]["cat"], flow["s"]["name"]) == (flow["f"]["cat"], flow["f"]["name"])
        for end, kind in (("s", "send"), ("f", "wait")):
            own = flow[end]
            slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (own["pid"], own["tid"])]
            around = [e for e in slices if e["ts"] <= own["ts"] <= e["ts"] + e["dur"]]
            assert around[-1]["cat"] == kind
        assert flow["s"]["ts"] < flow["f"]["ts"]
    # Rank 0 begins at 5 us, rank 1 at 55 us: 50 us later by one clock.
    first = {event["pid"]: event["ts"] for event in reversed(events) if event["ph"] == "X"}
    assert first == pytest.approx({0: 0, 1: 50})
    assert all({"ph", "pid"} <= set(event) for event in events)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"program", "queue of a communicator"}


def test_a_message_with_one_end_has_no_flow_and_is_counted():
    records, alignments = two_ranks(0)
    del records[0].sends[:]
    assert {event["pid"] for event in trace_events(records, alignments) if event["ph"] == "s"} == {1}
    assert (summarise(records, alignments).num_matched, summarise(records, alignments).num_unmatched) == (1, 1)


def test_exposed_is_what_the_program_waits_and_late_what_it_waits_for_late_ranks():
    summary = summarise(*two_ranks(123_456))
    first, second = summary.steps[0]
    # From the first span, at 5 us, to the mark at 100: the program sends for 1 us and waits from 12 to 70.
    assert (first.duration_ns, first.exposed_ns) == (95 * US, 59 * US)
    assert (second.duration_ns, second.exposed_ns) == (45 * US, 9 * US)
    assert first.communication_ns == (62 + 10) * US
    cost, issued = summary.costs
    assert cost.num_exchanges == 2
    assert cost.sent_bytes == 256
    assert cost.exposed_ns == 68 * US
    assert issued.exposed_ns == 0
    # Rank 0 waits from 12 on, and rank 1 sends at 60; rank 1 waits for nobody.
    assert cost.late_ns == 48 * US
    assert cost.late_ranks == {1: 1}
    assert cost.operators == {"aten.add.Tensor": 1}  # once on each of the two ranks
    text = summary_text(summary, 2)
    assert "rank 1 most often" in text
    assert "train.py:3" in text
    assert summary_fields(summary)["messages"] == {"matched": 2, "unmatched": 0}


@pytest.mark.parametrize(
    ("fields", "suggestion"),
    [
        ({"late_ns": 80, "late_ranks": {3: 2}}, "80% of the time was for ranks that came late, rank 3 most often"),
        ({"operators": {"aten.mm.default": 4}}, "aten.mm.default asked for it 4 times on a rank: redistribute its arg"),
        ({"operators": {"aten.mm.default": 1}, "exposed_ns": 90}, "issue it early"),
        ({"known": Redistribution("", "x", True, True, 4)}, "ask for Shard in place of Replicate"),
        ({"exposed_ns": 90}, r"issue it early: tritondt.prefetch\(x, placements\)"),
        ({"known": Redistribution("", "x", itemsize=4)}, "wire_dtype=torch.bfloat16 sends half"),
        ({"known": Redistribution("", "x", itemsize=2)}, "hidden already"),
        ({"known": Redistribution("")}, "its layouts are not known"),
    ],
)
def test_what_is_suggested_follows_from_what_took_the_time(fields, suggestion):
    known = Redistribution("", "x", itemsize=4)
    cost = Cost("a", known, total_ns=100)
    for name, value in fields.items():
        if name in ("late_ranks", "operators"):
            getattr(cost, name).update(value)
        else:
            setattr(cost, name, value)
    assert re.search(suggestion, cost.suggestion), cost.suggestion
