"""The transport of ranks of one machine that read each other's messages where they were packed.

Each rank packs into shared memory of its own, an arena, and receivers unpack or reduce from there: nothing goes
through the kernel. Long messages go in chunks, round by round. The sockets stay: by them a rank notices that another
has left, and they carry messages of a narrower dtype, notes and barriers.
"""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.autograd import profiler

from tritondt._C import Arena, ArenaGroup
from tritondt.comm.communicator import CPU, Transfer
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import DONE, EXCHANGING, ExchangeRecord
from tritondt.comm.packing.arena_transfer import ArenaTransfer, ProgramTransfer, arena_transfer
from tritondt.comm.packing.packed_transfer import ALIGNED, Program, TensorStarts
from tritondt.comm.transports.arenas import share_arenas
from tritondt.comm.transports.sockets import SocketCommunicator
from tritondt.planning.slots import chunk_bytes

# Looks before a wait sleeps, some 20 us, where every rank has a core; else the rank that is waited for needs this one.
_NUM_SPINS = 500
_NOT_COMPILED = None, None


class SharedMemoryCommunicator(SocketCommunicator):
    """A communicator of ranks that have mapped each other's `arenas`, by place; made by all of them together."""

    def __init__(self, context: ProcessContext, arenas: Sequence[Arena]) -> None:
        super().__init__(context)
        num_ranks = len(arenas)
        self.slot_bytes = ArenaGroup.slot_bytes(arenas[0].num_bytes, num_ranks)
        self._chunk_bytes = chunk_bytes(num_ranks, self.slot_bytes)
        self.num_cores = len(os.sched_getaffinity(0))
        num_spins = _NUM_SPINS if num_ranks <= self.num_cores else 0
        with self._told_of_failure(), ExitStack() as undone:
            undone.callback(super()._close_sockets)
            self._arenas = ArenaGroup(self._place, list(arenas), self._group, [-1] * num_ranks, num_spins)
            self._watchdog.watch(self._arenas, self._timeout_s, self._recorder, self._flight.path_text)
            undone.pop_all()

    def _note_connection(self, place: int, descriptor: int) -> None:
        super()._note_connection(place, descriptor)
        self._arenas.connect(place, descriptor)

    def _compiled(self, transfer: Transfer, starts: TensorStarts = ALIGNED) -> Program:
        if isinstance(transfer, ProgramTransfer):
            assert transfer.plan is not None, "a program's transfer is made with it"
            return transfer.plan
        exchange = transfer.exchange
        moves = bool(exchange.sends or exchange.receives)
        is_of_boxes = transfer.collective is None and transfer.wire_dtype is None and transfer.device == CPU
        if not (is_of_boxes and moves and self._chunk_bytes):
            return super()._compiled(transfer, starts)
        return arena_transfer(transfer, len(self._ranks), self._chunk_bytes, self.num_cores)

    def _exchange(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer, site: int
    ) -> None:
        plan, record = transfer.compiled.get(self, _NOT_COMPILED)
        is_usual = self.failure is None and not self._compares and not profiler._is_profiler_enabled
        if not (is_usual and isinstance(plan, ArenaTransfer)):
            super()._exchange(sources, targets, transfer, site)
            return
        # What the base class does, without a call for each part of it: small exchanges take as long as their Python,
        # which others of the machine's ranks push out of the caches meanwhile.
        for tensor in sources:
            if not tensor.is_cpu:
                self._check_devices(sources, transfer)
        recorder, record.site = self._recorder, site
        record.entry = recorder.begin(
            self._label, self.sequence + 1, record.label, record.fingerprint, site, EXCHANGING, record
        )
        try:
            self._run(sources, targets, plan, record)
        except BaseException as error:
            self._record_failure(record, error)
            raise
        recorder.end(record.entry, DONE, -1, plan.sent_bytes, plan.received_bytes)

    def _move(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        plan: Program,
        record: ExchangeRecord,
        transfer: Transfer,
    ) -> None:
        if isinstance(plan, ArenaTransfer):
            self._recorder.state(record.entry, EXCHANGING)
            self._run(sources, targets, plan, record)
        else:
            super()._move(sources, targets, plan, record, transfer)

    def _run(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        plan: ArenaTransfer,
        record: ExchangeRecord,
    ) -> None:
        if len(sources) == len(targets) == 1:  # a comprehension is a call
            source_pointers, target_pointers = [sources[0].data_ptr()], [targets[0].data_ptr()]
        else:
            source_pointers = [tensor.data_ptr() for tensor in sources]
            target_pointers = [tensor.data_ptr() for tensor in targets]
        memory, staging = None, 0
        if plan.staged_bytes:
            memory, staging, _, _ = self._buffers((plan.staged_bytes, 0), CPU)
        sequence = self.sequence = self.sequence + 1
        self._traffic.count(plan.sent_bytes, plan.received_bytes, plan.num_sent, plan.num_received)
        threads = torch.get_num_threads()
        try:
            if not record.is_connected:
                self._reach(record, plan.peers)
            self._started = time.monotonic()
            # A number of its own says which exchange a message is of: the tag has no need to.
            outcome, peer = self._arenas.run(
                plan.native, source_pointers, target_pointers, threads, sequence, record.fingerprint, staging
            )
            if outcome != "done":
                self._finish_watched(record, self._arenas, outcome, peer)
            self._started = 0.0
        except BaseException as error:
            self._end_broken(record, error)
            raise
        del memory  # where terms waited for those of later rounds

    def _skip(self) -> None:
        self._arenas.skip(self.sequence)
        super()._skip()  # interruptions of arenas interrupt the sockets, too

    def fail(self, error: BaseException) -> None:
        """Ends the communicator as others do, and lets go of all arenas."""
        super().fail(error)
        self._arenas.release()

    def _disconnect(self, reason: BaseException) -> None:
        super()._disconnect(reason)
        self._arenas.release()

    def release(self) -> None:
        """Lets go of all arenas, when the communicator has ended and nothing runs on it."""
        self._arenas.release()

    def set_timeout(self, seconds: float) -> None:
        """Sets how long an exchange may take from now on, in seconds."""
        super().set_timeout(seconds)
        self._arenas.set_timeout(seconds)

    def _interrupt(self, reason: BaseException) -> None:
        self._arenas.interrupt()  # and the sockets with it

    def _close_sockets(self) -> None:
        self._watchdog.unwatch(self._arenas)
        super()._close_sockets()


def connect(context: ProcessContext) -> SocketCommunicator:
    """A communicator through shared memory where all ranks share it, else over sockets, with one warning."""
    return _with(context, share_arenas(context, asks_for_arenas=True))


def connect_without_arenas(context: ProcessContext) -> SocketCommunicator:
    """A communicator over sockets, of ranks that others may ask for shared memory."""
    return _with(context, share_arenas(context, asks_for_arenas=False))


def _with(context: ProcessContext, arenas: Sequence[Arena] | None) -> SocketCommunicator:
    return SocketCommunicator(context) if arenas is None else SharedMemoryCommunicator(context, arenas)
