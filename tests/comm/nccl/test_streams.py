"""What the streams of a GPU ask of torch, by stand-ins for its functions; tests/nccl runs them on one."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tritondt.comm.monitor.flight import Flight
from tritondt.comm.nccl import streams as streams_module
from tritondt.comm.nccl import watched as watched_module
from tritondt.comm.nccl.stream_engine import InFlight, StreamEngine
from tritondt.comm.nccl.stream_queue import StreamQueue
from tritondt.comm.nccl.streams import CudaStreams, follow_in_graph
from tritondt.comm.nccl.watched import MonitoredNccl, TimeoutPolicy
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import TransportError


class StandInStream:
    """Stands for a torch.cuda.Stream."""

    def __init__(self, cuda_stream: int, seen: list[Any]) -> None:
        self.cuda_stream, self._seen = cuda_stream, seen
        # What torch knows a stream by; of one from outside it is the handle.
        self.stream_id, self.device_index, self.device_type = cuda_stream, 0, 1

    def record_event(self) -> str:
        self._seen.append(("recorded anew", self.cuda_stream))
        return f"event of {self.cuda_stream}"

    def wait_event(self, event: Any) -> None:
        self._seen.append(("waits", self.cuda_stream, event))


class StandIn:
    """Stands for torch.cuda and the functions below it, on a machine with two GPUs; `seen` is what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self.num_set = 0
        self.current, self.device, self.is_capturing, num_events = 7, 0, False, iter(range(100))
        stand_in = self

        class Event:
            """Stands for the class below torch.cuda.Event."""

            def __init__(self) -> None:
                self.number = next(num_events)

            def record(self, stream: StandInStream) -> None:
                stand_in.seen.append(("recorded", stream.cuda_stream, self.number))

            def wait(self, stream: StandInStream) -> None:
                stand_in.seen.append(("waits", stream.cuda_stream, self.number))

        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.current, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_CudaEventBase", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", self._current_stream)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch._C, "_cuda_setStream", self._set_stream, raising=False)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: ("torch's", stream))
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: self.is_capturing, raising=False)

    def _current_stream(self, device: torch.device) -> StandInStream:
        self.seen.append(("asked", device.index))
        return StandInStream(self.current, self.seen)

    def _set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        assert (device_index, device_type) == (0, 1)
        self.current = stream_id
        self.num_set += 1

    def take(self) -> list[Any]:
        found, self.seen[:] = list(self.seen), []
        return found


class Both(NamedTuple):
    torch: StandIn
    ours: CudaStreams


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    return Both(StandIn(monkeypatch), CudaStreams(torch.device("cuda", 0)))


def test_torch_is_asked_for_a_stream_once(both: Both) -> None:
    first = both.ours.current()
    assert both.ours.current() is first
    both.torch.current = 8
    assert both.ours.current().cuda_stream == 8
    both.torch.current = 7
    assert both.ours.current() is first
    assert both.torch.take() == [("asked", 0), ("asked", 0)]


def test_streams_that_do_not_come_again_are_dropped(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "_MAX_KNOWN", 4)
    for handle in range(9):
        both.torch.current = handle
        assert both.ours.current().cuda_stream == handle
    assert len(both.ours._known) <= 4


def test_a_device_without_a_number_is_the_current_one(both: Both) -> None:
    both.torch.device = 1
    assert CudaStreams(torch.device("cuda")).device == torch.device("cuda", 1)


def test_operators_go_to_a_stream_and_back(both: Both) -> None:
    stream = StandInStream(9, both.torch.seen)
    with both.ours.on(stream):
        assert both.torch.current == 9
    assert both.torch.current == 7
    with both.ours.on(both.ours.current()):
        assert both.torch.current == 7  # and was not set
    assert (both.torch.num_set, both.torch.take()) == (2, [("asked", 0)])
    both.torch.device = 1
    context: Any = both.ours.on(stream)  # torch's own goes from device to device and back
    assert context == ("torch's", stream)


def test_one_event_serves_all_who_follow(both: Both) -> None:
    early, late = (StandInStream(handle, both.torch.seen) for handle in (1, 2))
    for _ in range(2):
        both.ours.follow(late, early)
    assert both.torch.take() == [("recorded", 1, 0), ("waits", 2, 0)] * 2
    follow_in_graph(late, early)  # whose event is no other's
    assert both.torch.take() == [("recorded anew", 1), ("waits", 2, "event of 1")]


class Driver:
    """Stands for libcuda: priorities from 0 to -5, and handles that count up."""

    def __init__(self, status: int = 0) -> None:
        self.made: list[tuple[int, int]] = []
        self._status = status

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:  # noqa: N802
        least._obj.value, greatest._obj.value = 0, -5
        return 0

    def cuStreamCreateWithPriority(self, handle: Any, flags: int, priority: Any) -> int:  # noqa: N802
        self.made.append((flags, priority.value))
        handle._obj.value = 1000 + len(self.made)
        return self._status


