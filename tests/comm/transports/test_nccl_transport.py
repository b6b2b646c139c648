"""What the NCCL transport does with streams, failures and bad input, on the test double of NCCL."""

import gc
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tritondt as T
from tests.doubles.fake_nccl.library import Gate
from tests.harness.gloo_ranks import Failure, GlooRanks
from tests.harness.nccl_on_host import ranks_on
from tritondt.comm import world
from tritondt.comm.monitor.flight import Flight
from tritondt.comm.nccl import watched as nccl_watched
from tritondt.comm.nccl.stream_engine import InFlight, StreamEngine
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.debug.tracing.recording import Recording

TIMEOUT_S = 5.0
STEPS = ("pack", "send", "keep", "wait", "unpack")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[GlooRanks]:
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="20") as ranks:
        yield ranks


@pytest.fixture
def failing_ranks() -> Iterator[GlooRanks]:
    with ranks_on("nccl", 3, TRITONDT_TIMEOUT=f"{TIMEOUT_S}") as ranks:
        yield ranks


def rows(size: int, mesh: T.Mesh) -> Any:
    """arange(5 * 7) in rows."""
    return T.distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [T.Shard(0)])


def stream_of(mesh: T.Mesh) -> Any:
    communicator: Any = world.current().communicator(mesh.ranks)
    return communicator._queue.stream


def issue_behind_a_gate(rank: int) -> None:
    mesh = T.Mesh((2,))
    x = rows(2, mesh)
    x.redistribute(placements=[T.Replicate()])
    gate = Gate(stream_of(mesh)._stream)
    moved = x.redistribute(placements=[T.Shard(1)], async_op=True)
    again = moved.redistribute(placements=[T.Replicate()], async_op=True)
    works = [moved.work, again.work]
    assert not any(work.is_completed() for work in works)
    gate.open()
    assert torch.equal(again.to_local(), torch.arange(35.0).reshape(5, 7))
    assert all(work.is_completed() for work in works)


def test_what_is_issued_returns_before_it_runs(two_ranks: GlooRanks) -> None:
    two_ranks.run(issue_behind_a_gate)


def drop_behind_a_gate(rank: int) -> None:
    mesh = T.Mesh((2,))
    x = rows(2, mesh)
    whole = x.redistribute(placements=[T.Replicate()])
    gate = Gate(stream_of(mesh)._stream)
    for _ in range(20):
        x.redistribute(placements=[T.Shard(1)], async_op=True)  # nobody keeps it
    held = x.redistribute(placements=[T.Replicate()], async_op=True)
    del x
    gc.collect()
    torch.full((1 << 16,), -1.0)  # would take the memory that was freed
    gate.open()
    assert torch.equal(held.to_local(), whole.to_local())
    communicator: Any = world.current().communicator(mesh.ranks)
    held.redistribute(placements=[T.Shard(0)], async_op=True).wait()
    communicator.barrier()
    assert not communicator._queue.is_busy


def test_what_is_dropped_keeps_its_memory_until_it_has_run(two_ranks: GlooRanks) -> None:
    two_ranks.run(drop_behind_a_gate)


def write_behind_a_gate(rank: int) -> str:
    mesh = T.Mesh((2,))
    x = rows(2, mesh)
    expected = x.redistribute(placements=[T.Replicate()]).to_local().clone()
    gate = Gate(stream_of(mesh)._stream)
    moved = x.redistribute(placements=[T.Replicate()], async_op=True)
    opener = threading.Timer(0.3, gate.open)
    opener.start()
    x.add_(1)  # waits
    assert torch.equal(moved.to_local(), expected)

    gate = Gate(stream_of(mesh)._stream)
    torn = x.redistribute(placements=[T.Replicate()], async_op=True)
    x._local_tensor.add_(1)  # behind the distributed tensor's back
    gate.open()
    with pytest.raises(T.WorldError) as told:
        torn.to_local()
    return str(told.value)


