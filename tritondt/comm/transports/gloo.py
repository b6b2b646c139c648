"""Point-to-point messages on a Gloo group of our own: the transport for CPU tensors.

Four ranks that exchange 64 MB from Shard(0) to Shard(1) take 12.8 ms this way and 83.6 ms through Gloo's own
all-to-all, which is why its collectives are not used.

Gloo matches messages by tag alone. A message longer than its receive aborts the process and a shorter one
passes unnoticed, so the tag is a fingerprint of what is exchanged: ranks that disagree never match, and the
watch tells them so.

A send whose connection closes while it is posted may never end (torch 2.13, seen in the stacks of a rank that went on
after a stop): nothing wakes who waits for it, not even closing all connections, as the watch does. It seems that Gloo's
own thread drops the message. So every wait has its own limit, a little behind that of the watch.
"""

import ctypes
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritondt.comm.answers import Answers
from tritondt.comm.communicator import tag_of
from tritondt.comm.daemons import within
from tritondt.comm.member import ProcessContext
from tritondt.comm.monitor.flight import ExchangeRecord
from tritondt.comm.monitor.watch import Wait
from tritondt.comm.packing.messages import MessageBuffers
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.comm.transports.interfaces import asked_interface, own_interfaces
from tritondt.comm.work import ThreadQueue
from tritondt.errors import PeerError, TritondtError, WorldError

# Gloo's own limit must never strike first: it closes every connection without saying why.
TIMEOUT_FACTOR = 4
# How much longer than its timeout a wait may take: the watch gives a second of grace, and the store up to three.
_LIMIT_BEHIND_S = 5.0
_AT_ONCE_S = 0.001
_INTERRUPT_TAG = 0x7FFFFFFF


class _Posted(NamedTuple):
    """An exchange under way: messages posted so far, by peer, on the group that an abort may have dropped since."""

    wait: Wait
    group: Any
    tag: int
    messages: list[tuple[int, Any]]


class GlooCommunicator(PackedCommunicator):
    """A communicator of ranks connected pairwise by Gloo; made by all of them together."""

    def __init__(self, context: ProcessContext) -> None:
        super().__init__(context, ThreadQueue())
        self._watch, self._timeout_s = context.watch, context.timeout.total_seconds()
        self._posted: _Posted | None = None
        self._group: Any = connected(context, context.place)

    def post(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Posts all receives."""
        wait = Wait(self._key, self.sequence, record, self._ranks, lambda _: self._close_connections(), self._timeout_s)
        wait.collective = self.collective
        posted = self._posted = _Posted(wait, self._group, tag_of(record.fingerprint, self.sequence), [])
        self._watch.begin(wait)
        for peer, tensor in receives.parts():
            self._post_message(posted, posted.group.recv, peer, tensor)

    def start(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Posts all sends."""
        posted = self._under_way()
        for peer, tensor in sends.parts():
            self._post_message(posted, posted.group.send, peer, tensor)

    def finish(self, record: ExchangeRecord, receives: MessageBuffers, sends: MessageBuffers) -> None:
        """Waits for all messages."""
        posted = self._under_way()
        for peer, work in posted.messages:
            with self._explained(posted.wait, peer):
                work.wait(timedelta(seconds=_left_s(posted.wait)))
        self._end_wait()

    def break_off(self, record: ExchangeRecord, error: BaseException) -> None:
        """Disconnects: half of the exchange is under way, so nothing can follow it."""
        try:
            self.fail(error)
        finally:
            self._end_wait()

    def fail(self, error: BaseException) -> None:
        """Disconnects for good, and tells the others why: here, or in a communicator that works with it."""
        if self.failure is None:
            self.failure = error
            self._watch.report(self._key, None, error)
        self._close_connections()

    def _under_way(self) -> _Posted:
        assert self._posted is not None, "messages are posted after the exchange has begun"
        return self._posted

    def _end_wait(self) -> None:
        posted, self._posted = self._posted, None  # the wait and its tensors are not kept
        if posted is not None:
            self._watch.end(posted.wait)

    def _post_message(self, posted: _Posted, post: Any, peer: int, tensor: torch.Tensor) -> None:
        with self._explained(posted.wait, peer):
            posted.messages.append((peer, post([tensor], peer, posted.tag)))

    @contextmanager
    def _explained(self, wait: Wait, peer: int) -> Iterator[None]:
        """Turns what Gloo raises about a peer into an error that says why."""
        wait.peer = self._ranks[peer]
        try:
            yield
        except RuntimeError as error:
            self._check_usable(wait.description)  # another thread may have aborted
            raise self._flight.written_for(self._cause(wait, error)) from error

    def _refuse(self, error: BaseException) -> None:
        self.sequence += 1
        self._watch.report(self._key, self.sequence, error, is_refusal=True)

    def set_timeout(self, seconds: float) -> None:
        """Sets how long a message may take from now on, in seconds."""
        self._check_usable(f"a timeout of {seconds:g} s")
        self._timeout_s = seconds
        self._group._set_default_timeout(timedelta(seconds=seconds) * TIMEOUT_FACTOR)

    def _disconnect(self, reason: BaseException) -> None:
        self._group = None

    def _interrupt(self, reason: BaseException) -> None:
        self._close_connections()

    def _let_go(self) -> None:
        self._group = None

    def disown(self, error: WorldError) -> None:
        """Refuses all further use; keeps Gloo's group, whose destructor would take sockets from the parent's epoll."""
        super().disown(error)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _close_connections(self) -> None:
        """Wakes the threads that wait on this communicator, which cannot be used afterwards."""
        if self._group is not None:
            close_connections(self._group, self._place, len(self._ranks))

    def _cause(self, wait: Wait, error: RuntimeError) -> PeerError:
        """The reason why a wait broke: what the watch or the store knows, else that the connection closed."""
        if wait.reason is None and time.monotonic() >= _limit(wait):
            return self._watch.why_expired(wait)
        return self._watch.broken(
            wait,
            f"rank {wait.peer} closed its connection while rank {self._rank} waited for it in {wait.description}; it "
            f"has failed or left ({str(error).splitlines()[0]})",
        )


def close_connections(group: Any, place: int, size: int) -> None:
    """Ends everything under way in Gloo's group of so many ranks, in which this one has that place, for good.

    Gloo closes all connections of a group when one receive in it times out; nothing else wakes a waiter.
    """
    for other in range(size):
        if other == place:
            continue
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], other, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # the time-out that was asked for, or one whose connection is closed already


