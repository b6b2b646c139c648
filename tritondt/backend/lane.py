"""Operations of some ranks in the order of their issue, on a communicator of NCCL and a stream of its own.

The host waits for none of them. What does not come to an end in time is aborted, never destroyed: destroying waits.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from tritondt._C import NcclLibrary
from tritondt.backend.elements import PreMulSum
from tritondt.backend.operation import Operation
from tritondt.backend.work import NcclWork
from tritondt.comm.communicator import Errand
from tritondt.comm.flight import EXCHANGING
from tritondt.comm.membership import Membership
from tritondt.comm.nccl_watched import UnderWay, WatchedNccl
from tritondt.comm.streams import Event, Streams
from tritondt.errors import PeerError, WorldError

_LIMIT = "the process group's"
_MUST = "call the same operations with the same sizes in the same order"


class Carrier(NamedTuple):
    """What carries tensors of a device: a library of NCCL, and the device's streams."""

    library: NcclLibrary
    streams: Streams


class Issued(NamedTuple):
    """An operation with all that goes with it: the line that asked, and what its stream waits for before."""

    operation: Operation
    work: NcclWork
    site: int
    ready: Event
    timeout_s: float


class Lane:
    """One rank's end of it; made by all ranks of `member` together. `on_failure` is told why nothing runs any more."""

    def __init__(self, member: Membership, carrier: Carrier, on_failure: Callable[[BaseException], None]) -> None:
        self._member, self._streams = member, carrier.streams
        self._recorder = member.flight.recorder
        self._label = self._recorder.label(member.name)
        self._watched = WatchedNccl(member, carrier.library, carrier.streams, on_failure)
        self.stream = carrier.streams.make()
        self.sequence = 0
        self._turn = threading.Lock()

    def put(self, issued: Issued) -> None:
        """Puts an operation into the stream; what goes wrong is its work's error."""
        operation, work = issued.operation, issued.work
        with self._turn:
            if self._watched.failure is not None:
                work.fail(self._watched.failure)
                return
            self.stream.wait_event(issued.ready)
            if self._streams.is_capturing():  # a graph is being made: nothing runs, and nothing is waited for
                self._call(operation)
            else:
                self._watched.reap()
                self.sequence += 1
                try:
                    self._watched.put(self._recorded(issued), lambda: self._call(operation), "run")
                except PeerError:  # which its work has been told
                    return
            work.was_put(self.stream)

    def _recorded(self, issued: Issued) -> UnderWay:
        """The operation as recorder and watch know it."""
        operation, member = issued.operation, self._member
        fingerprint, label = operation.fingerprint, self._recorder.label(operation.text)
        record = self._recorder.begin(self._label, self.sequence, label, fingerprint, issued.site)
        self._recorder.state(record, EXCHANGING)
        errand = Errand(fingerprint, operation.text, label, self._recorder, issued.site, record)
        found = self._watched.operation(self.sequence, errand, issued.timeout_s)
        found.suspects = tuple(rank for rank in member.ranks if rank != member.rank)
        found.limit, found.must, found.holder = _LIMIT, _MUST, issued.work
        return found

    def _call(self, operation: Operation) -> None:
        """Gives the calls to NCCL; ops that are made for them end when it has them."""
        made: list[int] = []
        try:
            calls = []
            for kind, source, target, num_elements, dtype, asked, peer in operation.calls:
                op: int | str
                if isinstance(asked, PreMulSum):
                    op = self._made_op(asked, dtype)
                    made.append(op)
                else:
                    op = asked
                calls.append((kind, source, target, num_elements, dtype, op, peer))
            if calls:
                self._watched.native.group(calls, self.stream.cuda_stream)
        finally:
            for number in made:
                self._watched.native.destroy_op(number)

    def _made_op(self, op: PreMulSum, dtype: str) -> int:
        if isinstance(op.factor, float):
            return self._watched.native.pre_mul_sum(op.factor, dtype)
        return self._watched.native.pre_mul_sum_on_device(op.factor.data_ptr(), dtype)

    def refuse(self, error: BaseException) -> None:
        """Tells the others that this rank takes no part in the next operation, and why; it counts as run."""
        with self._turn:
            self.sequence += 1
            self._watched.refuse(self.sequence, error)

    def fail(self, error: BaseException) -> None:
        """Ends what is under way, with this error, and aborts the communicator."""
        self._watched.fail(error)

    def abort(self) -> None:
        """Ends what is under way without waiting for the others."""
        self.fail(WorldError(f"{self._member.name} was aborted"))

    def close(self) -> None:
        """Waits for all that was issued, and ends the communicator."""
        self.stream.synchronize()
        with self._turn:
            self._watched.close(WorldError(f"{self._member.name} was closed"))
