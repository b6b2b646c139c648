"""The NCCL transport on the test double of NCCL: tensors of the CPU, streams that are threads.

    use_fake_nccl()  # in a rank's process, before its first mesh is made

What is shown is that the transport's code makes the right calls in the right order, not how fast, and nothing of NCCL.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.doubles.fake_cuda.library import build as build_fake_cuda
from tests.doubles.fake_nccl.library import FakeNccl, HostEvent, HostStream, build, load
from tests.harness.doubled import doubled, keep
from tests.harness.gloo_ranks import GlooRanks
from tritondt import identity
from tritondt._C import NcclLibrary
from tritondt.comm import registry
from tritondt.comm.device_memory.driver import CudaDriver
from tritondt.comm.member import ProcessContext
from tritondt.comm.transports.device_arenas import share_device_arenas
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.comm.transports.table import Transport, register_transport
from tritondt.process_group.futures import fail, succeed
from tritondt.process_group.stream import NcclDevice


class FakeCapture:
    """Whether what is put into streams is recorded into a graph; it runs all the same, but CUDA's rules hold."""

    def __init__(self) -> None:
        self.is_under_way = False
        self.relaxed_threads: set[int] = set()
        self.bound_threads: set[int] = set()

    def forbids_questions(self) -> bool:
        """Whether the calling thread may not ask for events now."""
        return self.is_under_way and threading.get_ident() not in self.relaxed_threads


class FakeEvent:
    """A point in a stream of the double."""

    def __init__(self, library: FakeNccl, stream: HostStream, capture: FakeCapture) -> None:
        self._event = HostEvent(library, library.pointer("fakeEventCreate"))
        self._event.record(stream)
        self._process = os.getpid()
        self._capture, self.is_of_graph = capture, capture.is_under_way

    def query(self) -> bool:
        who = threading.current_thread()
        if who.name == "tritondt-watch" and who.ident not in self._capture.bound_threads:
            raise AssertionError("fake CUDA: an event was asked for by a thread that has not made its device current")
        if self.is_of_graph or self._capture.forbids_questions():
            raise RuntimeError("fake CUDA: an event was asked for while a graph is captured, or one that is of a graph")
        return self._event.is_over()

    def synchronize(self) -> None:
        self._event.synchronize()

    @property
    def handle(self) -> HostEvent:
        return self._event

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._event.destroy()


class FakeStream:
    """A stream of the double, with torch.cuda's names."""

    def __init__(self, library: FakeNccl, capture: FakeCapture) -> None:
        self._library, self._stream, self._process = library, library.new_stream(), os.getpid()
        self._capture = capture
        self.errors: list[BaseException] = []

    @property
    def cuda_stream(self) -> int:
        return self._stream.handle

    def record_event(self) -> FakeEvent:
        return FakeEvent(self._library, self._stream, self._capture)

    def wait_event(self, event: Any) -> None:
        if event is NOW:
            return
        if event.is_of_graph != self._capture.is_under_way:
            raise RuntimeError("fake CUDA: a stream was to wait for an event, one of which is in a graph that is made")
        self._stream.wait(event.handle)

    def synchronize(self) -> None:
        self._stream.synchronize()
        if self.errors:
            raise self.errors[0]

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a fork has no thread that it could end
            self._stream.destroy()

    def launch(self, run: Callable[[], object]) -> None:
        def kept() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001  raised where the host waits
                self.errors.append(error)

        self._stream.launch(kept)


