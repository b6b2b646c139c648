"""Operations of some ranks in the order of their issue, on a communicator of NCCL and its stream engine.

The host waits for nothing. A communicator whose operation does not end in time is aborted, never destroyed: destroying
waits.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tritondt._C import GroupCalls, NcclLibrary
from tritondt.comm.daemons import start_daemon
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import EXCHANGING
from tritondt.comm.nccl.library import nccl_library
from tritondt.comm.nccl.stream_engine import StreamEngine
from tritondt.comm.nccl.streams import CudaStreams, Stream, Streams
from tritondt.comm.nccl.watched import MonitoredNccl, TimeoutPolicy
from tritondt.errors import PeerError, WorldError
from tritondt.kernels.device_types import ByDeviceType
from tritondt.process_group.naming import PreMulSum
from tritondt.process_group.operation import Operation
from tritondt.process_group.work import NcclWork

_LIMIT = "the process group's"
_MUST = "call the same operations with the same sizes in the same order"


def _do_nothing() -> None: ...


class NcclDevice(NamedTuple):
    """A library of NCCL, and the streams of the device whose tensors it carries."""

    library: NcclLibrary
    streams: Streams


class CollectiveStream:
    """One rank's end of a stream of operations, which all ranks of `context` make together.

    `on_failure` is called with the reason why nothing runs any more.
    """

    def __init__(
        self, context: ProcessContext, nccl_device: NcclDevice, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._context, self._streams = context, nccl_device.streams
        self._recorder = context.flight.recorder
        self._label = self._recorder.label(context.name)
        others = tuple(rank for rank in context.ranks if rank != context.rank)
        policy = TimeoutPolicy(_LIMIT, _MUST, others)
        self.engine = StreamEngine(nccl_device.streams, self._recorder)
        self._monitored = MonitoredNccl(context, nccl_device.library, self.engine, on_failure, policy)
        self.on_unusual: Callable[[], object] = _do_nothing  # told where an operation is not to go by the shortest way
        self.turn = threading.Lock()

    def put(self, work: NcclWork, tensors: Sequence[torch.Tensor]) -> None:
        """Puts an operation into the stream, on these tensors; what goes wrong is its work's error."""
        with self.turn:
            try:
                self._put(work, tensors)
            except PeerError as error:
                work.fail(error)
            finally:
                work.was_put()

    def _put(self, work: NcclWork, tensors: Sequence[torch.Tensor]) -> None:
        monitored, engine, operation = self._monitored, self.engine, work.in_flight
        if monitored.failure is not None:
            work.fail(monitored.failure)
            return
        if monitored.refusals.open:
            monitored.settle_refusals()
        stream = engine.begin(operation, work.is_synchronous, work.ready)
        if engine.is_capturing:  # a graph is being made: nothing runs, and nothing is waited for
            monitored.num_captured += 1
            self._call(work.operation, tensors, stream)
        else:
            # Numbered, for recorder and watch.
            engine.sequence += 1
            recorder, kind = self._recorder, work.operation
            label = recorder.label(kind.text)
            entry = recorder.begin(self._label, engine.sequence, label, kind.fingerprint, operation.site, EXCHANGING)
            operation.begin(engine.sequence, entry)
            engine.watch(operation)
            try:
                self._call(work.operation, tensors, stream)
            except BaseException as error:
                monitored.break_off(operation, error, "run")
                raise
        engine.end(operation, stream)

    def open(
        self, calls: GroupCalls, find: Callable[[Any, Any, Any], Any], check_usable: Callable[[str], None]
    ) -> None:
        """Lets `calls` put operations into the stream that `find` knows, while nothing unusual happens."""
        if self._monitored.failure is not None or self._monitored.refusals.open:
            return
        self.check_usable, self.on_unusual = check_usable, calls.close
        token = torch.empty(0, device=self._streams.device)
        native, recorder = self._monitored.native, self._recorder
        calls.open(self, self.engine, native, recorder, self._label, self.turn, NcclWork, token, find)
        if self._monitored.failure is not None or self._monitored.refusals.open:
            calls.close()  # another thread has ended or refused something since the question above

    def note_captured(self) -> None:
        """Notes that an operation was captured into a CUDA graph."""
        self._monitored.num_captured += 1

    def break_off(self, work: NcclWork, error: BaseException) -> None:
        """Ends everything for what was raised while an operation was put into the stream by one call."""
        try:
            self._monitored.break_off(work.in_flight, error, "run")
        except PeerError as told:
            work.fail(told)
            return
        raise error

    def _call(self, operation: Operation, tensors: Sequence[torch.Tensor], stream: Stream) -> None:
        """Gives an operation's calls to NCCL, between the copies that they need."""
        if not operation.stagings:
            native = operation.native
            if native is None or len(tensors) > 1:
                self._run(operation, tensors, stream)
            else:  # a comprehension is a call
                self._monitored.native.run(native, [tensors[0].data_ptr()], stream.cuda_stream)
            return
        lists = [[tensors[number] for number in staging.tensors] for staging in operation.stagings]
        with self._streams.on(stream), torch.no_grad():
            memories = [_memory_of(parts) for parts in lists]
            for staging, memory, parts in zip(operation.stagings, memories, lists, strict=True):
                if staging.is_before:
                    torch._foreach_copy_(_rows(memory, parts), parts)
            self._run(operation, [*tensors, *memories], stream)
            for staging, memory, parts in zip(operation.stagings, memories, lists, strict=True):
                if not staging.is_before:
                    torch._foreach_copy_(parts, _rows(memory, parts))

    def _run(self, operation: Operation, tensors: Sequence[torch.Tensor], stream: Stream) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if operation.native is None:
            self._call_with_ops(operation, addresses, stream)
        else:
            self._monitored.native.run(operation.native, addresses, stream.cuda_stream)

    def _call_with_ops(self, operation: Operation, addresses: list[int], stream: Stream) -> None:
        """Gives calls to NCCL by ops that are made for them, and end when NCCL has the calls."""
        native, made = self._monitored.native, dict[int, int]()
        try:
            for place, call in enumerate(operation.calls):
                if isinstance(call.op, PreMulSum):
                    made[place] = self._made_op(call.op, call.dtype)
            calls = [(*call[:5], made.get(place, call.op), call.peer) for place, call in enumerate(operation.calls)]
            native.run(operation.compiled(calls), addresses, stream.cuda_stream)
        finally:
            for number in made.values():
                native.destroy_op(number)

    def _made_op(self, op: PreMulSum, dtype: str) -> int:
        if isinstance(op.factor, float):
            return self._monitored.native.pre_mul_sum(op.factor, dtype)
        return self._monitored.native.pre_mul_sum_on_device(op.factor.data_ptr(), dtype)

    def refuse(self, error: BaseException) -> None:
        """Tells the others that this rank takes no part in the next operation, and why; it counts as run."""
        self.on_unusual()
        with self.turn:
            self.engine.sequence += 1
            self._monitored.refuse(self.engine.sequence, error)

    def fail(self, error: BaseException) -> None:
        """Ends what is under way, with this error, and aborts the communicator."""
        self.on_unusual()
        self._monitored.fail(error)

    def abort(self) -> None:
        """Ends what is under way without waiting for the others."""
        self.fail(WorldError(f"{self._context.name} was aborted"))

    def end_with_process(self, limit_s: float) -> None:
        """Leaves NCCL to the end of the process when the stream is through; aborts what is not within `limit_s`."""
        self.on_unusual()
        if not self._monitored.leave(limit_s):
            self.abort()

    def close(self) -> None:
        """Waits for all that was issued, and ends the communicator."""
        self.on_unusual()
        self.engine.synchronize()
        with self.turn:
            self._monitored.close(WorldError(f"{self._context.name} was closed"))


