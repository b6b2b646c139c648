"""Messages by NCCL in streams: the transport for tensors on GPUs.

An exchange is one pack, one group of sends and receives and one unpack, put into the communicator's stream, or into the
caller's where its next operators come after it anyway; the host waits for none of them. A communicator whose exchange
does not end in time is aborted, never destroyed, since destroying waits.
"""

import threading
from collections.abc import Sequence
from functools import partial
from types import EllipsisType

import torch
from torch.autograd import profiler

from tritondt._C import NcclLibrary
from tritondt.comm.communicator import Transfer
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import PACK, SEND, UNPACK, ExchangeRecord
from tritondt.comm.nccl.library import nccl_library
from tritondt.comm.nccl.programs import Issuer, StreamProgram, exchange_program, has_program
from tritondt.comm.nccl.stream_engine import InFlight, StreamEngine
from tritondt.comm.nccl.stream_queue import StreamQueue
from tritondt.comm.nccl.streams import CudaStreams, Streams
from tritondt.comm.nccl.watched import MonitoredNccl, TimeoutPolicy
from tritondt.comm.packing.collective_transfer import collective_transfer
from tritondt.comm.packing.messages import MessageBuffers, message_buffers
from tritondt.comm.packing.packed_transfer import ALIGNED, CollectiveCall, PackedTransfer, Program, TensorStarts
from tritondt.comm.packing.placed_transfer import PlacedTransfer, placed_transfer
from tritondt.comm.transports.base import Operands, PackedCommunicator
from tritondt.comm.transports.device_arenas import DeviceArenas, share_device_arenas
from tritondt.comm.transports.window_arenas import share_windows
from tritondt.comm.work import again
from tritondt.errors import TransportError
from tritondt.kernels.tables import made_together
from tritondt.planning.alignment import NCCL_ALIGNMENT
from tritondt.planning.collectives import Collective

# What stays is moved behind the messages in their stream either way, and so by the unpack. Where only a pack is there,
# one launch does both up to so many bytes, which take a GPU's memory about 1 us; above, messages do not wait for them.
# The bound is a guess, to be measured on a GPU.
_JOINT_BYTES = 1 << 20