@pytest.fixture
def driver(both: Both, monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": found}.__getitem__)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: StandInContext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: StandInStream(handle, both.torch.seen))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: pytest.fail("torch has 32 streams for all"))
    return found


class StandInContext:
    """Stands for a stream that is there already."""

    def synchronize(self) -> None:
        """Makes the device's context."""


def test_no_two_communicators_share_a_stream(both: Both, driver: Driver) -> None:
    """torch's pool gives its first stream again after 32."""
    handles = [both.ours.make().cuda_stream for _ in range(33)]
    assert len(set(handles)) == 33
    assert driver.made == [(1, -5)] * 33  # beside the default stream, of the highest priority


def test_a_stream_that_cuda_does_not_make_is_told(both: Both, driver: Driver) -> None:
    driver._status = 2
    with pytest.raises(TransportError, match=r"^cuStreamCreateWithPriority was called and returned 2; it must"):
        both.ours.make()


class Counting:
    """Stands for streams whose events are numbers."""

    def __init__(self) -> None:
        self.num_events = 0
        self.cuda_stream = 0

    def record_event(self) -> int:
        self.num_events += 1
        return self.num_events

    def make(self) -> "Counting":
        return self

    def current(self) -> "Counting":
        return self

    def record(self, stream: Any) -> Any:
        return self.record_event()

    def follow(self, stream: Any, other: Any) -> None:
        """Nothing runs."""

    def wait_event(self, event: Any) -> None:
        """Nothing runs."""

    def on(self, stream: Any, before: Any = None) -> Any:
        return nullcontext()

    def is_capturing(self) -> bool:
        return False


def test_a_step_ends_before_the_next_one_and_the_last_with_its_work() -> None:
    steps = [InFlight("a step", 0, -1, 1.0) for _ in range(3)]

    def body(rank: int) -> None:
        counting: Any = Counting()
        queue = StreamQueue(StreamEngine(counting))

        def run() -> None:
            for step in steps[:2]:
                queue.mark_step()
                queue.mark_end(step)
                assert step.event is None

        work: Any = queue.submit(run, "two steps", sources_ready=True)
        assert (steps[0].event, steps[1].event, work.in_flight.event) == (1, 2, 2)
        queue.mark_end(steps[2])  # of no work
        assert steps[2].event == 3

    run_ranks(1, body)


class Asked:
    """Stands for an event that the stream has come past; its questions are counted."""

    num_asked = 0

    def query(self) -> bool:
        self.num_asked += 1
        return True


def test_what_is_issued_gets_the_same_staging_memory_up_to_a_size() -> None:
    found: list[torch.Tensor] = []
    cpu = torch.device("cpu")

    def body(rank: int) -> None:
        counting: Any = Counting()
        counting.record_event = Asked
        queue = StreamQueue(StreamEngine(counting))
        for num_bytes in (10, 4096, 4097, 5000, (1 << 20) + 1):
            queue.submit(lambda: found.append(queue.staging(num_bytes, cpu)), "staging", sources_ready=True)  # noqa: B023
        found.append(queue.staging(10, cpu))  # for a call in the caller's stream, whose order is another one
        counting.is_capturing = lambda: True
        queue.submit(lambda: found.append(queue.staging(10, cpu)), "staging of a graph", sources_ready=True)

    run_ranks(1, body)
    assert [memory.numel() for memory in found] == [4096, 4096, 8192, 8192, (1 << 20) + 1, 10, 10]
    assert found[0] is found[1]
    assert found[2] is found[3]


def test_an_exchange_that_ends_with_its_work_does_not_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_module, "join_nccl", lambda *_: None)

    def body(rank: int) -> tuple[int, bool, bool, str]:
        counting: Any = Counting()
        events = [Asked(), Asked()]
        counting.record_event = iter(events).__next__
        recorder = Flight(0, 1, None).recorder
        engine, nothing = StreamEngine(counting, recorder), SimpleNamespace(attend=lambda find: None)
        queue = StreamQueue(engine)
        member: Any = SimpleNamespace(watch=nothing, flight=SimpleNamespace(recorder=recorder))
        library: Any = None
        MonitoredNccl(member, library, engine, lambda error: pytest.fail(str(error)), TimeoutPolicy())
        exchange = InFlight("one", 0, -1, 1.0)
        exchange.begin(1, recorder.begin(0, 1, recorder.label("one"), 0, -1))
        engine.watch(exchange)
        queue.submit(lambda: queue.mark_end(exchange), "first", sources_ready=True)
        is_over_before = engine.passed is not None
        queue.submit(lambda: None, "second", sources_ready=True)
        engine.reap()
        return events[0].num_asked, is_over_before, exchange.is_over(), recorder.entries()[-1]["state"]

    assert run_ranks(1, body) == [(1, False, True, "done")]
