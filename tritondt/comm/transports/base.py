"""Makes `exchange` out of messages between pairs of ranks: one pack, one group of messages, one unpack.

A message that is one run of a tensor's memory is sent from there, and lands there, without a copy; this is
each rank's own decision and changes no message. All others go through two buffers, one for what is packed
and one for what arrives, that live for the one call.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch

from tritondt.comm.communicator import Traffic, Transfer
from tritondt.comm.member import CommunicatorContext
from tritondt.comm.monitor.comparison import FINGERPRINT, Note, difference, read_note, write_note
from tritondt.comm.monitor.flight import DONE, EXCHANGING, FAILED, PACKING, UNPACKING, ExchangeRecord
from tritondt.comm.packing.messages import MessageBuffers, Slice, Slices
from tritondt.comm.packing.packed_transfer import Casting, PackedTransfer, packed_transfer
from tritondt.comm.packing.wire_cast import casting_transfer
from tritondt.comm.transports.closable import Closable
from tritondt.comm.work import IssueQueue, Run, Work
from tritondt.errors import TransportError, WorldError
from tritondt.kernels.memory import allocate

NO_SITE = -1
_BARRIER_FINGERPRINT = 0x62617272


class PackedCommunicator(Closable, ABC):
    """A communicator whose transport carries bytes from one rank to another."""

    device_types: tuple[str, ...] = ("cpu",)

    def __init__(
        self, member: CommunicatorContext, queue: IssueQueue, launch: Callable[..., object] | None = None
    ) -> None:
        """`launch(run, *arguments)` runs a table where it is in order with the messages: at once, by default."""
        self._launch = launch or _at_once
        self._key, self._ranks, self._rank = member.key, member.ranks, member.rank
        self._place = self._ranks.index(self._rank)
        self._traffic = Traffic()
        self._queue, self._flight, self._recorder = queue, member.flight, member.flight.recorder
        self._label = self._recorder.label(member.name)
        self._issued_at = NO_SITE  # the line that issued what the queue runs now
        self.sequence = 0  # exchanges so far, those without a message of ours included
        self._packed: WeakKeyDictionary[Transfer, tuple[PackedTransfer, ExchangeRecord]] = WeakKeyDictionary()
        self._turn = threading.RLock()
        self._compares = member.compares

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world's ranks in this communicator, ascending."""
        return self._ranks

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages so far."""
        return self._traffic

    @abstractmethod
    def carry(
        self, errand: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers, pack: Run, meanwhile: Run
    ) -> None:
        """Posts `receives`, calls `pack`, sends `sends`, calls `meanwhile`, and waits for all messages."""

    def exchange(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer) -> None:
        """Runs this rank's side of `transfer`; see `tritondt.comm.communicator.Communicator`."""
        if self._queue.is_own_thread():
            self._exchange(sources, targets, transfer, self._issued_at)
            return
        if not self._turn.acquire(False):
            raise self._second_thread(transfer.description)
        try:
            self._queue.drain()
            self._exchange_now(sources, targets, transfer)
        finally:
            self._turn.release()

    def _exchange_now(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        self._exchange(sources, targets, transfer, self._recorder.site())

    def issue(
        self, run: Run, description: str, sources: Sequence[torch.Tensor] = (), *, sources_ready: bool = True
    ) -> Work:
        """Runs `run`, which may exchange and reads `sources`, after all that was issued before; returns at once."""
        if not self._turn.acquire(False):
            raise self._second_thread(description)
        try:
            self._check_usable(description)
            site = self._recorder.site()

            def issued() -> None:
                self._issued_at = site
                run()

            return self._queue.submit(issued, description, sources, sources_ready=sources_ready)
        finally:
            self._turn.release()

    def in_order(self, run: Run, description: str) -> None:
        """Runs `run`, which exchanges more than once, with nothing issued in between."""
        if self._queue.is_own_thread():
            run()
            return
        if not self._turn.acquire(False):
            raise self._second_thread(description)
        try:
            run()
        finally:
            self._turn.release()

    def refuse(self, error: BaseException) -> None:
        """Tells the others that this rank will not take part in the next exchange, and why; it counts as run."""
        if self._is_inherited:  # nobody waits for this process
            return
        if not self._queue.is_own_thread():
            self._queue.drain()
        self._refuse(error)

    def settle(self) -> None:
        """Returns when all that was issued has run; raises the first failure that nobody was told."""
        self._queue.close()
        self._queue.raise_unseen()

    @abstractmethod
    def _refuse(self, error: BaseException) -> None: ...

    def traffic_of(self, transfer: Transfer) -> Traffic:
        """What this rank will send and receive in an exchange."""
        plan, _ = self._plan(transfer)
        return Traffic(plan.sent_bytes, plan.received_bytes, len(plan.sends), len(plan.receives))

    def _plan(self, transfer: Transfer) -> tuple[PackedTransfer, ExchangeRecord]:
        """The transfer in bytes, and as it is spoken of."""
        found = self._packed.get(transfer)
        if found is None:
            errand = self._errand(transfer.fingerprint, transfer.description)
            wire_dtype = transfer.wire_dtype
            plan = packed_transfer(transfer) if wire_dtype is None else casting_transfer(transfer, wire_dtype)
            found = self._packed[transfer] = plan, errand
        return found

    def _errand(self, fingerprint: int, text: str) -> ExchangeRecord:
        return ExchangeRecord(fingerprint, text, self._recorder.label(text), self._recorder)

    def _begin(self, errand: ExchangeRecord, site: int) -> int:
        """Records the next exchange as issued."""
        errand.site = site
        errand.record = self._recorder.begin(self._label, self.sequence + 1, errand.label, errand.fingerprint, site)
        return errand.record

    def _exchange(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer, site: int
    ) -> None:
        if self.failure is not None:
            self._check_usable(transfer.description)
        self._check_devices(sources, transfer)
        plan, errand = self._plan(transfer)
        if self._compares:
            self._compare(errand, site)
        self._begin(errand, site)
        try:
            self._move(sources, targets, plan, errand, transfer.device)
        except BaseException as error:
            self._record_failure(errand, error)
            raise
        self._moved(errand, plan.sent_bytes, plan.received_bytes)

    def _moved(self, errand: ExchangeRecord, sent_bytes: int, received_bytes: int) -> None:
        """Records the end of an exchange."""
        self._recorder.end(errand.record, DONE, -1, sent_bytes, received_bytes)

    def _run_recorded(self, errand: ExchangeRecord, run: Run) -> None:
        """Runs what moves no tensors of the user's."""
        try:
            run()
        except BaseException as error:
            self._record_failure(errand, error)
            raise
        self._moved(errand, 0, 0)

    def _record_failure(self, errand: ExchangeRecord, error: BaseException) -> None:
        self._recorder.end(errand.record, FAILED, self._recorder.label(f"{type(error).__name__}: {error}"))

    def _compare(self, errand: ExchangeRecord, site: int) -> None:
        """Exchanges notes with all ranks of the communicator; all raise MismatchError where one differs."""
        errand.site = site
        own = Note(errand.fingerprint, errand.description)
        comparing = self._errand(FINGERPRINT, f"a comparison before {errand.text}")
        self._begin(comparing, site)
        arrived = self._told_by_all(comparing, write_note(own))
        notes = {rank: read_note(bytes(row)) for rank, row in zip(self._ranks, arrived.tolist(), strict=True)}
        found = difference(self.sequence, {**notes, self._rank: own})
        if found is not None:
            raise found

    def barrier(self) -> None:
        """Returns when every rank of the communicator has called it."""
        self.in_order(self._meet, "a barrier")

    def _meet(self) -> None:
        self._queue.drain()
        self._check_usable("a barrier")
        errand = self._errand(_BARRIER_FINGERPRINT, "a barrier")
        self._begin(errand, self._recorder.site())
        self._told_by_all(errand, b"\0")

    def _told_by_all(self, errand: ExchangeRecord, own: bytes) -> torch.Tensor:
        """What the ranks send to each other, a row of as many bytes as `own` for each, as an exchange of its own."""
        num_bytes, sent = len(own), self._bytes_of(own)
        told = sent.repeat(len(self._ranks), 1)
        peers = [place for place in range(len(self._ranks)) if place != self._place]
        sends = MessageBuffers(
            Slices(Slice(peer, 0, 0, num_bytes) for peer in peers), [sent], [sent.data_ptr()], _NO_BYTES, 0
        )
        rows = Slices(Slice(peer, 0, peer * num_bytes, num_bytes) for peer in peers)
        receives = MessageBuffers(rows, [told], [told.data_ptr()], _NO_BYTES, 0)
        self.sequence += 1
        self._run_recorded(errand, lambda: self.carry(errand, receives, sends, _nothing, _nothing))
        return told

    def _bytes_of(self, content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def _move(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        plan: PackedTransfer,
        errand: ExchangeRecord,
        device: torch.device,
    ) -> None:
        source_pointers = [tensor.data_ptr() for tensor in sources]
        target_pointers = [tensor.data_ptr() for tensor in targets]
        threads, set_state, record = torch.get_num_threads(), self._recorder.state, errand.record
        memory, staging, buffer, widened = self._buffers(plan, device)

        def pack() -> None:
            if plan.pack is not None:
                set_state(record, PACKING)
                self._launch(plan.pack.run, source_pointers, [buffer], threads)
            set_state(record, EXCHANGING)

        def keep() -> None:
            if plan.keep is not None:
                kept = source_pointers if plan.casting is None else [buffer]
                self._launch(plan.keep.run, kept, target_pointers, threads)

        self.sequence += 1
        if plan.sends or plan.receives:
            self._traffic.count(plan.sent_bytes, plan.received_bytes, len(plan.sends), len(plan.receives))
            self.carry(
                errand,
                MessageBuffers(plan.receives, targets, target_pointers, memory, staging),
                MessageBuffers(plan.sends, sources, source_pointers, memory, buffer),
                pack,
                keep,
            )
        else:
            pack()
            keep()
        if plan.unpack is not None or plan.reduces:
            set_state(record, UNPACKING)
        if plan.unpack is not None:
            self._launch(plan.unpack.run, [staging], target_pointers, threads)
        if plan.casting is not None:
            self._widen(plan.casting, [staging, buffer], widened, threads)
            staging = widened
        for table in plan.reduces:
            self._launch(table.run, [*source_pointers, staging], target_pointers, threads)

    def _buffers(self, plan: PackedTransfer, device: torch.device) -> tuple[torch.Tensor, int, int, int]:
        """Memory, and where in it begins what arrives, what is packed, and with a wire dtype what is widened."""
        packed_at = (plan.staged_bytes + _ALIGNMENT - 1) & -_ALIGNMENT if plan.packed_bytes else plan.staged_bytes
        num_bytes = widened_at = packed_at + plan.packed_bytes
        if plan.casting is not None:
            widened_at = (widened_at + _ALIGNMENT - 1) & -_ALIGNMENT
            num_bytes = widened_at + plan.casting.widened_bytes
        if num_bytes == 0:
            return _NO_BYTES, 0, 0, 0
        try:
            memory = allocate((num_bytes,), torch.uint8, device)
        except BaseException as error:  # nothing has been sent: the others can be told
            self._refuse(error)
            raise
        start = memory.data_ptr()
        return memory, start, start + packed_at, start + widened_at

    def _widen(self, casting: Casting, buffers: list[int], widened: int, threads: int) -> None:
        if casting.widen is not None:
            self._launch(casting.widen.run, buffers, [widened], threads)

    def _second_thread(self, description: str) -> WorldError:
        return WorldError(
            f"{description} was asked for by thread {threading.current_thread().name!r} while another thread issues on "
            f"the communicator of ranks {self._ranks}, and which of the two came first may differ among the ranks; "
            "issue from one thread, or from one after the other"
        )

    def disown(self, error: WorldError) -> None:
        """Refuses all further use with `error`, in a process that was forked from the communicator's."""
        self.failure = error
        self._turn = threading.RLock()  # another thread of the parent may have it
        self._queue.disown(error)

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


def _nothing() -> None: ...


def _at_once(run: Callable[..., object], *arguments: object) -> None:
    run(*arguments)


# Buffers lie in one block of memory, each where an allocator of CUDA's or glibc's could have put it.
_ALIGNMENT = 512
_NO_BYTES = torch.empty(0, dtype=torch.uint8)
