"""A watched NCCL communicator: its operations are watched from when they go into a stream until it has passed them.

The host waits for none of them. A communicator whose operation does not end in time is aborted, never destroyed:
destroying waits.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from tritondt._C import NcclCommunicator, NcclError, NcclLibrary
from tritondt.comm.daemons import within
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.comparison import MUST
from tritondt.comm.monitor.flight import FAILED, ExchangeRecord
from tritondt.comm.monitor.watch import Wait
from tritondt.comm.nccl import aborts
from tritondt.comm.nccl.bootstrap import join_nccl
from tritondt.comm.nccl.registered import RegisteredMemory
from tritondt.comm.nccl.stream_engine import InFlight, StreamEngine
from tritondt.comm.nccl.streams import answered
from tritondt.comm.refusals import Refusals
from tritondt.comm.work import again
from tritondt.errors import PeerError, TransportError, WorldError

# How long a communicator of which operations were captured may take to be destroyed: while a graph has one of them it
# never is, and nobody can be asked for the graphs that there are.
_CAPTURED_S = 10.0
_PAUSE_S = 0.005


def _is_over() -> bool:
    return True


def _do_nothing() -> None: ...


def _find_nothing() -> str | None:
    return None


class TimeoutPolicy(NamedTuple):
    """Timeouts' name, rule and suspects for all operations of a communicator; see `Wait`."""

    limit: str = "TRITONDT_TIMEOUT"
    must: str = MUST
    suspects: tuple[int, ...] = ()