def test_writes_wait_for_what_reads_and_others_are_found_out(two_ranks: GlooRanks) -> None:
    for rank, text in enumerate(two_ranks.run(write_behind_a_gate)):
        assert text.startswith(
            f"a local tensor of shape ({3 - rank}, 7) was written to while (S0) -> (R) of (5, 7) read it"
        )


def record_what_runs(rank: int) -> list[tuple[str, int, int]]:
    mesh = T.Mesh((2,))
    x = rows(2, mesh)
    gate = Gate(stream_of(mesh)._stream)
    moved = x.redistribute(placements=[T.Shard(1)], async_op=True)
    recorder = world.current().flight.recorder
    states = [recorder.last(1)[0]["state"]]
    gate.open()
    moved.wait()
    x.redistribute(placements=[T.Replicate()])
    x.redistribute(placements=[T.Replicate()])
    states.append(next(entry for entry in recorder.entries() if "(S0) -> (S1)" in entry["operation"])["state"])
    return states


def test_the_recorder_says_done_when_the_stream_has_come_past(two_ranks: GlooRanks) -> None:
    assert two_ranks.run(record_what_runs) == [["exchanging", "done"]] * 2


def take_a_tensor_of_another_device(rank: int) -> str:
    mesh = T.Mesh((2,))
    communicator: Any = world.current().communicator(mesh.ranks)
    with pytest.raises(T.TransportError) as told:
        communicator._check_devices([torch.empty(2, device="meta")], None)
    return str(told.value)


def test_a_tensor_of_another_device_is_refused(two_ranks: GlooRanks) -> None:
    sentence = "NCCL was given a tensor on meta; this rank's communicator carries tensors on cpu only"
    assert two_ranks.run(take_a_tensor_of_another_device) == [sentence] * 2


def ask_for_another_device(rank: int) -> str:
    with pytest.raises(T.TransportError) as told:
        world.current().communicator((0, 1), "xpu")
    return str(told.value)


def test_a_device_without_a_transport(two_ranks: GlooRanks) -> None:
    sentence = "a communicator for tensors on xpu was asked for; there are transports for cpu and cuda"
    assert two_ranks.run(ask_for_another_device) == [sentence] * 2


def close_in_another_order(rank: int) -> list[float]:
    meshes = [T.Mesh((2,)), T.Mesh((2,), ranks=(1, 2))]
    used = [meshes[0]] * (rank < 2) + [meshes[1]] * (rank > 0)
    sums = [rows(2, mesh).full_tensor().sum().item() for mesh in (used if rank < 2 else used[::-1])]
    T.close()
    return sums


@pytest.mark.extended
def test_communicators_are_closed_alike_whichever_was_used_first(failing_ranks: GlooRanks) -> None:
    assert failing_ranks.run(close_in_another_order) == [[595.0], [595.0, 595.0], [595.0]]


class StuckNccl:
    """A double of a communicator whose destroy returns when it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def destroy(self) -> None:
        self.aborted.wait(60)

    def abort(self) -> None:
        self.aborted.set()


def test_what_cannot_be_destroyed_in_time_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watched, "join_nccl", lambda *_: StuckNccl())
    flight = SimpleNamespace(recorder=None)
    watch = SimpleNamespace(attend=lambda find: None, leave=lambda find: None)
    member: Any = SimpleNamespace(watch=watch, flight=flight, timeout=timedelta(seconds=0.1))
    streams: Any = SimpleNamespace(bind_thread=lambda: None, make=lambda: None)
    engine = StreamEngine(streams)
    library: Any = None
    terms = nccl_watched.TimeoutPolicy()
    watched: Any = nccl_watched.MonitoredNccl(member, library, engine, lambda error: pytest.fail(str(error)), terms)
    reason = T.WorldError("closed")
    watched.close(reason)
    assert watched.native.aborted.is_set()
    assert watched.failure is reason
    watched.fail(T.PeerError("too late"))  # whoever comes later changes nothing
    assert watched.failure is reason


class Lost:
    """Stands for an event on a device that does not answer any more."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_does_not_answer_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watched, "join_nccl", lambda *_: StuckNccl())
    told: list[BaseException] = []
    watch = SimpleNamespace(
        attend=lambda find: None, leave=lambda find: None, report=lambda key, sequence, error: told.append(error)
    )
    member: Any = SimpleNamespace(watch=watch, flight=Flight(0, 1, None), key="key", name="rank 0")
    nothing: Any = None
    streams: Any = SimpleNamespace(bind_thread=lambda: None, make=lambda: None)
    engine = StreamEngine(streams)
    watched: Any = nccl_watched.MonitoredNccl(member, nothing, engine, told.append, nccl_watched.TimeoutPolicy())
    lost = InFlight("an operation", 1, -1, 1.0)
    engine.watch(lost)
    lost.event = Lost()
    assert watched._waits() == []
    assert watched.native.aborted.wait(60)
    assert told == [lost.error, lost.error]  # the other ranks, and this one
    assert str(lost.error).startswith("CUDA error: an illegal memory access")


