"""The watch over a rank's waits: a thread looks once a second, so that no wait outlasts its reason.

A rank that waits longer than a second writes what it waits for to the store and reads what its peers wrote:
one that failed at the same exchange, or that waits for another one, will never answer. The reason is kept and
the wait interrupted; without a reason that happens at the timeout.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from tritondt.comm.daemons import start_daemon
from tritondt.comm.monitor.comparison import MUST
from tritondt.comm.monitor.flight import ExchangeRecord
from tritondt.comm.packing.messages import Slice
from tritondt.comm.store import presence
from tritondt.comm.store.client import SilentStoreError, StoreClient
from tritondt.comm.store.notices import Failed, Notices, Waiting
from tritondt.errors import MismatchError, PeerError, RefusalError, WorldError

INTERVAL_S = 1.0
# How much longer a rank waits for one that waits itself, whose own timeout names the rank at fault.
GRACE_S = 1.0
# Ranks that a look at the end of a wait asks for.
_MOST_TOLD = 4


@dataclass(slots=True, eq=False)
class Wait:
    """One wait of this rank, of at most `timeout_s`, in exchange number `sequence` of the communicator `key`.

    `peer` is the rank that is waited for right now, where the transport knows it; else it is somebody whom `messages`
    name, or one of `suspects`, which is narrowed to those who have not said that they wait as well. `interrupt` makes
    the waiting call return with an error; it is given the wait, since keeping it would make garbage in a cycle.
    `trouble` is what the transport has met in the background. `limit` is what sets the timeout, and `must` what ranks
    that disagree have not done. `is_over` says whether the wait has ended without anybody on the host to say so.
    `tried` is a clause that says how the ranks that are waited for were called, where that is what takes time.
    `drops_refused` says whether the transport drops messages of an exchange that a rank has refused, and goes on.
    Where several communicators run one collective or redistribution, `collective` is what they share: a name, and its
    number.
    """

    key: str
    sequence: int
    record: ExchangeRecord
    ranks: tuple[int, ...]
    interrupt: Callable[["Wait"], None]
    timeout_s: float
    is_timed: bool = True  # false where the transport's own watchdog ends what takes too long
    peer: int = -1
    messages: tuple[Sequence[Slice], ...] = ()
    suspects: tuple[int, ...] = ()
    trouble: Callable[[], str | None] = lambda: None
    is_troubled: bool = False
    started: float = field(default_factory=time.monotonic)
    looked: float = 0.0  # when the watch has last looked
    reason: PeerError | None = None
    limit: str = "TRITONDT_TIMEOUT"
    must: str = MUST
    drops_refused: bool = False
    is_over: Callable[[], bool] = lambda: False
    tried: Callable[["Wait"], str] = lambda _: ""
    collective: tuple[str, int] | None = None

    @property
    def fingerprint(self) -> int:
        """The exchange's fingerprint, equal on ranks that run the same exchange."""
        return self.record.fingerprint

    @property
    def description(self) -> str:
        """Text of the exchange, and the line of the program that asked for it."""
        return self.record.description

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that may be waited for."""
        if self.peer >= 0 or self.suspects:
            return self.suspects or (self.peer,)
        places = {message.peer for messages in self.messages for message in messages}
        return tuple(self.ranks[place] for place in sorted(places))

    @property
    def awaited(self) -> str:
        """The ranks that are waited for, in an error message.

        >>> Wait("key", 1, None, (0, 4, 5), print, 1.0, messages=([Slice(2, 0, 0, 8), Slice(1, 0, 0, 8)],)).awaited
        'ranks 4, 5'
        >>> Wait("key", 1, None, (0, 1, 2), print, 1.0, peer=2).awaited
        'rank 2'
        """
        peers = self.peers
        return f"rank{'' if len(peers) == 1 else 's'} {', '.join(map(str, peers))}"


class Watch:
    """The watch over the waits of one rank; its thread starts with the first wait and ends with `close`.

    When all ranks end the world (`is_world_ending`), the store may end first: connections tell of a rank that fails.
    """

    def __init__(self, client: StoreClient, rank: int) -> None:
        self._client, self._notices, self._rank = client, Notices(client, rank), rank
        self._waits: dict[int, Wait] = {}
        self.is_world_ending = False
        self._has_said_awaited = False
        self._ending = threading.RLock()  # nothing interrupts a wait that has ended: it would be the next one
        self._sources: list[Callable[[], Iterable[Wait]]] = []
        self._published: set[tuple[str, int]] = set()
        self._preparations: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._has_said, self._next_look = False, 0.0  # of a rank without a thread for the watch

    def begin_world(self) -> None:
        """Takes back for whom this rank has waited in the world before."""
        self._notices.say_awaited("")

    def begin(self, wait: Wait) -> None:
        """Watches `wait` from now on; a warning says once where the system gives no thread for that."""
        if self._thread is None:
            try:
                self._start()
            except WorldError as error:
                self._say_once(error)
        self._waits[id(wait)] = wait

    def look(self, wait: Wait) -> None:
        """Looks once a second why `wait` does not end, where there is no thread for that; by the thread that waits."""
        if self._thread is None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + INTERVAL_S
            self._look(wait)

    def _say_once(self, error: WorldError) -> None:
        if not self._has_said:
            self._has_said = True
            warnings.warn(
                f"rank {self._rank} looks between its own messages what others have said, not beside them: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def attend(self, find: Callable[[], Iterable[Wait]]) -> None:
        """Watches the waits that `find` returns at each look, until they are over: most are before the first look."""
        self._sources.append(find)
        if self._thread is None:
            self._start()

    def leave(self, find: Callable[[], Iterable[Wait]]) -> None:
        """Stops asking `find` for waits."""
        with suppress(ValueError):  # it has left before
            self._sources.remove(find)

    def prepare(self, run: Callable[[], None]) -> None:
        """Calls `run` in the thread that looks, before it looks at any wait that begins from now on."""
        self._preparations.put(run)

    def end(self, wait: Wait) -> None:
        """Stops watching `wait`: nothing interrupts it any more."""
        with self._ending:
            self._waits.pop(id(wait), None)

    def report(self, key: str, sequence: int | None, error: BaseException, *, is_refusal: bool = False) -> None:
        """Reports that this rank failed at exchange `sequence`, unless another rank is known to have failed before.

        None is for good: half of an exchange has gone, and peers that need no more of it may be at a later one. With
        `is_refusal` nothing of it has, and this rank goes on. Where the store does not answer, the connection that
        closes, or their own watch, tells them.
        """
        self._has_said_awaited = False  # for whom it waited stays said: others give up a moment later
        with suppress(RuntimeError):
            if sequence is None:
                self._notices.report_for_good(key, error)
            else:
                self._notices.report(key, sequence, error, is_refusal=is_refusal)

    def report_for_good(self, key: str, error: BaseException) -> None:
        """Reports that this rank takes part in no more exchanges; RuntimeError where the store does not answer."""
        self._notices.report_for_good(key, error)

    def failure(self, key: str, missing: Sequence[int] = ()) -> Failed | None:
        """The failure for good that another rank has reported, or the end of one of the `missing` ranks of this host.

        None where the store is silent, as the timeout tells.
        """
        with suppress(SilentStoreError):
            found = self._notices.failure(key, 0)
            return found or self._client.call(lambda _: self._absent(key, missing))
        return None

    def _absent(self, key: str, missing: Sequence[int]) -> Failed | None:
        """A rank that will not come to the communicator of that key, and why."""
        store = self._client.presence
        return presence.group_refusal(store, missing, key) or presence.ended(store, missing)

    def _reason(self, wait: Wait, *, patient: bool) -> PeerError | None:
        end = time.monotonic() + (3 * INTERVAL_S if patient else 0.0)
        if patient:
            self._publish(wait)
        while True:
            found = wait.reason or self.reason_now(wait)
            if found is not None or time.monotonic() >= end:
                return found
            time.sleep(0.05)

    def reason_now(self, wait: Wait) -> PeerError | None:
        """The error that says why `wait` will not end, as far as the store knows at this moment."""
        return self._failure(wait) or self._mismatch(wait)

    def close(self) -> None:
        """Ends the watch's thread."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = start_daemon(self._run, "tritondt-watch")

    def _run(self) -> None:
        while not self._closing.wait(self._pause_s()):
            self._look_around()  # keeps no wait, and nothing that hangs on it, until the next look

    def _look_around(self) -> None:
        # Lists: a tuple of more than 20 may be interrupted by the collector, and what is added meanwhile is an error.
        waits, sources = list(self._waits.values()), list(self._sources)
        while not self._preparations.empty():
            self._preparations.get()()
        found = [wait for find in sources for wait in find()]
        self._waits.update((id(wait), wait) for wait in found)
        if self._has_said_awaited and not self._waits:
            self._has_said_awaited = False
            with suppress(RuntimeError):
                self._notices.say_awaited("")
        for wait in dict.fromkeys((*waits, *found)):
            if wait.reason is None and time.monotonic() >= _due(wait):
                self._look(wait)

    def _pause_s(self) -> float:
        """Seconds until the next look: the interval, or less where a wait is due before."""
        waits = [wait for wait in list(self._waits.values()) if wait.reason is None]
        return min([INTERVAL_S, *(max(_due(wait) - time.monotonic(), 0.01) for wait in waits)])

    def _look(self, wait: Wait) -> None:
        if wait.is_over():
            self.end(wait)
            return
        wait.looked = time.monotonic()
        silent: RuntimeError | None = None
        reason, has_expired = None, False
        try:
            self._publish(wait)
            reason = self.reason_now(wait) or self._met(wait)
            has_expired = self._has_expired(wait)
        except SilentStoreError as error:  # no news: the timeout will tell
            silent, has_expired = error, _late_s(wait) >= 0
        except RuntimeError as error:  # the store's process has gone, and with it all news
            if self.is_world_ending:
                silent, has_expired = error, _late_s(wait) >= 0
            else:
                reason = self._without_news(wait, error)
        if reason is None and wait.is_timed and has_expired:
            if silent is None:
                with suppress(SilentStoreError):  # all are suspects still
                    self._narrow(wait)
            reason = self._timed_out(wait, silent)
        if reason is not None:
            with self._ending:
                if id(wait) in self._waits:
                    wait.reason = reason
                    wait.interrupt(wait)

    def _has_expired(self, wait: Wait) -> bool:
        """Whether a rank may be named at fault: later where others know better, or may yet say that they wait."""
        late_s = _late_s(wait)
        return late_s >= GRACE_S or (late_s >= 0 and len(self._silent(wait)) == 1)

    def why_expired(self, wait: Wait) -> PeerError:
        """The error that says why a wait took too long, as far as the store knows; else that it timed out."""
        end = time.monotonic() + GRACE_S
        try:
            while (found := self.reason_now(wait)) is None and self._peer_waits(wait) and time.monotonic() < end:
                time.sleep(0.05)
        except RuntimeError as gone:
            return self._timed_out(wait, gone)
        return found or self._timed_out(wait, None)

    def broken(self, wait: Wait, text: str) -> PeerError:
        """The error that says why a connection has broken, as far as this rank or the store knows; else of `text`."""
        try:
            return self._reason(wait, patient=False) or PeerError(text)
        except RuntimeError as gone:  # the broken connection is all that is known
            return PeerError(f"{text}; {self._client.silence(gone)}")

    def lost(self, wait: Wait, text: str) -> PeerError:
        """The error where a connection has broken and nobody knows whose: of a rank that has failed, or has ended.

        Else of those who have not said that they wait as well, once the others have had a moment to do so.
        """
        end = time.monotonic() + 3 * INTERVAL_S
        try:
            self._publish(wait)
            while (found := wait.reason or self.reason_now(wait) or self._ended(wait)) is None:
                if time.monotonic() >= end:
                    self._narrow(wait)
                    break
                time.sleep(0.05)
        except RuntimeError as gone:
            return self._without_news(wait, gone)
        return found or PeerError(f"rank {self._rank} lost {wait.awaited} in {wait.description} ({text})")

    def _ended(self, wait: Wait) -> PeerError | None:
        found = self._client.call(lambda _: presence.ended(self._client.presence, wait.peers))
        return None if found is None else PeerError(failure_text(found.rank, self._rank, wait, found.error))

    def disagreed(self, wait: Wait, text: str) -> PeerError:
        """The error of a rank that was sent something else: of both ranks' exchanges where the other waits, too.

        Tells the others what this rank waits for and gives them a moment to do the same; else the error is of `text`.
        """
        try:
            return self._reason(wait, patient=True) or MismatchError(text)
        except RuntimeError as gone:
            return MismatchError(f"{text}; {self._client.silence(gone)}")

    def _peer_waits(self, wait: Wait) -> bool:
        """Whether all ranks that are waited for have said that they wait as well: they know who is at fault."""
        return not self._silent(wait)

    def _narrow(self, wait: Wait) -> None:
        """Narrows the suspects of a wait for one of several ranks to those that have not said that they wait."""
        if wait.peer < 0:
            wait.suspects = tuple(sorted(self._silent(wait))) or wait.suspects

    def _silent(self, wait: Wait) -> set[int]:
        """The awaited ranks that have not said that they wait as well: at this exchange or before, or this collective.

        Only this one: a rank that waited in one before and stopped since would look like one that knows who is late.
        """
        if wait.collective is None:
            said = self._notices.waiting(wait.key, wait.peers)
            return set(wait.peers) - {rank for rank, waiting in said.items() if waiting.sequence <= wait.sequence}
        key, number = wait.collective
        said = self._notices.waiting(key, wait.peers)
        return set(wait.peers) - {rank for rank, waiting in said.items() if waiting.sequence == number}

    def _met(self, wait: Wait) -> PeerError | None:
        """The error of a failure that the transport has met in the background; reported to the other ranks as well.

        Not at the first look: by the next one, those who have met the same have said that they wait.
        """
        text = wait.trouble()
        if text is None:
            return None
        if not wait.is_troubled:
            wait.is_troubled = True
            return None
        self._narrow(wait)
        reason = PeerError(f"rank {self._rank} lost {wait.awaited} in {wait.description} ({text})")
        self.report(wait.key, None, reason)
        return reason

    def _without_news(self, wait: Wait, gone: RuntimeError) -> PeerError:
        """The error of a wait that does not end where the store has gone."""
        met = wait.trouble()
        what = "waits for" if met is None else "lost"
        why = "without news" if met is None else f"({met})"
        return PeerError(
            f"rank {self._rank} {what} {wait.awaited} in {wait.description} {why}; {self._client.silence(gone)}"
        )

    def _timed_out(self, wait: Wait, gone: RuntimeError | None) -> PeerError:
        """The error of a wait that took too long; reported to the other ranks as well.

        A store that is `gone` is evidence: the process that holds it has stopped, and the peer may wait for that one.
        """
        reason = PeerError(
            f"rank {self._rank} waited {_waited(wait):.1f} s for {wait.awaited} in "
            f"{wait.description} and got no answer; the timeout is {wait.timeout_s:g} s "
            f"({wait.limit}){wait.tried(wait)}"
            f"{self._who_waits_too(wait) if gone is None else f'; {self._client.silence(gone)}'}"
        )
        self.report(wait.key, wait.sequence, reason)
        return reason

    def _who_waits_too(self, wait: Wait) -> str:
        """Clause for ranks that are waited for and wait themselves, maybe where this one has no part."""
        said = dict[int, str]()
        with suppress(RuntimeError):
            said = {rank: self._notices.awaited_by(rank) for rank in wait.peers[:_MOST_TOLD]}
        return "".join(f"; rank {rank} has said that it waits for {text}" for rank, text in said.items() if text)

    def _publish(self, wait: Wait) -> None:
        if (wait.key, wait.sequence) in self._published:
            return
        self._published, self._has_said_awaited = {(wait.key, wait.sequence)}, True
        self._notices.say_awaited(f"{wait.awaited} in {wait.description}")
        self._notices.publish(wait.key, Waiting(wait.sequence, wait.fingerprint, wait.description))
        if wait.collective is not None:
            key, number = wait.collective
            self._notices.publish(key, Waiting(number, wait.fingerprint, wait.description))

    def _failure(self, wait: Wait) -> PeerError | None:
        found = self._notices.failure(wait.key, wait.sequence)
        if found is None:
            return None
        text = failure_text(found.rank, self._rank, wait, found.error)
        if not found.is_refusal:
            return PeerError(text)
        return RefusalError(text) if wait.drops_refused else PeerError(f"{text}; {_NOT_DROPPED}")

    def _mismatch(self, wait: Wait) -> MismatchError | None:
        for rank, other in self._notices.waiting(wait.key, wait.ranks).items():
            reason = disagreement(wait, self._rank, rank, wait.key, *other) or past_disagreement(
                wait, self._rank, rank, other
            )
            if reason is not None:
                return reason
        return None