class NcclCommunicator(PackedCommunicator):
    """A communicator of ranks connected by NCCL; made by all of them together, on the device of `streams`."""

    alignment = NCCL_ALIGNMENT
    joint_bytes = _JOINT_BYTES
    _queue: StreamQueue

    def __init__(
        self,
        context: ProcessContext,
        library: NcclLibrary,
        streams: Streams,
        arenas: DeviceArenas | None = None,
    ) -> None:
        """`arenas` are those that this rank shares with others of its host: most messages between them go there."""
        self._arenas = arenas
        self._streams, self._device, self.device_types = streams, streams.device, (streams.device.type,)
        self._engine = StreamEngine(streams, context.flight.recorder)
        super().__init__(context, StreamQueue(self._engine), streams.launch)
        self._timeout_s, self._is_told = context.timeout.total_seconds(), False
        self._latest: InFlight | None = None
        try:
            self._watched = MonitoredNccl(context, library, self._engine, self._on_failure, TimeoutPolicy())
        except BaseException:
            if arenas is not None:
                arenas.close()
            raise
        self._programs = object()  # the key of this communicator's programs among what transfers were compiled to
        self._issuer = Issuer(self._engine, self._watched.native, self._launch, self._label, self.alignment)
        if arenas is None:
            self._arenas = arenas = share_windows(context, self._watched.native, library, self._device)
        if arenas is not None:
            self._watched.on_abort, self._watched.trouble = arenas.stop, self._ended_processes
            self._watched.before_end = partial(arenas.end, self._queue.stream)

    def _exchange_now(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        """Puts this rank's side of an exchange into the current stream."""
        if self._is_inherited:
            self._check_usable(transfer.description)
        site = self._recorder.site()
        with self._queue.synchronous():
            self._exchange(sources, targets, transfer, site)
        self._raise_failure_once()

    def _exchange(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer, site: int
    ) -> None:
        """Puts an exchange into the stream: by its program, in one call of the extension, or part by part.

        Part by part goes the first one, and what is captured, compared, profiled or to be refused.
        """
        program: StreamProgram | EllipsisType | None = transfer.compiled.get(self._programs, ...)
        if isinstance(program, StreamProgram) and not (
            self.failure is not None
            or self._compares
            or self._engine.is_capturing
            or self._watched.refusals.open
            or profiler._is_profiler_enabled
        ):
            if self._issue(program, sources, targets, transfer.device, site):
                return
            program = ...  # for other tensors: anew
        if program is ...:
            self._check_tensors(sources, targets, transfer)
        super()._exchange(sources, targets, transfer, site)
        if program is ...:
            self._make_program(sources, targets, transfer)

    def _make_program(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        plan, record = self._plan(transfer)
        if not isinstance(plan, PackedTransfer) or not has_program(plan):
            transfer.compiled[self._programs] = None
            return
        made = exchange_program(self._issuer, plan, record, sources, targets)
        if made is not None:
            transfer.compiled[self._programs] = made

    def _issue(
        self,
        program: StreamProgram,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        device: torch.device,
        site: int,
    ) -> bool:
        """Puts an exchange into the stream by its program; False, with nothing done, where the tensors are others."""
        native, plan, record, num_bytes = program
        # Calls of Python functions take more of the host's time than what is in them.
        queue, start, memory = self._queue, 0, None
        is_issued = queue.thread_id == threading.get_ident()
        if num_bytes:
            memory = queue.kept if is_issued else None
            if memory is None or memory.numel() < num_bytes:
                memory = self._buffers((plan.staged_bytes, plan.packed_bytes), device)[0]
            start = memory.data_ptr()
        if queue.ending:
            queue.mark_step()
        threads = torch.get_num_threads()
        try:
            operation = native.issue(sources, targets, start, self.sequence + 1, site, self._timeout_s, threads)
        except BaseException as error:
            self._break_off_program(native.operation, record, error)
            raise
        if operation is None:
            return False
        self.sequence += 1
        traffic = self._traffic  # as its `count`, which is a call
        traffic.sent_bytes += plan.sent_bytes
        traffic.received_bytes += plan.received_bytes
        traffic.num_sent += len(plan.sends)
        traffic.num_received += len(plan.receives)
        if is_issued:
            queue.ending.append(operation)
        else:
            queue.mark_end(operation)
        return True

    def _break_off_program(self, operation: InFlight | None, record: ExchangeRecord, error: BaseException) -> None:
        """Ends everything where half of an exchange is in the stream; see `break_off`."""
        if operation is None:
            return
        self.sequence += 1
        record.site, record.entry, self._latest = operation.site, operation.record, operation
        try:
            self.break_off(record, error)
        except BaseException as told:
            self._record_failure(record, told)
            raise
        self._record_failure(record, error)

    def prepare(self, transfers: Sequence[Transfer]) -> None:
        """Compiles transfers, and their kernels side by side."""
        with made_together(self._device):
            for transfer in transfers:
                self._plan(transfer)

    def _compiled(self, transfer: Transfer, starts: TensorStarts = ALIGNED) -> Program:
        if self._arenas is not None and transfer.collective is None and transfer.wire_dtype is None:
            placed = placed_transfer(transfer, self._arenas, self.alignment, starts)
            if placed is not None:
                return placed
        return super()._compiled(transfer, starts)

    def _run_plan(self, plan: Program, record: ExchangeRecord, device: torch.device, operands: Operands) -> None:
        if not isinstance(plan, PlacedTransfer):
            super()._run_plan(plan, record, device, operands)
            return
        sources, targets, source_pointers, target_pointers = operands
        memory, staging, buffer, _ = self._buffers((plan.staged_bytes, plan.packed_bytes), device)
        self.sequence += 1
        self._traffic.count(plan.sent_bytes, plan.received_bytes, len(plan.sends), len(plan.receives))
        receives = message_buffers((plan.receives, targets, target_pointers, memory, staging))
        sends = message_buffers((plan.sends, sources, source_pointers, memory, buffer))
        launch, step = self._launch, self._recorder.step
        try:
            self.post(record, receives, sends)
            if plan.pack is not None:
                step(record.entry, PACK)
                launch(plan.pack.run, source_pointers, [buffer, *plan.slots], 1)
            if plan.far_sends or plan.far_receives:  # messages to other hosts do not wait for what comes from this one
                step(record.entry, SEND)
                self.start(
                    record,
                    message_buffers((plan.far_receives, targets, target_pointers, memory, staging)),
                    message_buffers((plan.far_sends, sources, source_pointers, memory, buffer)),
                )
            if plan.unpack is not None or plan.reduces:
                step(record.entry, UNPACK)
            if plan.unpack is not None:
                launch(plan.unpack.run, [staging, *plan.own_slots, *source_pointers], target_pointers, 1)
            for table in plan.reduces:
                launch(table.run, [*source_pointers, staging, *plan.own_slots], target_pointers, 1)
        except BaseException as error:
            self.break_off(record, error)
            raise

    def _ended_processes(self) -> str | None:
        ended = [] if self._arenas is None else [f"{self._ranks[place]}" for place in self._arenas.ended()]
        if not ended:
            return None
        return f"the process of rank {' and that of rank '.join(ended)} has ended"

    def _plan_at(self, transfer: Transfer, sources: Sequence[int], targets: Sequence[int]) -> Program:
        plan = self._plan(transfer)[0]
        if isinstance(plan, PlacedTransfer) and not plan.far_sends and not plan.far_receives:
            return plan  # packs and unpacks are for any start
        return super()._plan_at(transfer, sources, targets)

    def post(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Begins the watch over the exchange, which is about to be put into the stream."""
        if self._watched.refusals.open:
            self._watched.settle_refusals()
        if self._engine.is_capturing:  # a graph is being made: nothing runs, and nothing is waited for
            self._watched.num_captured += 1
            return
        self._queue.mark_step()
        self._latest = operation = InFlight(record.text, record.fingerprint, record.site, self._timeout_s)
        operation.messages = receives.slices, sends.slices
        operation.begin(self.sequence, record.entry)
        self._engine.watch(operation)

    def start(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Puts sends and receives into the stream as one group."""
        self._watched.native.exchange_slices(
            sends.slices.native,
            sends.pointers,
            sends.buffer,
            receives.slices.native,
            receives.pointers,
            receives.buffer,
            self._engine.target.cuda_stream,
        )

    def _compiled_collective(
        self, transfer: Transfer, collective: Collective, starts: TensorStarts = ALIGNED
    ) -> PackedTransfer:
        return collective_transfer(transfer, collective, self._place, self.alignment, starts)

    def start_collective(
        self, call: CollectiveCall, sources: Sequence[int], targets: Sequence[torch.Tensor], buffer: int, staging: int
    ) -> None:
        """Puts a collective of NCCL into the stream."""
        native, stream = self._watched.native, self._engine.target.cuda_stream
        source = buffer if call.source_start is None else sources[0] + call.source_start
        target = staging if call.is_staged else targets[0].data_ptr() + call.target_start
        if call.kind == "all_gather":
            native.all_gather(source, target, call.num_elements, call.dtype, stream)
        elif call.kind == "reduce_scatter":
            native.reduce_scatter(source, target, call.num_elements, call.dtype, call.op, stream)
        else:
            native.all_reduce(source, target, call.num_elements, call.dtype, call.op, stream)
        if call.divisor != 1:
            targets[0].div_(call.divisor)

    def _staging(self, num_bytes: int, device: torch.device, collective: CollectiveCall | None) -> torch.Tensor:
        registered_bytes = 0 if collective is None else collective.registered_bytes
        if not registered_bytes or self._engine.is_capturing:  # memory of a graph is the graph's
            return self._queue.staging(num_bytes, device)
        return self._watched.registered(registered_bytes).first(num_bytes)

    def finish(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Does nothing: the stream runs what comes next when all messages have come."""

    def break_off(self, record: ExchangeRecord, error: BaseException) -> None:
        """Ends everything where half of the exchange is in the stream; PeerError in place of NCCL's own error."""
        self._queue.mark_break()
        found = self._latest
        if found is not None and found.record == record.entry:
            self._watched.break_off(found, error, "exchange in")

    def _record_end(self, record: ExchangeRecord, sent_bytes: int, received_bytes: int) -> None:
        """Notes the bytes of an exchange, which is recorded as done when the stream has come past it."""
        found = self._latest
        if found is None or found.record != record.entry:  # of a graph, or without a message
            super()._record_end(record, sent_bytes, received_bytes)
            return
        self._latest = None
        found.sent_bytes, found.received_bytes = sent_bytes, received_bytes
        self._recorder.leave(record.entry)
        self._queue.mark_end(found)

    def _record_failure(self, record: ExchangeRecord, error: BaseException) -> None:
        super()._record_failure(record, error)
        found = self._latest
        if found is not None and found.record == record.entry and found.event is None:  # half of it is in the stream
            self._watched.give_up(error)

    def fail(self, error: BaseException) -> None:
        """Ends everything for what happened in a communicator that works with it, and tells the others why."""
        self._watched.give_up(error)

    def _on_failure(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._queue.fail(error)

    def _raise_failure_once(self) -> None:
        """Raises the failure that everything was broken off for, once; later use is refused by `_check_usable`."""
        if self.failure is not None and not self._is_told:
            self._is_told = True
            raise again(self.failure) from self.failure

    def _all_gather(self, record: ExchangeRecord, site: int, own: bytes, peers: Sequence[int]) -> torch.Tensor:
        """Bytes of all ranks, gathered in memory of the device; the host waits."""
        with self._queue.synchronous():
            rows = super()._all_gather(record, site, own, peers)
            stream = self._engine.target
        stream.synchronize()
        self._raise_failure_once()
        return rows.cpu()

    def _bytes_of(self, content: bytes) -> torch.Tensor:
        return super()._bytes_of(content).to(self._streams.device, copy=True)

    def _check_devices(self, tensors: Sequence[torch.Tensor], transfer: Transfer) -> None:
        own = self._device
        for tensor in tensors:
            if tensor.device != own:
                raise TransportError(
                    f"NCCL was given a tensor on {tensor.device}; this rank's communicator carries tensors on "
                    f"{self._streams.device} only"
                )

    def _refuse(self, error: BaseException) -> None:
        self.sequence += 1
        self._watched.refuse(self.sequence, error)

    def set_timeout(self, seconds: float) -> None:
        """Sets how long an exchange may take from now on, in seconds from when it is put into the stream."""
        self._check_usable(f"a timeout of {seconds:g} s")
        self._timeout_s = seconds

    def _disconnect(self, reason: BaseException) -> None:
        self._watched.close(reason)
        self._let_go()

    def _let_go(self) -> None:
        if self._arenas is None:
            return
        if self._queue.is_through and self._watched.num_captured == 0:
            self._arenas.close()
        else:  # a kernel may use them yet, or a CUDA graph
            self._arenas.abandon()

    def _interrupt(self, reason: BaseException) -> None:
        self._watched.fail(reason)

    def end_with_process(self, limit_s: float) -> None:
        """Leaves NCCL to the end of the process when the stream is through; aborts what is not within `limit_s`."""
        if self._is_inherited or self._watched.leave(limit_s):
            return
        self.begin_abort()


def connect(context: ProcessContext) -> NcclCommunicator:
    """A communicator of this rank's current GPU and the others'."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams = CudaStreams(device)
    streams.current().synchronize()  # makes the device's context, where there is none yet
    return NcclCommunicator(context, nccl_library(), streams, share_device_arenas(context, device.index, device))