def use_after_close(rank: int) -> str:
    mesh = T.Mesh((3,))
    x = rows(3, mesh)
    communicator: Any = world.current().communicator(mesh.ranks)
    transfer_text = "the communicator was closed"
    T.close()
    with pytest.raises(T.WorldError, match=transfer_text) as told:
        communicator.barrier()
    assert torch.equal(x.full_tensor(), torch.arange(35.0).reshape(5, 7))  # in the world that follows
    T.abort()
    T.abort()
    return str(told.value)


@pytest.mark.extended
def test_use_after_close(failing_ranks: GlooRanks) -> None:
    sentence = "a barrier was asked of a communicator that ended (the communicator was closed); make a new world"
    assert all(text.startswith(sentence) for text in failing_ranks.run(use_after_close))


def compare_and_disagree(rank: int) -> None:
    os.environ["TRITONDT_DEBUG"] = "1"
    mesh = T.Mesh((3,))
    x = rows(3, mesh)
    x.redistribute(placements=[T.Shard(1) if rank == 1 else T.Replicate()])


@pytest.mark.extended
def test_in_debug_mode_nothing_moves_before_all_agree(failing_ranks: GlooRanks) -> None:
    for outcome in failing_ranks.outcomes(compare_and_disagree):
        assert isinstance(outcome, Failure)
        assert outcome.kind == "MismatchError", outcome.trace
        assert "ranks 0 and 2 run step 1 of 1 (exchange (S0) -> (R)) of (5, 7) float32" in outcome.text
        assert "; rank 1 runs step 1 of 1 (exchange (S0) -> (S1)) of (5, 7) float32" in outcome.text
        assert "test_nccl_transport.py" in outcome.text


def leave(rank: int) -> None:
    T.abort()


def fail_late(rank: int) -> tuple[str, str]:
    """Rank 1 does not come: what the others asked for fails when they look, and everything after it."""
    mesh = T.Mesh((3,))
    x = rows(3, mesh)
    x.redistribute(placements=[T.Replicate()])
    if rank == 1:
        return "", ""
    moved = x.redistribute(placements=[T.Replicate()], async_op=True)
    with pytest.raises(T.PeerError) as first:
        moved.to_local()
    with pytest.raises(T.WorldError) as second:
        x.redistribute(placements=[T.Shard(1)])
    return str(first.value), str(second.value)


@pytest.mark.extended
def test_a_collective_that_does_not_end_is_aborted(failing_ranks: GlooRanks) -> None:
    for rank, (first, second) in enumerate(failing_ranks.run(fail_late)):
        if rank != 1:
            assert "for rank 1 in step 1 of 1 (exchange (S0) -> (R)) of (5, 7) float32" in first
            assert "was asked of a communicator that failed before" in second
            assert "make a new world" in second
    failing_ranks.run(leave)


def set_options(rank: int, options: str) -> Any:
    os.environ["TRITONDT_NCCL_OPTIONS"] = options
    mesh = T.Mesh((2,))
    return rows(2, mesh).full_tensor().sum().item()


