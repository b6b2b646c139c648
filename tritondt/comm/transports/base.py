"""Exchanges made of messages between pairs of ranks: one pack, one group of messages, one unpack.

A message that is one run of a tensor's memory is sent from there, and lands there, without a copy; this is
each rank's own decision and changes no message. All others go through two buffers, one for what is packed
and one for what arrives, that live for the one call.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch.autograd import profiler

from tritondt.comm.communicator import Role, Traffic, Transfer
from tritondt.comm.member import CommunicatorContext
from tritondt.comm.monitor.comparison import (
    NOTES_FINGERPRINT,
    Note,
    PastLines,
    difference,
    digest_of_line,
    read_note,
    write_note,
)
from tritondt.comm.monitor.flight import DONE, FAILED, ISSUED, KEEP, PACK, SEND, UNPACK, WAIT, ExchangeRecord
from tritondt.comm.packing.arena_transfer import ProgramTransfer
from tritondt.comm.packing.messages import MessageBuffers, Slice, Slices, message_buffers
from tritondt.comm.packing.packed_transfer import (
    ALIGNED,
    Casting,
    CollectiveCall,
    PackedTransfer,
    Program,
    TensorStarts,
    buffer_places,
    packed_transfer,
)
from tritondt.comm.packing.wire_cast import casting_transfer
from tritondt.comm.transports.ordered import OrderedCommunicator
from tritondt.comm.work import IssueQueue, run_at_once
from tritondt.errors import RefusalError, TransportError
from tritondt.kernels.memory import allocate
from tritondt.kernels.tables import made_together
from tritondt.planning.alignment import DENSE
from tritondt.planning.collectives import Collective

_BARRIER_FINGERPRINT = 0x62617272
# Sources and targets of an exchange, and their addresses.
Operands = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], list[int], list[int]]
# Name of an exchange's range in torch.profiler, while one is on.
EXCHANGE_RANGE = "tritondt::exchange"


class PackedCommunicator(OrderedCommunicator):
    """A communicator whose transport carries bytes from one rank to another.

    An exchange calls the transport's `post`, packs, calls `start`, keeps what stays on this rank, calls `finish`, and
    unpacks; `break_off` where one of these raises.
    """

    device_types: tuple[str, ...] = ("cpu",)
    # Whether messages of an exchange that a rank has refused can be dropped, so that others can follow it.
    drops_refused = False
    alignment = DENSE
    joint_bytes = 0  # see `packed_transfer`

    def __init__(
        self, context: CommunicatorContext, queue: IssueQueue, launch: Callable[..., object] | None = None
    ) -> None:
        """`launch(run, *arguments)` runs a table where it is in order with the messages: at once, by default."""
        super().__init__(context, queue)
        self._launch = launch or run_at_once
        self._traffic = Traffic()
        self._label = self._recorder.label(context.name)
        self._realigned: WeakKeyDictionary[Transfer, dict[TensorStarts, Program]] = WeakKeyDictionary()
        self._compares, self._past_lines = context.compares, PastLines()

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages that the communicator has moved so far."""
        return self._traffic

    def post(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Does what a transport needs before packing: nothing, unless receives are posted that early."""

    @abstractmethod
    def start(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Starts an exchange of messages, all of which are packed."""

    @abstractmethod
    def finish(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Waits for all messages, where the host waits for them."""

    @abstractmethod
    def break_off(self, record: ExchangeRecord, error: BaseException) -> None:
        """Ends an exchange with messages that raised `error`, in `post` or later; may raise what explains it."""

    def _skip(self) -> None:
        """Drops what is left of exchange number `sequence`, and what arrives of it later; see `drops_refused`."""
        raise NotImplementedError(f"{type(self).__name__} takes no message back")

    def _end_broken(self, record: ExchangeRecord, error: BaseException) -> None:
        """Ends an exchange with messages that raised `error`: one that another rank refused counts as run."""
        if isinstance(error, RefusalError) and self.drops_refused and self.failure is None:
            self._skip()
            return
        try:
            self.break_off(record, error)
        finally:
            self._fail_together(error)

    def traffic_of(self, transfer: Transfer) -> Traffic:
        """Bytes and messages that this rank will send and receive in an exchange."""
        plan, _ = self._plan(transfer)
        return Traffic(plan.sent_bytes, plan.received_bytes, plan.num_sent, plan.num_received)

    def _plan(self, transfer: Transfer) -> tuple[Program, ExchangeRecord]:
        """The transfer as it is compiled here, and its record."""
        found: tuple[Program, ExchangeRecord] | None = transfer.compiled.get(self)
        if found is None:
            record = self._new_record(transfer.fingerprint, transfer.description)
            with made_together(transfer.device):
                found = transfer.compiled[self] = self._compiled(transfer), record
            record.sends, record.receives = found[0].sends, found[0].receives
        return found

    def _compiled(self, transfer: Transfer, starts: TensorStarts = ALIGNED) -> Program:
        """The transfer compiled to messages and tables, or to what the transport itself runs."""
        if isinstance(transfer, ProgramTransfer):
            assert isinstance(transfer.plan, PackedTransfer), f"{transfer.description} is no program of messages"
            return transfer.plan
        if transfer.collective is not None:
            return self._compiled_collective(transfer, transfer.collective, starts)
        wire_dtype = transfer.wire_dtype
        if wire_dtype is None:
            return packed_transfer(transfer, self.alignment, starts, self.joint_bytes)
        return casting_transfer(transfer, wire_dtype, self.alignment)

    def _compiled_collective(
        self, transfer: Transfer, collective: Collective, starts: TensorStarts = ALIGNED
    ) -> PackedTransfer:
        """A collective compiled to a call; TransportError where the transport has none."""
        raise TransportError(
            f"{transfer.description} was priced as {collective.kind} of NCCL, and {type(self).__name__} has none; "
            f'allowed for tensors on {transfer.device.type} are prices with "collectives": 0 (TRITONDT_COSTS)'
        )

    def start_collective(
        self, call: CollectiveCall, sources: Sequence[int], targets: Sequence[torch.Tensor], buffer: int, staging: int
    ) -> None:
        """Starts a collective, from the send buffer or a source's address; for transports that compile some."""
        raise NotImplementedError(f"{type(self).__name__} compiles no {call.kind}")

    def _exchange(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer, site: int
    ) -> None:
        if self.failure is not None:
            self._check_usable(transfer.description)
        self._check_devices(sources, transfer)
        plan, record = self._plan(transfer)
        if self._compares:
            self._compare(record, site, transfer.role)
        self._record_begin(record, site)
        try:
            if profiler._is_profiler_enabled:
                with profiler.record_function(EXCHANGE_RANGE, transfer.description):
                    self._move(sources, targets, plan, record, transfer)
            else:
                self._move(sources, targets, plan, record, transfer)
        except BaseException as error:
            self._record_failure(record, error)
            raise
        self._record_end(record, plan.sent_bytes, plan.received_bytes)

    def _move(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        plan: Program,
        record: ExchangeRecord,
        transfer: Transfer,
    ) -> None:
        """Runs a compiled exchange of these tensors, whatever they start at."""
        if len(sources) == len(targets) == 1:  # a comprehension is a call
            source_pointers, target_pointers = [sources[0].data_ptr()], [targets[0].data_ptr()]
            joined = source_pointers[0] | target_pointers[0]
        else:
            source_pointers = [tensor.data_ptr() for tensor in sources]
            target_pointers = [tensor.data_ptr() for tensor in targets]
            joined = max((it % self.alignment.in_place for it in (*source_pointers, *target_pointers)), default=0)
        if joined % self.alignment.in_place:
            plan = self._plan_at(transfer, source_pointers, target_pointers)
        self._run_plan(plan, record, transfer.device, (sources, targets, source_pointers, target_pointers))

    def _run_plan(self, plan: Program, record: ExchangeRecord, device: torch.device, operands: Operands) -> None:
        """Runs a compiled exchange of these tensors: one of messages and tables."""
        assert isinstance(plan, PackedTransfer), f"{type(self).__name__} compiles no {type(plan).__name__}"
        sources, targets, source_pointers, target_pointers = operands
        threads, step = torch.get_num_threads(), self._recorder.step
        memory, staging, buffer, widened = self._buffers(
            (plan.staged_bytes, plan.packed_bytes), device, plan.casting, plan.collective
        )
        self.sequence += 1
        if plan.sends or plan.receives:
            self._traffic.count(plan.sent_bytes, plan.received_bytes, len(plan.sends), len(plan.receives))
            receives = message_buffers((plan.receives, targets, target_pointers, memory, staging))
            sends = message_buffers((plan.sends, sources, source_pointers, memory, buffer))
            try:
                self.post(record, receives, sends)
                self._pack(plan, record, source_pointers, buffer, target_pointers, threads)
                step(record.entry, SEND)
                if plan.collective is None:
                    self.start(record, receives, sends)
                else:
                    self.start_collective(plan.collective, source_pointers, targets, buffer, staging)
                self._keep(plan, record, source_pointers, buffer, target_pointers, threads)
                step(record.entry, WAIT)
                self.finish(record, receives, sends)
                # Whoever has not unpacked lacks the result, and takes part in nothing that follows from it.
                self._unpack(plan, record, source_pointers, (staging, buffer, widened), target_pointers, threads)
            except BaseException as error:
                self._end_broken(record, error)
                raise
        else:
            self._pack(plan, record, source_pointers, buffer, target_pointers, threads)
            self._keep(plan, record, source_pointers, buffer, target_pointers, threads)
            self._unpack(plan, record, source_pointers, (staging, buffer, widened), target_pointers, threads)

    def _plan_at(self, transfer: Transfer, sources: Sequence[int], targets: Sequence[int]) -> Program:
        """The plan of the same messages that packs what would start at no multiple of the alignment."""
        if transfer.wire_dtype is not None:  # all is cast into buffers
            return self._plan(transfer)[0]
        starts = TensorStarts(self.alignment.behind(sources), self.alignment.behind(targets))
        kept = self._realigned.setdefault(transfer, {})
        found = kept.get(starts)
        if found is None:
            with made_together(transfer.device):
                found = kept[starts] = self._compiled(transfer, starts)
        return found

    def _pack(
        self,
        plan: PackedTransfer,
        record: ExchangeRecord,
        sources: list[int],
        buffer: int,
        targets: list[int],
        threads: int,
    ) -> None:
        if plan.pack is None:
            return
        self._recorder.step(record.entry, PACK)
        self._launch(plan.pack.run, sources, [buffer, *targets] if plan.joint == "pack" else [buffer], threads)

    def _keep(
        self,
        plan: PackedTransfer,
        record: ExchangeRecord,
        sources: list[int],
        buffer: int,
        targets: list[int],
        threads: int,
    ) -> None:
        """Copies the parts that stay on this rank; with a wire dtype from the send buffer, rounded alike."""
        if plan.keep is None:
            return
        self._recorder.step(record.entry, KEEP)
        self._launch(plan.keep.run, sources if plan.casting is None else [buffer], targets, threads)

    def _unpack(
        self,
        plan: PackedTransfer,
        record: ExchangeRecord,
        sources: list[int],
        buffers: tuple[int, int, int],
        targets: list[int],
        threads: int,
    ) -> None:
        """Copies received parts to the targets, and reduces; `buffers` are of received, packed and widened bytes."""
        staging, buffer, widened = buffers
        if plan.unpack is not None or plan.reduces:
            self._recorder.step(record.entry, UNPACK)
        if plan.unpack is not None:
            self._launch(
                plan.unpack.run, [staging, *sources] if plan.joint == "unpack" else [staging], targets, threads
            )
        if plan.casting is not None:
            if plan.casting.widen is not None:
                self._launch(plan.casting.widen.run, [staging, buffer], [widened], threads)
            staging = widened
        for table in plan.reduces:
            self._launch(table.run, [*sources, staging], targets, threads)

    def _buffers(
        self,
        num_bytes: tuple[int, int],
        device: torch.device,
        casting: Casting | None = None,
        collective: CollectiveCall | None = None,
    ) -> tuple[torch.Tensor, int, int, int]:
        """Memory of the buffers, and addresses in it: of received, packed and, with a wire dtype, widened bytes.

        `num_bytes` are those that are received and those that are packed.
        """
        packed_at, widened_at, all_bytes = buffer_places(*num_bytes, casting)
        if all_bytes == 0:
            return _NO_BYTES, 0, 0, 0
        try:
            memory = self._staging(all_bytes, device, collective)
        except BaseException as error:  # nothing has been sent: the others can be told
            self._refuse(error)
            raise
        start = memory.data_ptr()
        return memory, start, start + packed_at, start + widened_at

    def _staging(self, num_bytes: int, device: torch.device, collective: CollectiveCall | None) -> torch.Tensor:
        """Memory for what is packed and what arrives, which lives for the one call, of a collective or of messages."""
        return allocate((num_bytes,), torch.uint8, device)

    def _new_record(self, fingerprint: int, text: str) -> ExchangeRecord:
        label = self._recorder.label(text)
        return ExchangeRecord(fingerprint, text, label, self._recorder, key=self._key, ranks=self._ranks)

    def _record_begin(self, record: ExchangeRecord, site: int) -> None:
        """Records the next exchange as issued."""
        record.site = site
        record.entry = self._recorder.begin(
            self._label, self.sequence + 1, record.label, record.fingerprint, site, ISSUED, record
        )

    def _record_end(self, record: ExchangeRecord, sent_bytes: int, received_bytes: int) -> None:
        """Records the end of an exchange."""
        self._recorder.end(record.entry, DONE, -1, sent_bytes, received_bytes)

    def _record_failure(self, record: ExchangeRecord, error: BaseException) -> None:
        self._recorder.end(record.entry, FAILED, self._recorder.label(f"{type(error).__name__}: {error}"))

    def _compare(self, record: ExchangeRecord, site: int, role: Role) -> None:
        """Exchanges notes with all ranks of the communicator; all raise MismatchError where one differs."""
        record.site = site
        line = b"" if site < 0 else digest_of_line(self._recorder.site_text(site))
        own = Note(record.fingerprint, record.description, line, role)
        comparing = self._new_record(NOTES_FINGERPRINT, f"a comparison before {record.text}")
        arrived = self._all_gather(comparing, site, write_note(own), self._others)
        notes = {rank: read_note(bytes(row)) for rank, row in zip(self._ranks, arrived.tolist(), strict=True)}
        notes[self._rank] = own
        found = difference(self.sequence, notes) or self._past_lines.swapped(self.sequence, notes)
        if found is not None:
            raise found

    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""
        self.in_order(self._barrier, "a barrier")

    def _barrier(self) -> None:
        self._queue.drain()
        self._check_usable("a barrier")
        self._meet(self._new_record(_BARRIER_FINGERPRINT, "a barrier"), self._others)

    def _meet(self, record: ExchangeRecord, places: Sequence[int]) -> None:
        self._all_gather(record, self._recorder.site(), b"\0", places)

    def _all_gather(self, record: ExchangeRecord, site: int, own: bytes, peers: Sequence[int]) -> torch.Tensor:
        """The bytes `own` of every rank, a row for each, by an exchange of their own; of `peers`, the others' stay."""
        self._record_begin(record, site)
        num_bytes, sent = len(own), self._bytes_of(own)
        rows = sent.repeat(len(self._ranks), 1)
        outgoing = Slices(Slice(peer, 0, 0, num_bytes) for peer in peers)
        incoming = Slices(Slice(peer, 0, peer * num_bytes, num_bytes) for peer in peers)
        sends = MessageBuffers(outgoing, [sent], [sent.data_ptr()], _NO_BYTES, 0)
        receives = MessageBuffers(incoming, [rows], [rows.data_ptr()], _NO_BYTES, 0)
        self.sequence += 1
        record.sends, record.receives = outgoing, incoming
        try:
            self._carry(record, receives, sends)
        except BaseException as error:
            self._record_failure(record, error)
            raise
        self._record_end(record, 0, 0)
        return rows

    def _carry(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Exchanges messages that need no packing."""
        try:
            self.post(record, receives, sends)
            self._recorder.step(record.entry, SEND)
            self.start(record, receives, sends)
            self._recorder.step(record.entry, WAIT)
            self.finish(record, receives, sends)
        except BaseException as error:
            self._end_broken(record, error)
            raise

    def _bytes_of(self, content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def _check_tensors(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        try:
            self._check_devices(sources, transfer)
            transfer.check_tensors(sources, targets)
        except TransportError as error:
            self._check_usable(transfer.description)
            self._refuse(error)
            raise

    def _check_devices(self, tensors: Sequence[torch.Tensor], transfer: Transfer) -> None:
        for tensor in tensors:
            if tensor.device.type not in self.device_types:
                raise TransportError(
                    f"{type(self).__name__} was given a tensor on {tensor.device}; it carries tensors on "
                    f"{' and '.join(self.device_types)} only"
                )
            if tensor.device != transfer.device:
                raise TransportError(
                    f"{transfer.description} was compiled for tensors on {transfer.device} and given one on "
                    f"{tensor.device}"
                )


_NO_BYTES = torch.empty(0, dtype=torch.uint8)