def _memory_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Memory in which tensors like `parts`, which are alike, lie end to end."""
    first = parts[0]
    return torch.empty((len(parts), first.numel()), dtype=first.dtype, device=first.device)


def _rows(memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory's rows in the shapes of its tensors."""
    return [row.view_as(part) for row, part in zip(memory, parts, strict=True)]


class P2PStream:
    """One rank's end of a stream of messages from one rank to another, which is made once both have come."""

    def __init__(self, name: str, make: Callable[[], CollectiveStream], streams: Streams) -> None:
        self._name, self._make, self._streams = name, make, streams
        self._changing = threading.RLock()  # a message that fails while it is put ends all of them
        self._waiting: list[tuple[NcclWork, Sequence[torch.Tensor]]] = []
        self._stream: CollectiveStream | None = None
        self._is_connecting = False
        self._failure: BaseException | None = None

    def put(self, work: NcclWork, tensors: Sequence[torch.Tensor]) -> None:
        """Puts a message into the stream, when the other rank has come."""
        with self._changing:
            if self._failure is not None:
                work.fail(self._failure)
            elif self._stream is not None:
                self._stream.put(work, tensors)
            else:
                work.defer()
                self._waiting.append((work, tensors))
                self._connect_once()

    def _connect_once(self) -> None:
        if not self._is_connecting:
            start_daemon(self._connect, f"tritondt-{self._name}")  # raises where there is no thread to be had
            self._is_connecting = True

    def _connect(self) -> None:
        try:
            self._streams.bind_thread()
            stream = self._make()
        except BaseException as error:  # noqa: BLE001  whoever waits for a message raises it
            self.fail(error)
            return
        with self._changing:
            if self._failure is not None:
                stream.fail(self._failure)
            self._stream = stream
            for work, tensors in self._waiting:
                stream.put(work, tensors)
            self._waiting.clear()

    def fail(self, error: BaseException) -> None:
        """Ends the stream, and what waits for the other rank, with this error."""
        if self._stream is not None:  # first, so that whoever is held up there lets go
            self._stream.fail(error)
        with self._changing:
            self._failure = self._failure or error
            for work, _ in self._waiting:
                work.fail(error)
            self._waiting.clear()

    def close(self) -> None:
        """Waits for all that was issued, and ends the stream."""
        if self._stream is not None:
            self._stream.close()


def _gpu_device(device: torch.device) -> NcclDevice:
    return NcclDevice(nccl_library(), CudaStreams(device))


# By the type of device; tensors on others go through shared memory or over sockets.
nccl_devices = ByDeviceType[Callable[[torch.device], NcclDevice]](cuda=_gpu_device)
