"""Messages by NCCL on a stream of its own: the transport for tensors on GPUs.

An exchange is one pack, one group of sends and receives and one unpack, put into the communicator's stream; the host
waits for none of them. What does not come to an end in time is aborted, never destroyed, since destroying waits.
"""

import time
from collections.abc import Sequence

import torch

from tritondt._C import NcclLibrary
from tritondt.comm.communicator import Transfer
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import EXCHANGING, ExchangeRecord
from tritondt.comm.nccl.stream_queue import StreamQueue
from tritondt.comm.nccl.streams import Event, Streams
from tritondt.comm.nccl.watched import MonitoredNccl, OverdueWait, TimeoutPolicy
from tritondt.comm.packing.messages import MessageBuffers, Slice
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.comm.work import Run, again
from tritondt.errors import TransportError


class Exchanged:
    """An exchange in the stream, which has been given all of it when there is an `event`."""

    __slots__ = (
        "event",
        "fingerprint",
        "late",
        "letters",
        "received_bytes",
        "record",
        "sent_bytes",
        "sequence",
        "site",
        "started",
        "text",
        "timeout_s",
    )

    def __init__(
        self, errand: ExchangeRecord, sequence: int, letters: tuple[Sequence[Slice], ...], timeout_s: float
    ) -> None:
        self.text, self.fingerprint = errand.text, errand.fingerprint
        self.site, self.record = errand.site, errand.record
        self.sequence, self.letters, self.timeout_s = sequence, letters, timeout_s
        self.started = time.monotonic()
        self.sent_bytes = self.received_bytes = 0
        self.event: Event | None = None
        self.late: OverdueWait | None = None

    def is_over(self) -> bool:
        """Whether the stream has come past it."""
        return self.event is not None and self.event.query()

    def fail(self, error: BaseException) -> None:
        """Nothing: the queue tells those who wait."""


class NcclCommunicator(PackedCommunicator):
    """Ranks connected by NCCL; made by all of them together, on the device of `streams`."""

    _queue: StreamQueue

    def __init__(self, member: ProcessContext, library: NcclLibrary, streams: Streams) -> None:
        self._streams, self.device_types = streams, (streams.device.type,)
        super().__init__(member, StreamQueue(streams), streams.launch)
        self._timeout_s, self._is_told = member.timeout.total_seconds(), False
        self._latest: Exchanged | None = None
        self._watched = MonitoredNccl(member, library, streams, self._on_failure, TimeoutPolicy())

    def _exchange_now(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer
    ) -> None:
        """Puts this rank's side into the stream; what the current stream is given next comes after it."""
        if self._is_inherited:
            self._check_usable(transfer.description)
        site = self._recorder.site()
        with self._queue.joined():
            self._exchange(sources, targets, transfer, site)
        self._tell()

    def carry(
        self, errand: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers, pack: Run, meanwhile: Run
    ) -> None:
        """Packs, sends and receives as one group, and keeps, one after the other in the stream."""

        def converse() -> None:
            pack()
            self._watched.native.exchange_slices(
                sends.slices.native,
                sends.pointers,
                sends.buffer,
                receives.slices.native,
                receives.pointers,
                receives.buffer,
                self._queue.stream.cuda_stream,
            )
            meanwhile()

        if self._streams.is_capturing():  # a graph is being made: nothing runs, and nothing is waited for
            converse()
            return
        self._queue.mark_step()
        self._watched.reap()
        letters = receives.slices, sends.slices
        self._latest = operation = Exchanged(errand, self.sequence, letters, self._timeout_s)
        self._watched.put(operation, converse, "exchange in")

    def _moved(self, errand: ExchangeRecord, sent_bytes: int, received_bytes: int) -> None:
        """An exchange is recorded as done when the stream has come past it."""
        found = self._latest
        if found is None or found.record != errand.record:  # of a graph, or without a message
            super()._moved(errand, sent_bytes, received_bytes)
            return
        self._latest = None
        found.sent_bytes, found.received_bytes = sent_bytes, received_bytes
        self._queue.mark_end(found)
        self._recorder.state(errand.record, EXCHANGING)

    def _record_failure(self, errand: ExchangeRecord, error: BaseException) -> None:
        super()._record_failure(errand, error)
        found = self._latest
        if found is not None and found.record == errand.record and found.event is None:  # half of it is in the stream
            self._watched.give_up(error)

    def _on_failure(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._queue.fail(error)

    def _tell(self) -> None:
        """Raises what everything was broken off for, once; whoever comes later is told that it was."""
        if self.failure is not None and not self._is_told:
            self._is_told = True
            raise again(self.failure) from self.failure

    def _told_by_all(self, errand: ExchangeRecord, own: bytes) -> torch.Tensor:
        """The same as on the host, in memory of the device; the host waits."""
        with self._queue.joined():
            told = super()._told_by_all(errand, own)
        self._queue.stream.synchronize()
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
        self._watched.refuse(self.sequence, error)

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
            self._watched.close(self._end("closed"))
        self._queue.raise_unseen()

    def abort(self) -> None:
        """Ends what is in the stream without waiting for the others."""
        if self._is_inherited:  # the device is the parent's
            return
        self._watched.fail(self._end("aborted"))
        self._queue.close()
