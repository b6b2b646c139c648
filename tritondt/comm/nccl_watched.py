"""A communicator of NCCL whose operations are watched, from when they go into a stream until it has come past them.

The host waits for none of them. What does not come to an end in time is aborted, never destroyed: destroying waits.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tritondt._C import NcclCommunicator, NcclError, NcclLibrary
from tritondt.comm.communicator import Errand
from tritondt.comm.flight import DONE, FAILED
from tritondt.comm.membership import Membership
from tritondt.comm.nccl_join import join_nccl, within
from tritondt.comm.streams import Event, Streams
from tritondt.comm.watch import Wait
from tritondt.comm.work import Run, again
from tritondt.errors import PeerError


class Holder(Protocol):
    """Who was given an operation to hold."""

    def is_over(self) -> bool:
        """Whether the stream has come past it."""
        ...

    def fail(self, error: BaseException) -> None:
        """Told why it will not end."""
        ...


@dataclass(slots=True, eq=False)
class UnderWay(Wait):
    """An operation in the stream; all of it has been put there when there is an `event`, or its `holder` says so.

    Its record ends with the bytes that it moved.
    """

    event: Event | None = None
    holder: Holder | None = None
    sent_bytes: int = 0
    received_bytes: int = 0

    def is_over(self) -> bool:
        """Whether the stream has come past it."""
        if self.holder is not None:
            return self.holder.is_over()
        return self.event is not None and self.event.query()


class WatchedNccl:
    """One rank's part; made by all ranks of `member` together. `failure` is why nothing runs on it any more.

    `on_failure` is told so first, before whoever waits for what is under way.
    """

    def __init__(
        self, member: Membership, library: NcclLibrary, streams: Streams, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._member, self._streams, self._on_failure = member, streams, on_failure
        self._watch, self._recorder = member.watch, member.flight.recorder
        self._under_way: deque[UnderWay] = deque()
        self._breaking = threading.Lock()
        self.failure: BaseException | None = None
        self.native: NcclCommunicator = join_nccl(member, library, streams)

    def operation(self, sequence: int, errand: Errand, timeout_s: float) -> UnderWay:
        """Operation number `sequence`, to be put into the stream; `errand` is its own."""
        member = self._member
        made = UnderWay(member.key, sequence, errand, member.ranks, self._break_off, timeout_s)
        made.trouble = self._trouble
        return made

    def put(self, found: UnderWay, run: Run, doing: str) -> None:
        """Watches an operation that `run` puts into the stream.

        Whatever is raised there ends everything, for half of it may be in the stream. NCCL's errors are raised as
        PeerError, which says what this rank was `doing`.
        """
        self._under_way.append(found)
        self._watch.begin(found)
        try:
            run()
        except NcclError as error:
            self.give_up(PeerError(f"rank {self._member.rank} could not {doing} {found.description}: {error}"))
            raise again(self.failure or error) from error
        except BaseException as error:
            self.give_up(error)
            raise

    def latest(self, record: int) -> UnderWay | None:
        """What was put into the stream last, if it is recorded as this."""
        found = self._under_way[-1] if self._under_way else None
        return found if found is not None and found.errand.record == record else None

    def reap(self) -> None:
        """Ends what the stream has come past; not while a graph is being made, when nobody may ask."""
        while self._under_way and self._under_way[0].is_over():
            found = self._under_way.popleft()
            self._watch.end(found)
            self._recorder.end(found.errand.record, DONE, -1, found.sent_bytes, found.received_bytes)

    def refuse(self, sequence: int, error: BaseException) -> None:
        """Tells the others that this rank takes no part in operation `sequence`, and why."""
        self._watch.report(self._member.key, sequence, error)

    def give_up(self, error: BaseException) -> None:
        """Ends everything for a failure of this rank, and tells the others."""
        if self.failure is None:
            self._watch.report(self._member.key, None, error)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends what is under way with this error, and aborts the communicator, unless something did before."""
        if not self._ends_with(error):
            return
        self._on_failure(error)
        label = self._recorder.label(f"{type(error).__name__}: {error}")
        for found in tuple(self._under_way):
            self._watch.end(found)
            if not found.is_over():
                if found.holder is not None:
                    found.holder.fail(error)
                self._recorder.end(found.errand.record, FAILED, label)
        self.native.abort()

    def close(self, reason: BaseException) -> None:
        """Ends the communicator when the stream has come past everything; waits for the others within the timeout."""
        if not self._ends_with(reason):
            return
        self.reap()
        try:
            within(self._member.timeout, self._destroy)
        except TimeoutError:
            self.native.abort()

    def _ends_with(self, error: BaseException) -> bool:
        """Whether this is the first reason to end."""
        with self._breaking:
            is_first = self.failure is None
            self.failure = self.failure or error
        return is_first

    def _destroy(self) -> None:
        self._streams.bind_thread()
        self.native.destroy()

    def _trouble(self) -> str | None:
        """What NCCL has met in the background."""
        try:
            self.native.poll()
        except NcclError as error:
            return str(error)
        return None

    def _break_off(self, wait: Wait) -> None:
        """Ends everything for the reason why `wait` will not end; called by the watch."""
        error = wait.reason or PeerError(f"{wait.description} was broken off")
        self.fail(self._member.flight.written_for(error))