class MonitoredNccl:
    """A rank's NCCL communicator, made by all ranks of `context` together; `failure` is why nothing runs on it.

    `on_failure` is told so first, before whoever waits for what is under way.
    """

    def __init__(
        self,
        context: ProcessContext,
        library: NcclLibrary,
        engine: StreamEngine,
        on_failure: Callable[[BaseException], None],
        policy: TimeoutPolicy,
    ) -> None:
        self._context, self._on_failure, self._policy = context, on_failure, policy
        self._engine, self._streams, self._library = engine, engine.streams, library
        self._watch, self._recorder = context.watch, context.flight.recorder
        self._breaking, self._making_late = threading.Lock(), threading.Lock()
        self.failure: BaseException | None = None
        self.num_captured = 0
        # Called behind all that failed, before an abort begins: what runs then may come to a wrong end.
        self.on_abort: Callable[[], object] = _do_nothing
        # Called where the communicator is ended with all others, before it is.
        self.before_end: Callable[[], object] = _do_nothing
        # What else than NCCL has met in the background, if anything.
        self.trouble: Callable[[], str | None] = _find_nothing
        self.refusals = Refusals(context, "messages of NCCL have no tags")
        self._registered: RegisteredMemory | None = None
        engine.on_late = self._end
        self.native: NcclCommunicator = join_nccl(context, library, engine.streams)
        self._watch.attend(self._waits)

    def registered(self, num_bytes: int) -> RegisteredMemory:
        """The memory that is registered with the communicator; so many bytes, the first time, by all ranks together."""
        if self._registered is None:
            limit_s = self._context.timeout.total_seconds()
            self._registered = RegisteredMemory(self.native, self._library, num_bytes, self._streams.device, limit_s)
        return self._registered

    def break_off(self, operation: InFlight, error: BaseException, doing: str) -> None:
        """Ends everything for what was raised while an operation was put into the stream, where half of it may be.

        Raises PeerError, which says what this rank was `doing`, in place of NCCL's errors.
        """
        if not isinstance(error, NcclError):
            self.give_up(error)
            return
        what = self._as_late(operation).description
        self.give_up(PeerError(f"rank {self._context.rank} could not {doing} {what}: {error}"))
        raise again(self.failure or error) from error

    def _waits(self) -> list[Wait]:
        """Waits for the operations that are in the stream still; called by the watch.

        A thread that asks for an event without a device of its own gets a context on GPU 0, of half a gigabyte.
        """
        try:
            self._streams.bind_thread()
            # A list: others put and reap meanwhile, and a tuple of so many could be interrupted by the collector.
            under_way = [found for found in self._engine.under_way() if not found.is_over()]
        except RuntimeError as error:  # the device does not answer any more
            self.give_up(error)
            return []
        return [self._as_late(found) for found in under_way]

    def _end(self, operation: InFlight) -> None:
        """Ends the watch over an operation, and unlinks the two: a cycle would keep its tensors for the collector."""
        late: Wait = operation.late
        self._watch.end(late)
        late.is_over, operation.late = _is_over, None

    def _as_late(self, found: InFlight) -> Wait:
        with self._making_late:  # the watch and whoever puts it there may come at once
            if found.late is None:
                found.late = self._late(found)
            late: Wait = found.late
            return late

    def _late(self, found: InFlight) -> Wait:
        context, label = self._context, self._recorder.label(found.text)
        record = ExchangeRecord(found.fingerprint, found.text, label, self._recorder, found.site, found.record)
        late = Wait(context.key, found.sequence, record, context.ranks, self._break_off, found.timeout_s)
        late.started, late.messages, late.trouble = found.started, found.messages or (), self._trouble
        late.limit, late.must, late.suspects = self._policy
        late.is_over = partial(answered, found.is_over)
        return late

    def refuse(self, sequence: int, error: BaseException) -> None:
        """Reports to the other ranks that this rank takes no part in operation `sequence`, and why."""
        self._watch.report(self._context.key, sequence, error, is_refusal=True)
        with suppress(RuntimeError):  # a store that does not answer is found out when the refusal is settled
            self.refusals.add(sequence, error)

    def settle_refusals(self) -> None:
        """Returns when all ranks have refused what this one has; ends everything with PeerError where one has not."""
        try:
            self.refusals.settle()
        except PeerError as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Ends everything for a failure of this rank, and reports it to the other ranks."""
        if self.failure is None:
            self._watch.report(self._context.key, None, error)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fails the operations under way with `error`, and aborts the communicator, unless that has happened before."""
        if not self._ends_with(error):
            return
        self._on_failure(error)
        label = self._recorder.label(f"{type(error).__name__}: {error}")
        for found in self._engine.under_way():
            if found.late is not None:
                self._end(found)
            if not answered(found.is_over):
                found.fail(error)
                self._recorder.end(found.record, FAILED, label)
        self.on_abort()
        aborts.begin(self._abort, self._context.name, self.num_captured)

    def close(self, reason: BaseException) -> None:
        """Ends the communicator when the stream has come past everything; waits for the others within the timeout.

        TransportError where NCCL does not end it for CUDA graphs that have its operations.
        """
        if not self._ends_with(reason):
            return
        self._engine.reap()
        timeout = self._context.timeout
        if self.num_captured:
            timeout = min(timeout, timedelta(seconds=_CAPTURED_S))
        try:
            within(timeout, self._destroy, "tritondt-nccl")
        except TimeoutError:
            self.native.abort()  # does nothing where NCCL has begun to end it
            if self.num_captured:
                raise TransportError(
                    f"NCCL did not end {self._context.name} within {timeout.total_seconds():g} s"
                    f"{aborts.captured_text(self.num_captured)}; delete them before tritondt.close()"
                ) from None

    def leave(self, limit_s: float) -> bool:
        """Leaves the communicator to the end of the process; False where the stream is not through within `limit_s`."""
        ends_at = time.monotonic() + limit_s
        while self.failure is None and any(not answered(found.is_over) for found in self._engine.under_way()):
            if time.monotonic() >= ends_at:
                return False
            time.sleep(_PAUSE_S)
        if self._ends_with(WorldError("the process has come to its end")):
            self.native.leave()
        return True

    def _ends_with(self, error: BaseException) -> bool:
        """Whether this is the first reason to end."""
        with self._breaking:
            is_first = self.failure is None
            self.failure = self.failure or error
        self._watch.leave(self._waits)
        return is_first

    def _abort(self) -> None:
        self.native.abort()
        if self._registered is not None:  # what an abort that does not return has is kept
            self._registered.give_back()

    def _destroy(self) -> None:
        self._streams.bind_thread()
        self.before_end()
        if self._registered is not None:
            self._registered.close()
        self.native.destroy()

    def _trouble(self) -> str | None:
        """The error that NCCL, or another way of messages, has met in the background, if any."""
        try:
            self.native.poll()
        except NcclError as error:
            return str(error)
        return self.trouble()

    def _break_off(self, wait: Wait) -> None:
        """Ends everything for the reason why `wait` will not end; called by the watch."""
        error = wait.reason or PeerError(f"{wait.description} was broken off")
        self.fail(self._context.flight.written_for(error))