def _due(wait: Wait) -> float:
    """When to look at a wait: once it is an interval old, an interval after each look, and at its timeout."""
    due = (wait.looked or wait.started) + INTERVAL_S
    return min(due, wait.started + wait.timeout_s) if wait.is_timed else due


def _waited(wait: Wait) -> float:
    return time.monotonic() - wait.started


def _late_s(wait: Wait) -> float:
    return _waited(wait) - wait.timeout_s


# The clause of an error where one rank refused an exchange and a transport has no way to drop messages of it.
_NOT_DROPPED = (
    "messages of it are under way that this transport cannot take back: call tritondt.abort() on every rank to go on"
)


def failure_text(failed: int, rank: int, wait: Wait, error: str) -> str:
    """The text of the error on a rank that waits when another rank has failed."""
    return f"rank {failed} failed while rank {rank} waited for {wait.awaited} in {wait.description}: {error}"


def disagreement(
    wait: Wait, rank: int, other: int, key: str, sequence: int, fingerprint: int, description: str
) -> MismatchError | None:
    """The error where rank `other` runs something else at the point where `rank` waits, else None."""
    if (key, sequence) != (wait.key, wait.sequence) or fingerprint == wait.fingerprint:
        return None
    return MismatchError(
        f"ranks disagree at exchange {sequence}: rank {rank} runs {wait.description}, rank {other} runs "
        f"{description}; all ranks must {wait.must}"
    )


def past_disagreement(wait: Wait, rank: int, other: int, waiting: Waiting) -> MismatchError | None:
    """The error where rank `other` still waits in an exchange instead of which `rank` has run something else.

    It may have sent what nobody expects and received what it did, so that no message of its own has shown that.
    """
    if waiting.sequence >= wait.sequence:
        return None
    ran = wait.record.ran(waiting.sequence)
    if ran is None or ran.fingerprint == waiting.fingerprint:
        return None
    return MismatchError(
        f"ranks disagree at exchange {waiting.sequence}: rank {rank} ran {ran.text}, rank {other} runs "
        f"{waiting.description}; all ranks must {wait.must}"
    )