class _Now:
    """An event of operators that run at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""


NOW = _Now()


class HostsStream(FakeStream):
    """The stream of what torch runs on the CPU: at once, and so the host waits for what else is put there."""

    def record_event(self) -> Any:
        self.synchronize()
        return NOW

    def wait_event(self, event: Any) -> None:
        event.synchronize()

    def launch(self, run: Callable[[], object]) -> None:
        self.synchronize()
        run()


_ALLOCATE = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.detach.default}


class _AfterStream(TorchDispatchMode):
    """Operators run when the stream has come to them, and the host waits for that, as theirs is no stream.

    What they allocate is freed when the stream has come past the end of this, as an allocator of streams does.
    """

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream
        self.allocated: list[object] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op not in _ALLOCATE and not op.is_view:
            self._stream.synchronize()
        made = op(*args, **(kwargs or {}))
        self.allocated.append(made)
        return made


class FakeStreams:
    """The streams of the double's one device, which is the CPU."""

    device = torch.device("cpu")
    # The double connects when a communicator is made; a test sets this to see what a GPU's ranks do then.
    connects_late = False

    def __init__(self, library: FakeNccl) -> None:
        self._library, self._on, self._capture = library, threading.local(), FakeCapture()
        self._host = HostsStream(library, self._capture)
        self._made: weakref.WeakSet[FakeStream] = weakref.WeakSet()

    def current(self) -> Any:
        return getattr(self._on, "stream", None) or self._host

    def make(self) -> FakeStream:
        made = FakeStream(self._library, self._capture)
        self._made.add(made)
        return made

    def synchronize(self) -> None:
        """Returns when no stream has anything left to run; raises what one met."""
        for stream in list(self._made):
            stream.synchronize()

    @contextmanager
    def on(self, stream: Any, before: Any = None) -> Iterator[None]:
        before, self._on.stream = self.current(), stream
        try:
            with _AfterStream(stream) as mode:
                yield
            stream.launch(mode.allocated.clear)
        finally:
            self._on.stream = None if before is self._host else before

    def record(self, stream: Any) -> Any:
        return stream.record_event()

    def follow(self, stream: Any, other: Any) -> None:
        stream.wait_event(other.record_event())

    def launch(self, run: Callable[..., object], *arguments: object) -> None:
        self.current().launch(partial(run, *arguments))

    def is_capturing(self) -> bool:
        return self._capture.is_under_way

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """As within torch.cuda.graph, but that what is recorded also runs."""
        self._capture.is_under_way = True
        self._library("fakeCapture", 1)
        try:
            yield
        finally:
            self._library("fakeCapture", 0)
            self._capture.is_under_way = False

    def destroy_graphs(self) -> None:
        """Deletes all that was captured."""
        self._library("fakeDestroyGraphs")

    def bind_thread(self) -> None:
        self._capture.bound_threads.add(threading.get_ident())

    def ignore_captures(self) -> None:
        self._capture.relaxed_threads.add(threading.get_ident())

    def future(self, stream: Any, value: Sequence[torch.Tensor], error: Callable[[], BaseException | None]) -> Any:
        """There when the stream has come to here: whoever waits for it is the host."""
        made: torch.futures.Future[Any] = torch.futures.Future()
        event = stream.record_event()

        def complete() -> None:
            event.synchronize()
            met = error()
            if met is None:
                succeed(made, value)
            else:
                fail(made, value, met)

        threading.Thread(target=complete, name="fake-future", daemon=True).start()
        return made


@functools.cache
def fake_streams(fake: FakeNccl) -> FakeStreams:
    """Those of this process."""
    return FakeStreams(fake)


def use_fake_nccl() -> None:
    """Lets this process, which has made no world yet, carry tensors of the CPU by NCCL's transport on the double."""
    assert registry.find(identity.current()) is None, "the transport is chosen before the first world"
    path = build()
    os.environ.update(TRITONDT_NCCL_SO=str(path), TRITONDT_TRANSPORT="nccl-double")
    fake = load(path)
    fake.set(FAKE_NCCL_PEER_LOSS="error")

    def make(member: ProcessContext) -> NcclCommunicator:
        number = int(os.environ.get("FAKE_CUDA_DEVICE", "0"))
        arenas = share_device_arenas(member, number, torch.device("cpu"), lambda: CudaDriver(str(build_fake_cuda())))
        return NcclCommunicator(member, NcclLibrary(str(path), None), fake_streams(fake), arenas)

    # The prices of the CPU's tensors are then those of messages, as NCCL's are, and not those of shared memory.
    made = Transport("nccl-double", ("cpu",), NcclCommunicator, make, wire="NCCL", knows_hosts=True)
    register_transport(made)
    keep(doubled("cpu", transport=make))


def use_fake_backend() -> None:
    """Lets the backend "tritondt" carry tensors of the CPU by NCCL, on the double, where it would use Gloo."""
    path = build()
    os.environ["TRITONDT_NCCL_SO"] = str(path)
    fake = load(path)
    fake.set(FAKE_NCCL_PEER_LOSS="error", FAKE_NCCL_MISMATCH="error")
    streams = fake_streams(fake)

    def nccl_device(device: torch.device) -> NcclDevice:
        return NcclDevice(NcclLibrary(str(path), None), streams)

    keep(doubled("cpu", nccl_device=nccl_device))


def backend_ranks(over: str, size: int, **environment: str) -> GlooRanks:
    """Processes on the backend "tritondt": over sockets, shared memory, Gloo, or NCCL, which is then the double."""
    if over != "nccl":
        environment["TRITONDT_TRANSPORT"] = over
    return GlooRanks(size, environment, prepare=use_fake_backend if over == "nccl" else None, backend="tritondt")


def ranks_on(transport: str, size: int, **environment: str) -> GlooRanks:
    """Processes whose messages go over sockets, shared memory, gloo, or nccl, which is then the double."""
    if transport == "nccl":
        return GlooRanks(size, environment, prepare=use_fake_nccl)
    return GlooRanks(size, {**environment, "TRITONDT_TRANSPORT": transport})
