"""Messages over TCP sockets that the waiting thread drives itself: the transport for CPU tensors.

Gloo makes three writes per message, and its own thread spins while ours holds a connection's lock: 24 kB from
Shard(0) to Replicate on 4 ranks of 2 cores took 3.9 ms (median) in Gloo's messages and 1.0 ms in messages like
these, at a seventh of the processor time. A message here is one write and one read.

Messages of a pair of ranks arrive in order, and each begins with a fingerprint of what is exchanged and its
length, so ranks that disagree find out on arrival.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tritondt._C import ArenaGroup, SocketGroup
from tritondt.comm.answers import Attempt
from tritondt.comm.communicator import numbered_tag_of
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import EXCHANGING, ExchangeRecord
from tritondt.comm.monitor.watch import GRACE_S, Wait
from tritondt.comm.packing.messages import MessageBuffers
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.comm.transports.tcp_connect import Connections
from tritondt.comm.work import ThreadQueue
from tritondt.errors import PeerError, WorldError

# How long an abort waits for the thread that it has woken to let go of the sockets.
_PATIENCE_S = 5.0


class SocketCommunicator(PackedCommunicator):
    """A communicator of ranks that connect by TCP when they first have messages for each other; made by all of them."""

    drops_refused = True

    def __init__(self, context: ProcessContext) -> None:
        super().__init__(context, ThreadQueue())
        self._watch, self._watchdog, self._timeout_s = context.watch, context.watchdog, context.timeout.total_seconds()
        self._started = 0.0  # when the exchange under way was started; 0 where none is
        coming = Attempt.of(self._timeout_s, self._raise_failure_of_others)
        with self._told_of_failure(), ExitStack() as undone:
            self._connections = Connections(
                context.client, context.key, self._ranks, self._place, coming, context.secret
            )
            undone.callback(self._connections.close)
            self._group = SocketGroup([-1] * len(self._ranks))
            self._watchdog.watch(self._group, self._timeout_s, self._recorder, self._flight.path_text)
            undone.pop_all()

    @contextmanager
    def _told_of_failure(self) -> Iterator[None]:
        """Tells the other ranks of what this one raises while it makes its part of the communicator."""
        try:
            try:
                yield
            except OSError as error:  # of the extension: connections name their own
                raise PeerError(
                    f"rank {self._rank} could not make its part of the communicator of ranks {list(self._ranks)}: "
                    f"{error}"
                ) from error
        except BaseException as error:
            self._watch.report(self._key, None, error)
            raise

    def _raise_failure_of_others(self, missing: Sequence[int]) -> None:
        """Raises PeerError where a rank that this one is about to connect to has failed."""
        found = self._watch.failure(self._key, [self._ranks[place] for place in missing])
        if found is not None:
            connecting = f"rank {self._rank} connected to ranks {list(self._ranks)}"
            raise PeerError(f"rank {found.rank} failed while {connecting}: {found.error}")

    def post(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Connects to those that no exchange so far had messages with."""
        if not record.is_connected:
            self._reach(record, {message.peer for message in (*receives.slices, *sends.slices)})

    def _reach(self, record: ExchangeRecord, places: Iterable[int]) -> None:
        """Connects to the ranks at `places`, which come to this exchange, too, where it has not been done before."""
        lacking = self._connections.lacking.intersection(places)
        if lacking:
            self._connect(record, lacking)
        record.is_connected = True

    def _connect(self, record: ExchangeRecord, lacking: set[int]) -> None:
        with self._watched(record, lacking, self._tried) as look:
            # The watch ends it at its timeout, and knows why; later only where the watch has no answer.
            connected = self._connections.reach(lacking, Attempt.of(self._timeout_s + 2 * GRACE_S, look))
        for place in connected:
            found = self._connections.sockets[place]
            assert found is not None, f"place {place} has been connected"
            self._note_connection(place, found.fileno())

    @contextmanager
    def _watched(
        self, record: ExchangeRecord, missing: Iterable[int], tried: Callable[[Wait], str] = lambda _: ""
    ) -> Iterator[Callable[[Iterable[int]], None]]:
        """The watch over a wait for ranks outside of messages: a call with the places of those that are missing.

        It raises what ends the waiting; what the body raises gets the reason that the watch knows.
        """
        wait = Wait(self._key, self.sequence, record, self._ranks, lambda _: None, self._timeout_s)
        wait.drops_refused, wait.collective, wait.tried = True, self.collective, tried

        def look(missing: Iterable[int]) -> None:
            wait.suspects = tuple(self._ranks[place] for place in sorted(missing))
            self._recorder.state(record.entry, EXCHANGING, wait.suspects[0])
            self._check_usable(record.description)  # another thread may have aborted
            self._watch.look(wait)
            if wait.reason is not None:
                raise wait.reason

        look(missing)
        self._watch.begin(wait)
        try:
            yield look
        except PeerError as error:
            reason = wait.reason or self._watch.broken(wait, f"{error} in {record.description}")
            raise self._flight.written_for(reason) from error
        finally:
            self._watch.end(wait)

    def _tried(self, wait: Wait) -> str:
        """Clause that says at which addresses the ranks have been called that are waited for."""
        return self._connections.tried(self._ranks.index(rank) for rank in wait.suspects)

    def _note_connection(self, place: int, descriptor: int) -> None:
        """Notes a new connection."""
        self._group.connect(place, descriptor)

    def start(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Sends the bytes that the sockets' buffers take at once."""
        self._started = time.monotonic()
        self._group.start_slices(
            sends.slices.native,
            sends.pointers,
            sends.buffer,
            receives.slices.native,
            receives.pointers,
            receives.buffer,
            numbered_tag_of(record.fingerprint, self.sequence),
        )

    def finish(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Sends and receives until all messages have gone and come."""
        outcome, peer = self._group.finish()
        if outcome != "done":
            self._finish_watched(record, self._group, outcome, peer)
        self._started = 0.0

    def break_off(self, record: ExchangeRecord, error: BaseException) -> None:
        """Disconnects: half of the exchange may have gone; of one that was not packed, others have sent their half."""
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the communicator for good, and tells the others why: here, or in one that works with it."""
        self._started = 0.0
        if self.failure is None:
            self.failure = error
            self._watch.report(self._key, None, error)
        self._close_sockets()

    def _finish_watched(self, record: ExchangeRecord, group: SocketGroup | ArenaGroup, outcome: str, peer: int) -> None:
        """Finishes an exchange that is not done at once, the only kind that the watch hears of."""
        wait = Wait(self._key, self.sequence, record, self._ranks, lambda _: group.interrupt(), self._timeout_s)
        wait.is_timed, wait.drops_refused = False, True  # timed by the watchdog, which needs no GIL
        wait.collective = self.collective
        wait.started = self._started
        self._watch.begin(wait)
        try:
            while outcome == "pending":
                wait.peer = self._ranks[peer]
                self._recorder.state(record.entry, EXCHANGING, wait.peer)
                self._watch.look(wait)
                outcome, peer = group.finish()
        finally:
            self._watch.end(wait)
        if outcome == "done" and wait.reason is not None:
            self._skip()  # the interruption came too late, and is not for the next exchange
        if outcome != "done":
            self._check_usable(record.description)  # another thread may have aborted
            if peer >= 0:  # else all messages had come when the time was over
                wait.peer = self._ranks[peer]
            raise self._flight.written_for(self._cause(wait, outcome))

    def _meet(self, record: ExchangeRecord, places: Sequence[int]) -> None:
        # Who is connected meets by messages, which shows at once who has left. Of two that are not, both know.
        lacking = self._connections.lacking
        super()._meet(record, [place for place in places if place not in lacking])
        if not lacking:
            return
        try:
            with self._watched(record, lacking) as look:
                self._connections.meet(f"barrier/{self.sequence}", look)
        except BaseException as error:
            self._record_failure(record, error)
            self._end_broken(record, error)
            raise
        self._record_end(record, 0, 0)

    def _skip(self) -> None:
        self._started = 0.0
        self._group.skip(self.sequence)

    def _refuse(self, error: BaseException) -> None:
        self.sequence += 1
        self._watch.report(self._key, self.sequence, error, is_refusal=True)
        self._skip()

    def set_timeout(self, seconds: float) -> None:
        """Sets how long an exchange may take from now on, in seconds."""
        self._check_usable(f"a timeout of {seconds:g} s")
        self._timeout_s = seconds
        self._group.set_timeout(seconds)

    def _interrupt(self, reason: BaseException) -> None:
        self._group.interrupt()

    def _let_go(self) -> None:
        with_turn = self._turn.acquire(timeout=_PATIENCE_S)
        try:
            self._close_sockets()
        finally:
            if with_turn:
                self._turn.release()

    def release(self) -> None:
        """Lets go of the memory of a communicator that has ended: it has none."""

    def disown(self, error: WorldError) -> None:
        """Refuses all further use, and closes this process's sockets: peers must notice when the parent dies."""
        super().disown(error)
        self._connections.close()

    def _disconnect(self, reason: BaseException) -> None:
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._watchdog.unwatch(self._group)
        self._connections.close()

    def _cause(self, wait: Wait, outcome: str) -> PeerError:
        """The reason why an exchange broke off: what the watch or the store knows, else what the socket said."""
        if outcome == "expired":
            return self._watch.why_expired(wait)
        if outcome == "closed":
            return self._watch.broken(
                wait,
                f"rank {wait.peer} closed its connection while rank {self._rank} waited for it in {wait.description}; "
                "it has failed or left",
            )
        what = "something else" if outcome == "mismatch" else "what nothing here expects"
        return self._watch.disagreed(
            wait,
            f"rank {wait.peer} sent {what} to rank {self._rank}, which runs {wait.description}; all ranks must "
            f"{wait.must}",
        )
