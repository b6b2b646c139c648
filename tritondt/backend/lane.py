"""Operations of some ranks in the order of their issue, on a communicator of NCCL and a stream of its own.

The host waits for none of them. What does not come to an end in time is aborted, never destroyed: destroying waits.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tritondt._C import NcclError, NcclLibrary
from tritondt.backend.elements import PreMulSum
from tritondt.backend.operation import Operation
from tritondt.backend.work import NcclWork
from tritondt.comm.communicator import Errand
from tritondt.comm.flight import DONE, EXCHANGING, FAILED
from tritondt.comm.membership import Membership
from tritondt.comm.nccl_join import join_nccl, within
from tritondt.comm.streams import Event, Streams
from tritondt.comm.watch import Wait
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


class _UnderWay(NamedTuple):
    work: NcclWork
    wait: Wait
    record: int


class Lane:
    """One rank's end of it; made by all ranks of `member` together. `failure` is why nothing runs on it any more."""

    def __init__(self, member: Membership, carrier: Carrier, on_failure: Callable[[BaseException], None]) -> None:
        self._member, self._streams, self._on_failure = member, carrier.streams, on_failure
        self._recorder, self._watch = member.flight.recorder, member.watch
        self._label = self._recorder.label(member.name)
        self._native = join_nccl(member, carrier.library, carrier.streams)
        self.stream = carrier.streams.make()
        self.sequence = 0
        self.failure: BaseException | None = None
        self._under_way: deque[_UnderWay] = deque()
        self._turn, self._breaking = threading.Lock(), threading.Lock()

    def put(self, issued: Issued) -> None:
        """Puts an operation into the stream; what goes wrong is its work's error."""
        operation, work = issued.operation, issued.work
        with self._turn:
            if self.failure is not None:
                work.fail(self.failure)
                return
            self.stream.wait_event(issued.ready)
            if self._streams.is_capturing():  # a graph is being made: nothing runs, and nothing is waited for
                self._call(operation)
                work.was_put(self.stream)
                return
            self._reap()
            self.sequence += 1
            found = self._begin(issued)
            try:
                self._call(operation)
            except NcclError as error:
                member = self._member
                self._give_up(PeerError(f"rank {member.rank} could not run {found.wait.description}: {error}"))
                return
            except BaseException as error:  # half of it may be in the stream
                self._give_up(error)
                raise
            work.was_put(self.stream)

    def _begin(self, issued: Issued) -> _UnderWay:
        """Records it, and lets the watch look after it."""
        operation, work, member = issued.operation, issued.work, self._member
        fingerprint, label = operation.fingerprint, self._recorder.label(operation.text)
        record = self._recorder.begin(self._label, self.sequence, label, fingerprint, issued.site)
        self._recorder.state(record, EXCHANGING)
        errand = Errand(fingerprint, operation.text, label, self._recorder, issued.site, record)
        wait = Wait(
            member.key, self.sequence, errand, member.ranks, lambda: self._break_off(wait), issued.timeout_s,
            suspects=tuple(rank for rank in member.ranks if rank != member.rank),
            is_over=work.is_over, trouble=self._trouble, limit=_LIMIT, must=_MUST,
        )  # fmt: skip
        found = _UnderWay(work, wait, record)
        self._under_way.append(found)
        self._watch.begin(wait)
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
                self._native.group(calls, self.stream.cuda_stream)
        finally:
            for number in made:
                self._native.destroy_op(number)

    def _made_op(self, op: PreMulSum, dtype: str) -> int:
        if isinstance(op.factor, float):
            return self._native.pre_mul_sum(op.factor, dtype)
        return self._native.pre_mul_sum_on_device(op.factor.data_ptr(), dtype)

    def refuse(self, error: BaseException) -> None:
        """Tells the others that this rank takes no part in the next operation, and why; it counts as run."""
        with self._turn:
            self.sequence += 1
            self._watch.report(self._member.key, self.sequence, error)

    def _reap(self) -> None:
        """Ends what the stream has come past."""
        while self._under_way and self._under_way[0].work.is_over():
            found = self._under_way.popleft()
            self._watch.end(found.wait)
            self._recorder.end(found.record, DONE)

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
            self._watch.report(self._member.key, None, error)
            self.fail(error)

    def _break_off(self, wait: Wait) -> None:
        """Ends everything for the reason why `wait` will not end; called by the watch."""
        error = wait.reason or PeerError(f"{wait.description} was broken off")
        where = self._member.flight.write(f"{type(error).__name__}: {error}")
        self.fail(type(error)(f"{error}{where}"))

    def fail(self, error: BaseException) -> None:
        """Ends what is under way, with this error, and aborts the communicator."""
        with self._breaking:
            if self.failure is not None:
                return
            self.failure = error
        self._on_failure(error)  # before whoever waits here is told, and asks for something else
        label = self._recorder.label(f"{type(error).__name__}: {error}")
        for found in tuple(self._under_way):
            self._watch.end(found.wait)
            if not found.work.is_over():
                found.work.fail(error)
                self._recorder.end(found.record, FAILED, label)
        self._native.abort()

    def abort(self) -> None:
        """Ends what is under way without waiting for the others."""
        self.fail(WorldError(f"{self._member.name} was aborted"))

    def close(self) -> None:
        """Waits for all that was issued, and ends the communicator."""
        self.stream.synchronize()
        with self._turn:
            if self.failure is not None:
                return
            self._reap()
            self.failure = WorldError(f"{self._member.name} was closed")
        try:
            within(self._member.timeout, self._native.destroy)
        except TimeoutError:
            self._native.abort()
