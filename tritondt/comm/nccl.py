"""Messages by NCCL on a stream of its own: the transport for tensors on GPUs.

An exchange is one pack, one group of sends and receives and one unpack, put into the communicator's stream; the host
waits for none of them. What does not come to an end in time is aborted, never destroyed, since destroying waits.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tritondt._C import NcclError, NcclLibrary
from tritondt.comm.communicator import Errand, Transfer
from tritondt.comm.flight import DONE, EXCHANGING, FAILED
from tritondt.comm.letters import Letters
from tritondt.comm.membership import Membership
from tritondt.comm.nccl_join import join_nccl
from tritondt.comm.packed import PackedCommunicator
from tritondt.comm.stream_queue import StreamQueue
from tritondt.comm.streams import Event, Streams
from tritondt.comm.watch import Wait
from tritondt.comm.work import Run, again
from tritondt.errors import PeerError, TransportError


@dataclass(slots=True, eq=False)
class UnderWay:
    """An exchange that is in the stream; its record ends with `sent_bytes` and `received_bytes`."""

    wait: Wait
    record: int
    sent_bytes: int = 0
    received_bytes: int = 0
    event: Event | None = None

    def is_over(self) -> bool:
        """Whether the stream has come past it."""
        return self.event is not None and self.event.query()


class NcclCommunicator(PackedCommunicator):
    """Ranks connected by NCCL; made by all of them together, on the device of `streams`."""

    def __init__(self, member: Membership, library: NcclLibrary, streams: Streams) -> None:
        self._streams, self.device_types = streams, (streams.device.type,)
        self._in_stream = StreamQueue(streams)
        super().__init__(member, self._in_stream)
        self._watch, self._timeout_s = member.watch, member.timeout.total_seconds()
        self._under_way: deque[UnderWay] = deque()
        self._breaking, self._is_told = threading.Lock(), False
        self._native = join_nccl(member, library, streams)

    def _exchange_now(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        """Puts this rank's side into the stream; what the current stream is given next comes after it."""
        if self._is_inherited:
            self._check_usable(transfer.description)
        site = self._recorder.site()
        with self._in_stream.joined():
            self._exchange(sources, targets, transfer, site)
        self._tell()

    def carry(self, errand: Errand, receives: Letters, sends: Letters, pack: Run, meanwhile: Run) -> None:
        """Packs, sends and receives as one group, and keeps, one after the other in the stream."""
        self._reap()
        own = Errand(errand.fingerprint, errand.text, errand.label, errand.recorder, errand.site, errand.record)
        wait = Wait(self._key, self.sequence, own, self._ranks, lambda: self._break_off(wait), self._timeout_s)
        wait.letters = receives.slices, sends.slices
        under_way = UnderWay(wait, errand.record)
        wait.is_over, wait.trouble = under_way.is_over, self._trouble
        if self._streams.is_capturing():  # a graph is being made: nothing runs, and nothing is waited for
            self._converse(receives, sends, pack, meanwhile)
            return
        self._under_way.append(under_way)
        self._watch.begin(wait)
        try:
            self._converse(receives, sends, pack, meanwhile)
        except NcclError as error:
            self._give_up(PeerError(f"rank {self._rank} could not exchange in {own.description}: {error}"))
            raise again(self.failure or error) from error
        except BaseException as error:  # half of it may be in the stream
            self._give_up(error)
            raise

    def _converse(self, receives: Letters, sends: Letters, pack: Run, meanwhile: Run) -> None:
        pack()
        self._native.exchange(sends.addresses(), receives.addresses(), self._in_stream.stream.cuda_stream)
        meanwhile()

    def _moved(self, errand: Errand, sent_bytes: int, received_bytes: int) -> None:
        """An exchange is recorded as done when the stream has come past it."""
        found = self._latest(errand)
        if found is None:  # of a graph, or without a message
            super()._moved(errand, sent_bytes, received_bytes)
            return
        found.sent_bytes, found.received_bytes = sent_bytes, received_bytes
        found.event = self._in_stream.stream.record_event()
        self._recorder.state(errand.record, EXCHANGING)

    def _record_failure(self, errand: Errand, error: BaseException) -> None:
        super()._record_failure(errand, error)
        found = self._latest(errand)
        if found is not None and found.event is None:  # half of it is in the stream
            self._give_up(error)

    def _latest(self, errand: Errand) -> UnderWay | None:
        """The exchange that was put into the stream last, if it is this one."""
        found = self._under_way[-1] if self._under_way else None
        return found if found is not None and found.record == errand.record else None

    def _tell(self) -> None:
        """Raises what everything was broken off for, once; whoever comes later is told that it was."""
        if self.failure is not None and not self._is_told:
            self._is_told = True
            raise again(self.failure) from self.failure

    def _reap(self) -> None:
        """Ends what the stream has come past."""
        if self._under_way and self._streams.is_capturing():
            return  # nobody may ask then
        while self._under_way and self._under_way[0].is_over():
            found = self._under_way.popleft()
            self._watch.end(found.wait)
            self._recorder.end(found.record, DONE, -1, found.sent_bytes, found.received_bytes)

    def _launch(self, run: Callable[..., object], *arguments: object) -> None:
        self._streams.launch(lambda: run(*arguments))

    def _trouble(self) -> str | None:
        """What NCCL has met in the background."""
        try:
            self._native.poll()
        except NcclError as error:
            return str(error)
        return None

    def _give_up(self, error: BaseException) -> None:
        """Ends everything for a failure of this rank, and tells the others."""
        if self.failure is None:
            self._watch.report(self._key, None, error)
            self._fail(error)

    def _break_off(self, wait: Wait) -> None:
        """Ends everything for the reason why `wait` will not end; called by the watch."""
        self._fail(self._recorded(wait.reason or PeerError(f"{wait.description} was broken off")))

    def _fail(self, error: BaseException) -> None:
        with self._breaking:
            if self.failure is not None:
                return
            self.failure = error
        label = self._recorder.label(f"{type(error).__name__}: {error}")
        for found in tuple(self._under_way):
            self._watch.end(found.wait)
            if not found.is_over():
                self._recorder.end(found.record, FAILED, label)
        self._in_stream.fail(error)
        self._native.abort()

    def _told_by_all(self, errand: Errand, own: bytes) -> torch.Tensor:
        """The same as on the host, in memory of the device; the host waits."""
        with self._in_stream.joined():
            told = super()._told_by_all(errand, own)
        self._in_stream.stream.synchronize()
        self._tell()
        return told.cpu()

    def _bytes_of(self, content: bytes) -> torch.Tensor:
        return super()._bytes_of(content).to(self._streams.device, copy=True)

    def _check_devices(self, tensors: Sequence[torch.Tensor], transfer: Transfer) -> None:
        for tensor in tensors:
            if tensor.device != self._streams.device:
                raise TransportError(
                    f"NCCL was given a tensor on {tensor.device}; this rank's communicator carries tensors on "
                    f"{self._streams.device} only"
                )

    def _refuse(self, error: BaseException) -> None:
        self.sequence += 1
        self._watch.report(self._key, self.sequence, error)

    def set_timeout(self, seconds: float) -> None:
        """How long an exchange may take from now on, from when it is put into the stream."""
        self._check_usable(f"a timeout of {seconds:g} s")
        self._timeout_s = seconds

    def close(self) -> None:
        """Waits for all that was issued and for the others, and disconnects; raises what nobody has been told."""
        self._check_own()
        self._queue.close()
        if self.failure is None:
            self.barrier()
            self._reap()
            self._end("closed")
            self._native.destroy()
        self._queue.raise_unseen()

    def abort(self) -> None:
        """Ends what is in the stream without waiting for the others."""
        if self._is_inherited:  # the device is the parent's
            return
        self._end("aborted")
        for found in tuple(self._under_way):
            self._watch.end(found.wait)
        if self.failure is not None:
            self._in_stream.fail(self.failure)
        self._native.abort()
        self._queue.close()
