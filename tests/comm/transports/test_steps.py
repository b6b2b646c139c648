"""A recording and the flight record have the steps of exchanges, and messages that both sides name alike."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.ops.sharded import distribute
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug.tracing.record import Span
from tritondt.debug.tracing.recording import Recording

ALL = (0, 1, 2, 3)


class Recorded(NamedTuple):
    """An exchange: its span, spans within it, (peer, exchange, bytes) of messages, steps in the flight record."""

    exchange: Span
    inside: list[Span]
    sends: list[tuple[int, int, int]]
    receives: list[tuple[int, int, int]]
    flight: dict[str, float]


def recorded(
    rank: int, source: str, target: list[Any], shape: tuple[int, int], is_async: bool = False
) -> list[Recorded]:
    """Exchanges of a redistribution, of which only that is recorded which runs while a recording is on."""
    x: Any = distribute(torch.zeros(shape), T.Mesh((4,)), source)

    def move() -> None:
        moved = x.redistribute(placements=target, async_op=is_async)
        if is_async:
            moved.wait()

    move()  # makes the communicator, and is not recorded
    recording = Recording()
    recording.begin()
    try:
        move()
    finally:
        recording.end()
    noted = {found["operation"]: found["steps"] for found in world.current().flight.recorder.entries()}
    move()  # nor is this one
    record = recording.record(rank, 4)
    made = []
    for exchange in (span for span in record.spans if span.kind == "exchange"):
        inside = [
            span
            for span in record.spans
            if span.kind not in ("exchange", "redistribution")
            and span.thread == exchange.thread
            and exchange.start_ns <= span.start_ns <= span.end_ns <= exchange.end_ns
        ]
        sends, receives = (
            [(found.peer, found.sequence, found.num_bytes) for found in messages if found.name == exchange.name]
            for messages in (record.sends, record.receives)
        )
        made.append(Recorded(exchange, inside, sends, receives, noted[exchange.name]))
    return made


def recorded_on(rank: int, arguments: tuple[Any, ...]) -> list[Recorded]:
    return recorded(rank, *arguments)


def check_messages(of_ranks: list[list[Recorded]], num_bytes: int) -> None:
    """Each rank has sent the others so many bytes, in exchanges that both sides number alike."""
    found = [exchange for (exchange,) in of_ranks]
    for rank in ALL:
        assert sorted(peer for peer, _, _ in found[rank].sends) == [peer for peer in ALL if peer != rank]
        for peer, sequence, sent in found[rank].sends:
            assert (rank, sequence, sent) in found[peer].receives
            assert sent == num_bytes


def check_order(spans: list[Span]) -> None:
    ends = [time for span in spans for time in (span.start_ns, span.end_ns)]
    assert ends == sorted(ends)


def test_steps_of_every_round_are_spans_in_the_order_they_ran(four_shared_memory_ranks: GlooRanks) -> None:
    # Messages of 2 MB are four rounds of 512 kB.
    for (found,) in four_shared_memory_ranks.run(recorded, "S0", [T.Shard(1)], (2048, 4096)):
        assert [span.kind for span in found.inside] == ["wait", "pack", "keep", "wait", "unpack"] * 4
        check_order(found.inside)
        names = {span.name for span in found.inside}
        assert names == {"pack", "keep", "unpack", found.exchange.name}, "waits say for what"


@pytest.mark.parametrize("is_async", [False, True])
def test_both_sides_have_the_same_messages(four_shared_memory_ranks: GlooRanks, is_async: bool) -> None:
    for source, target, num_bytes in (("S0", [T.Shard(1)], 240), ("P", [T.Replicate()], 3840)):
        check_messages(four_shared_memory_ranks.run(recorded, source, target, (24, 40), is_async), num_bytes)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("where", ["sockets", "threads"])
def test_steps_are_in_the_trace_and_in_the_flight_record(four_ranks: GlooRanks, where: str, is_async: bool) -> None:
    for source, target, steps in (
        ("S0", [T.Shard(1)], ["pack", "send", "keep", "wait"]),
        ("S1", [T.Shard(0)], ["send", "keep", "wait", "unpack"]),
    ):
        arguments = source, target, (24, 40), is_async
        if where == "threads":
            of_ranks = run_ranks(4, partial(recorded_on, arguments=arguments))
        else:
            of_ranks = four_ranks.run(recorded, *arguments)
        check_messages(of_ranks, 240)
        for (found,) in of_ranks:
            assert [span.kind for span in found.inside] == steps
            check_order(found.inside)
            assert list(found.flight) == steps
            assert sorted(found.flight.values()) == list(found.flight.values())


@pytest.mark.parametrize("is_async", [False, True])
def test_every_step_of_a_plan_between_hosts_is_an_exchange(is_async: bool) -> None:
    """Two hosts of two ranks: whole parts cross once, and are spread inside."""
    for found in run_ranks(
        4, lambda rank: recorded(rank, "S0", [T.Replicate()], (24, 40), is_async), hosts=(0, 0, 1, 1)
    ):
        assert len(found) > 1
        assert len({each.exchange.name for each in found}) == len(found)
        check_order([each.exchange for each in found])
        for each in found:
            assert {"send", "wait"} <= {span.kind for span in each.inside}
            assert each.sends
            assert set(each.flight) >= {"send", "wait"}
