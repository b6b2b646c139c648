"""What a recording has of rank threads, that it leaves nothing behind, and what costs nothing while it is off."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.work import num_calls
from tests.ops.sharded import distribute
from tritondt.comm import world
from tritondt.comm.transports import threads
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import mark_step
from tritondt.debug.tracing.explanations import Compiled, explained
from tritondt.debug.tracing.record import RankRecord
from tritondt.debug.tracing.recording import Recording
from tritondt.dtensor.tensor import DTensor
from tritondt.process_group.router import Router
from tritondt.redistribution import compile as compiling
from tritondt.redistribution.compile import hosts_of

X = torch.arange(24.0).view(4, 6)
# Functions that recordings stand in for, of each kind: static, ours, torch's.
RECORDED = ((DTensor, "__torch_dispatch__"), (Router, "run"), (Router, "message"), (dist.Work, "wait"))


def program(rank: int) -> None:
    x: Any = distribute(X, T.Mesh((2,)), "S0")
    columns = x.redistribute(placements=(T.Shard(1),))
    mark_step()
    whole = (x + columns).redistribute(placements=(T.Replicate(),), async_op=True)
    torch.testing.assert_close(whole.to_local(), 2 * X, rtol=0, atol=0)
    mark_step()


@pytest.fixture(scope="module")
def records() -> list[RankRecord]:
    recording = Recording()
    recording.begin()
    try:
        run_ranks(2, program)
    finally:
        recording.end()
    return [recording.record(rank, 2) for rank in range(2)]


def test_every_phase_of_every_exchange_is_a_span_of_its_rank(records):
    for record in records:
        exchanges = [span for span in record.spans if span.kind == "exchange"]
        # S0 -> S1, the argument of add that moves, and S -> R, in a thread of its own.
        assert [span.name.partition(" of ")[0] for span in exchanges] == ["step 1"] * 3
        kinds = {span.kind for span in record.spans}
        assert {"op", "exchange", "pack", "send", "keep", "wait", "unpack"} <= kinds
        assert any("aten.add" in span.name for span in record.spans if span.kind == "op")
        for exchange in exchanges:
            inside = [
                span
                for span in record.spans
                if span.thread == exchange.thread
                and exchange.start_ns <= span.start_ns <= span.end_ns <= exchange.end_ns
                and span is not exchange
            ]
            assert {"send", "wait"} <= {span.kind for span in inside}
        assert len({span.thread for span in exchanges}) == 2
        assert len(record.program_threads) == 1
        assert len(record.marks_ns) == 2


def test_messages_of_both_sides_name_the_same_exchanges(records):
    first, second = records
    for one, other in ((first, second), (second, first)):
        sent = {(found.communicator, found.sequence, found.num_bytes) for found in one.sends}
        assert sent == {(found.communicator, found.sequence, found.num_bytes) for found in other.receives}
        assert {found.peer for found in one.sends} == {other.rank}


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("other", [(0, 1), (2, 3), (1, 2)])
def test_explanations_of_a_trace_are_those_of_explain(other, wire_dtype):
    """On one mesh and between two, which share no rank or some, on one host and on two."""

    def both(rank: int) -> tuple[str, str] | None:
        meta = T.TensorMeta.contiguous((6, 4))
        source = T.DTensorSpec(T.Mesh((2,), ranks=(0, 1)), [T.Shard(0)], meta)
        target = T.DTensorSpec(T.Mesh((2,), ranks=other), [T.Shard(1)], meta)
        if rank not in {0, 1, *other}:
            return None
        hosts = hosts_of(source, target, wire_dtype)
        compiled = Compiled(source, target, wire_dtype, world.current().costs_for("cpu"), hosts)
        return explained(compiled, "").explanation, str(T.explain(source, target, wire_dtype=wire_dtype))

    for ranks_on in (None, (0, 1, 1, 0)):
        for found in filter(None, run_ranks(4, both, hosts=ranks_on)):
            assert found[0] == found[1]
            assert "peak temporary" in found[0]
            assert ("between hosts" in found[0]) == (ranks_on is not None)


def test_redistributions_have_explanations_and_the_line_that_asked(records):
    found = list(records[0].redistributions.values())
    assert len(found) == 3
    assert all("peak temporary" in each.explanation for each in found)
    assert all("test_recording.py" in each.site for each in found)
    assert [each.replicates for each in found].count(True) == 1


def test_a_record_travels_as_bytes(records):
    assert RankRecord.from_bytes(records[0].to_bytes()) == records[0]


def test_a_recording_that_has_ended_leaves_everything_as_it_was():
    def state() -> tuple[object, ...]:
        work: Any = torch._C._distributed_c10d.Work
        hooks = (tuple(threads.on_started), tuple(compiling.on_compiled))
        return DTensor.__dict__["__torch_dispatch__"], Router.__dict__["run"], work.__dict__["wait"], hooks

    before = state()
    recording = Recording()
    recording.begin()
    assert all(one is not other for one, other in zip(state()[:3], before[:3], strict=True))
    recording.end()
    assert state() == before
    mark_step()  # does nothing
    assert recording.record(0, 1).marks_ns == []


def replaced_methods(communicator: Any) -> set[str]:
    return {name for name in vars(communicator) if callable(getattr(type(communicator), name, None))}


def test_no_method_of_a_communicator_is_replaced_to_record_it():
    def body(rank: int) -> set[str]:
        x: Any = distribute(X, T.Mesh((2,)), "S0")
        communicator: Any = T.comm.world.current().communicator((0, 1))
        recording = Recording()
        recording.begin()
        try:
            x.redistribute(placements=(T.Replicate(),), async_op=True).wait()
            return replaced_methods(communicator) | replaced_methods(communicator._queue)
        finally:
            recording.end()

    assert run_ranks(2, body) == [set()] * 2


def test_no_call_is_added_to_an_operator_or_an_exchange_while_nothing_is_recorded():
    def calls_on(rank: int) -> tuple[int, int]:
        x: Any = distribute(X, T.Mesh((1,)), "S0")

        def operator() -> None:
            x + 1.0

        def exchange() -> None:
            x.redistribute(placements=(T.Shard(1),))

        for warm in (operator, exchange):
            warm()
        return num_calls(operator), num_calls(exchange)

    before = run_ranks(1, calls_on)
    recording = Recording()
    recording.begin()
    ((on, _),) = run_ranks(1, calls_on)
    recording.end()
    assert run_ranks(1, calls_on) == before
    assert on > before[0][0]


def test_spans_and_messages_leave_nothing_that_the_garbage_collector_visits():
    num_steps = 50

    def num_left(rank: int) -> int:
        x: Any = distribute(X, T.Mesh((2,)), "S0")

        def step() -> None:
            (x + 1.0).redistribute(placements=(T.Shard(1),))

        step()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(num_steps):
            step()
        gc.collect()
        return len(gc.get_objects()) - before

    recording = Recording()
    recording.begin()
    try:
        left = run_ranks(2, num_left)
    finally:
        recording.end()
    assert len(recording.record(0, 2).spans) > 5 * num_steps
    assert max(left) < num_steps  # a tuple for each span would be some hundred


def test_what_there_is_no_room_for_is_counted(monkeypatch):
    monkeypatch.setattr("tritondt.debug.tracing.recording.MOST_SPANS", 1)
    recording = Recording()
    recording.begin()
    try:
        run_ranks(1, lambda rank: distribute(X, T.Mesh((1,)), "S0") + 1)
        run_ranks(1, lambda rank: distribute(X, T.Mesh((1,)), "S0") + 1)
    finally:
        recording.end()
    found = recording.record(0, 1)
    assert len(found.spans) == 1
    assert found.dropped > 0


def test_threads_of_communicators_that_have_ended_are_not_taken_for_those_of_now():
    kept: list[Any] = []

    def body(rank: int) -> None:
        program(rank)
        kept.append(T.comm.world.current().communicator((0, 1)))

    for _ in range(4):  # their threads have ended, and the system gives their numbers again
        run_ranks(2, body)
    recording = Recording()
    recording.begin()
    run_ranks(2, body)
    recording.end()
    assert [len(recording.record(rank, 2).program_threads) for rank in range(2)] == [1, 1]
    assert len(kept) == 10


def test_recordings_of_rank_threads_end_in_any_order():
    """A recording hears nothing after its end, and the last one to end leaves all functions as they were."""
    before = {(owner, name): owner.__dict__[name] for owner, name in RECORDED}

    def body(rank: int) -> int:
        x: Any = distribute(X, T.Mesh((2,)), "S0")
        recording = Recording()
        if rank == 0:
            recording.begin()
        x.full_tensor()  # both ranks are here
        if rank == 1:
            recording.begin()
        x.full_tensor()
        if rank == 0:  # the one that began first, whose layers lie under the other's
            recording.end()
        x.full_tensor()
        _ = x * 2
        x.full_tensor()
        recording.end()
        return sum("mul" in span.name for span in recording.record(rank, 2).spans)

    assert run_ranks(2, body) == [0, 1]
    assert {(owner, name): owner.__dict__[name] for owner, name in RECORDED} == before
