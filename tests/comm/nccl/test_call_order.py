"""Calls of one communicator in several streams run one after the other, by as few events as that takes.

On the double of NCCL, whose streams are threads, and whose events keep CUDA's rules about graphs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import tritondt as T
from tests.doubles.fake_nccl.library import Gate, build, load
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import FakeStream, FakeStreams, fake_streams, ranks_on
from tritondt.comm import world
from tritondt.comm.nccl.stream_engine import InFlight, StreamEngine
from tritondt.comm.transports.nccl import NcclCommunicator

WHOLE = torch.arange(35.0).reshape(5, 7)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[GlooRanks]:
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="20") as ranks:
        yield ranks


class Setting(NamedTuple):
    """A tensor in rows, its communicator, and three streams: two of a program, and the communicator's own."""

    rows: Any
    communicator: NcclCommunicator
    streams: FakeStreams
    a: FakeStream
    b: FakeStream
    own: Any

    def names(self) -> dict[int, str]:
        return {id(self.a): "A", id(self.b): "B", id(self.own): "own"}

    def gather_on(self, stream: FakeStream, **options: Any) -> Any:
        """The whole tensor, asked for on a stream."""
        with self.streams.on(stream):
            return self.rows.redistribute(placements=[T.Replicate()], **options)


def setting() -> Setting:
    mesh, streams = T.Mesh((2,)), fake_streams(load(build()))
    rows = T.distribute_tensor(WHOLE, mesh, [T.Shard(0)])
    rows.full_tensor()
    communicator = world.current().communicator(mesh.ranks)
    assert isinstance(communicator, NcclCommunicator)
    found = Setting(rows, communicator, streams, streams.make(), streams.make(), communicator._queue.stream)
    found.gather_on(found.a)
    return found


@contextmanager
def noted(names: dict[int, str]) -> Iterator[Callable[[], list[str]]]:
    """Within, what is given is a function that takes the events recorded and the waits so far, in order."""
    record_event, wait_event, seen = FakeStream.record_event, FakeStream.wait_event, list[str]()

    def recorded(stream: FakeStream) -> Any:
        seen.append(f"recorded in {names[id(stream)]}")
        return record_event(stream)

    def waited(stream: FakeStream, event: Any) -> None:
        seen.append(f"{names[id(stream)]} waits")
        wait_event(stream, event)

    def take() -> list[str]:
        found, seen[:] = list(seen), []
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeStream, "record_event", recorded)
        patch.setattr(FakeStream, "wait_event", waited)
        yield take


def count_events(rank: int) -> list[list[str]]:
    here = setting()
    with noted(here.names()) as take:
        found = []
        for stream in (here.a, here.a, here.b, here.b):
            here.gather_on(stream)
            found.append(take())
        moved = here.gather_on(here.a, async_op=True)
        found.append(take())
        with here.streams.on(here.a):
            moved.work.wait()
        found.append(take())
        here.gather_on(here.a)
        found.append(take())
        here.gather_on(here.a, async_op=True)
        found.append(take())
        here.gather_on(here.a)
        found.append(take())
    here.streams.synchronize()  # memory of the CPU is freed at once, not in a stream's order
    return found


def test_a_synchronous_call_records_its_end_and_waits_for_calls_of_other_streams_only(two_ranks: GlooRanks) -> None:
    expected = [
        ["recorded in A"],
        ["recorded in A"],
        ["B waits", "recorded in B"],
        ["recorded in B"],
        ["recorded in A", "own waits", "own waits", "recorded in own"],  # for A's operators and for B's call
        ["A waits"],
        ["recorded in A"],  # it has waited for the call before
        ["recorded in A", "own waits", "recorded in own"],
        ["A waits", "recorded in A"],
    ]
    assert two_ranks.run(count_events) == [expected, expected]


def hold_up_the_first(rank: int) -> list[list[bool]]:
    here = setting()
    gate, ends = Gate(here.a._stream), []
    results = [here.gather_on(here.a)]
    ends.append(here.a.record_event())
    results.append(here.gather_on(here.b))
    ends.append(here.b.record_event())
    issued = here.gather_on(here.b, async_op=True)
    results += [here.gather_on(here.a), issued]
    ends.append(here.a.record_event())
    before = [*(end.query() for end in ends), issued.work.is_completed()]
    gate.open()
    here.streams.synchronize()
    after = [*(end.query() for end in ends), issued.work.is_completed()]
    for result in results:
        torch.testing.assert_close(result.to_local(), WHOLE, rtol=0, atol=0)
    return [before, after]


def test_a_call_runs_when_the_one_before_has_ended_in_whichever_stream(two_ranks: GlooRanks) -> None:
    assert two_ranks.run(hold_up_the_first) == [[[False] * 4, [True] * 4]] * 2


def end_behind_a_gate(rank: int) -> bool:
    here = setting()
    gate = Gate(here.b._stream)
    here.gather_on(here.b)
    end: Any = here.communicator._engine.under_way()[-1].event
    assert not end.query()
    gate.open()
    T.close()
    return bool(end.query())


def test_an_orderly_end_waits_for_the_calls_in_the_programs_streams(two_ranks: GlooRanks) -> None:
    assert two_ranks.run(end_behind_a_gate) == [True, True]


def capture(rank: int) -> list[list[str]]:
    here = setting()
    with noted(here.names()) as take:
        found = []
        here.gather_on(here.b)
        take()
        with here.streams.capturing():
            for stream in (here.a, here.b):
                here.gather_on(stream)
                found.append(take())
        here.gather_on(here.b)
        found.append(take())
        here.gather_on(here.a)
        found.append(take())
    here.streams.synchronize()
    here.streams.destroy_graphs()
    return found


def test_calls_in_a_graph_keep_their_order_by_events_of_the_graph_alone(two_ranks: GlooRanks) -> None:
    expected = [
        ["recorded in A", "own waits", "recorded in own", "A waits"],
        ["recorded in B", "own waits", "recorded in own", "B waits"],
        ["recorded in B"],
        ["A waits", "recorded in A"],
    ]
    assert two_ranks.run(capture) == [expected, expected]


class Noting:
    """Stands for a stream, and notes what it is to wait for."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)

    def record_event(self) -> Any:
        return object()

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class Current:
    """Stands for streams, of which the calling thread's is `stream`."""

    def __init__(self) -> None:
        self.stream = Noting()

    def make(self) -> Noting:
        return Noting()

    def current(self) -> Noting:
        return self.stream

    def record(self, stream: Noting) -> Any:
        return stream.record_event()

    def is_capturing(self) -> bool:
        return False


def test_a_wait_for_an_earlier_call_is_none_for_the_latest() -> None:
    streams: Any = Current()
    engine, first, second, third = StreamEngine(streams), Noting(), Noting(), Noting()
    early, late, last = (InFlight("a call", 0, -1, 1.0) for _ in range(3))

    def put(call: InFlight, stream: Noting) -> list[Any]:
        streams.stream = stream
        engine.end(call, engine.begin(call, True))
        return stream.waits

    assert put(early, first) == []  # there is no call yet
    assert put(late, first) == []
    streams.stream = second
    engine.wait(early)
    engine.let_wait(second)
    assert second.waits == [early.event, late.event]
    streams.stream = third
    engine.wait(late)
    engine.let_wait(third)  # as it does already
    assert third.waits == [late.event]
    assert put(last, third) == [late.event]
    assert first.waits == []