@pytest.mark.extended
def test_options_of_communicators() -> None:
    with ranks_on("nccl", 2) as ranks:
        assert ranks.run(set_options, '{"max_ctas": 4, "comm_name": "ours"}') == [595.0, 595.0]
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="5") as ranks:
        for outcome in ranks.outcomes(set_options, '{"max_cats": 4}'):
            assert isinstance(outcome, Failure)
            assert "the option max_cats of a communicator was asked for; NCCL has blocking" in outcome.text
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="5") as ranks:
        for outcome in ranks.outcomes(set_options, "max_ctas=4"):
            assert isinstance(outcome, Failure)
            assert outcome.kind == "WorldError"
            assert outcome.text.startswith("TRITONDT_NCCL_OPTIONS='max_ctas=4' is set; allowed is a JSON object")


def gather_a_view(rank: int) -> list[Any]:
    """A large tensor in rows, gathered from where its rows start `past` elements behind a multiple of 16 bytes."""
    mesh = T.Mesh((2,))
    whole = torch.arange(2.0**16).reshape(256, 256)
    found = []
    for past in (0, 1, 1, 4):
        room = torch.empty(128 * 256 + 16)
        first = past + -(room.data_ptr() // 4) % 4
        local = room[first : first + 128 * 256].view(128, 256)
        local.copy_(whole[128 * rank : 128 * rank + 128])
        rows = T.DTensor.from_local(local, mesh, [T.Shard(0)])
        result = rows.redistribute(placements=[T.Replicate()])
        torch.testing.assert_close(result.to_local(), whole, rtol=0, atol=0)
        communicator: Any = world.current().communicator(mesh.ranks)
        found.append(sum(map(len, communicator._realigned.values())))
    return found


def test_a_tensor_between_multiples_of_16_bytes_is_packed_first(two_ranks: GlooRanks) -> None:
    assert two_ranks.run(gather_a_view) == [[0, 1, 1, 1]] * 2


def record_by_one_call(rank: int, is_async: bool) -> tuple[list[str], list[tuple[int, int]], list[str]]:
    """Steps of a repeated exchange, (peer, bytes) of its messages, and steps in the flight record."""
    mesh = T.Mesh((2,))
    x = rows(2, mesh)

    def move() -> None:
        moved = x.redistribute(placements=[T.Shard(1)], async_op=is_async)
        torch.testing.assert_close(
            moved.to_local(), torch.arange(35.0).reshape(5, 7).split([4, 3], 1)[rank], rtol=0, atol=0
        )

    def by_parts(*arguments: Any) -> None:
        raise AssertionError("an exchange that is recorded goes by its program, as others do")

    recording = Recording()
    recording.begin()
    move()  # plans are compiled anew for a recording: the first exchange makes the program
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(NcclCommunicator, "_run_plan", by_parts)
        try:
            move()
        finally:
            recording.end()
    record = recording.record(rank, 2)
    *_, exchange = [span for span in record.spans if span.kind == "exchange"]
    inside = [
        span
        for span in record.spans
        if span.kind in STEPS and exchange.start_ns <= span.start_ns <= span.end_ns <= exchange.end_ns
    ]
    ends = [exchange.start_ns, *(time for span in inside for time in span[2:4]), exchange.end_ns]
    assert ends == sorted(ends), (exchange, inside)
    assert {message.name for message in (*record.sends, *record.receives)} == {exchange.name}
    flight = next(
        found["steps"]
        for found in reversed(world.current().flight.recorder.entries())
        if found["operation"] == exchange.name
    )
    return [span.kind for span in inside], [(found.peer, found.num_bytes) for found in record.sends[1:]], list(flight)


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_of_an_exchange_by_one_call_are_recorded(two_ranks: GlooRanks, is_async: bool) -> None:
    """In the trace and in the flight record. Rank 0 has 3 rows of 7, and rank 1 has 2; columns are 4 and 3."""
    for rank, (steps, sends, flight) in enumerate(two_ranks.run(record_by_one_call, is_async)):
        assert steps == flight
        assert "send" in steps
        assert set(steps) <= {"pack", "send", "keep", "unpack"}
        assert sends == [(1 - rank, [3 * 3, 2 * 4][rank] * 4)]