def connected(context: ProcessContext, place: int) -> Any:
    """Gloo's group of the ranks of `context`, in which this one has that place.

    PeerError where some do not come within the timeout or cannot be reached, and as soon as one has failed or ended.
    """
    others = [other for other, rank in enumerate(context.ranks) if rank != context.rank]
    connection: Any = context.store
    store = dist.PrefixStore(context.key, connection.clone())  # Gloo keeps the connection while it waits
    make = partial(_group, store, place, len(context.ranks), context.timeout)
    try:
        found = within(context.timeout, make, "tritondt-gloo", partial(Answers.of(context).look, others))
    except TimeoutError:
        named = [context.ranks[other] for other in others]
        text = f"rank {context.rank} waited {context.timeout.total_seconds():g} s for ranks {named} to connect by Gloo"
        raise PeerError(text) from None
    except RuntimeError as error:
        if isinstance(error, TritondtError):
            raise
        # As where two hosts have given each other one address, of the loopback interface.
        raise PeerError(
            f"rank {context.rank} on {socket.gethostname()} could not connect by Gloo to ranks "
            f"{[context.ranks[other] for other in others]}: {str(error).splitlines()[0]}; this host has "
            f"{own_interfaces()}, and TRITONDT_SOCKET_IFNAME names the one whose address Gloo gives to other hosts"
        ) from error
    found._set_default_timeout(context.timeout * TIMEOUT_FACTOR)
    return found


def _group(store: dist.Store, place: int, size: int, timeout: timedelta) -> Any:
    """Gloo's group, on the interface that a variable of ours or of NCCL's names."""
    interface = asked_interface()
    if interface is None:
        return dist.ProcessGroupGloo(store, place, size, timeout)
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    options._devices, options._timeout = [group.create_device(interface=interface)], timeout
    return group(store, place, size, options)


def _limit(wait: Wait) -> float:
    return wait.started + wait.timeout_s + _LIMIT_BEHIND_S


def _left_s(wait: Wait) -> float:
    """Seconds that a wait may still take: none where the watch has interrupted it."""
    return _AT_ONCE_S if wait.reason is not None else max(_limit(wait) - time.monotonic(), _AT_ONCE_S)
