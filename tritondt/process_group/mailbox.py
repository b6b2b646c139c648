"""Messages between two ranks of a process group on the CPU, which only those two ask for: send and recv, with tags.

Who sends calls whoever receives, once, and all its messages to that rank follow on the connection: tag, dtype, length
and bytes. One thread of a rank carries all of its messages, whatever the program does meanwhile. A message whose
receive has not been asked for stays with its sender, unless it is short or another one behind it is waited for.
"""

import ctypes
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import torch

from tritondt.comm import world
from tritondt.comm.daemons import start_daemon
from tritondt.comm.member import ProcessContext
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.processes import machine
from tritondt.comm.store import presence
from tritondt.comm.store.client import SilentStoreError
from tritondt.comm.transports.handshakes import Address, Handshakes, Tokens, UnreachableError
from tritondt.comm.transports.interfaces import no_address
from tritondt.comm.transports.tcp_connect import FAR, NEAR, drawn_tokens, listeners_of_rank
from tritondt.errors import MismatchError, PeerError, WorldError
from tritondt.process_group.cpu_works import QueuedCollective
from tritondt.process_group.naming import text_of
from tritondt.process_group.staging import Copies, NewCopies, copy_back, in_place, readable

_mailboxes: "WeakSet[Mailbox]" = WeakSet()


def _after_fork() -> None:
    for each in list(_mailboxes):
        each.disown()


os.register_at_fork(after_in_child=_after_fork)

ANY = -1  # a source: whoever sends first
# Tag, bytes, and the dtype's name.
_HEADER = struct.Struct("<qq24s")
# A message of at most so many bytes is taken before its receive is asked for.
_SHORT_BYTES = 64 << 10
# How often a rank looks whether others have failed, and whether those it calls have come.
_LOOK_S, _LONGEST_PAUSE_S, _FIRST_PAUSE_S = 1.0, 0.1, 0.001


class MessageWork(QueuedCollective):
    """A message under way, and the rank of the group that it comes from."""

    def __init__(self, text: str, results: Sequence[torch.Tensor], source: int) -> None:
        super().__init__(text, results)
        self.source = source

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        """The rank of the group that the message comes from; -1 before that is known."""
        return self.source


class _Asked:
    """A send or a receive that was asked for: `memory` is what is read or written, then `copies` are made."""

    def __init__(
        self, work: MessageWork, peer: int, tag: int, memory: torch.Tensor, copies: Copies, limit_s: float
    ) -> None:
        self.work, self.peer, self.tag, self.copies = work, peer, tag, copies
        self.dtype, self.num_bytes, self._memory = text_of(memory.dtype), memory.nbytes, memory
        self.content = memoryview((ctypes.c_ubyte * memory.nbytes).from_address(memory.data_ptr())).cast("B")
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s

    def finish(self) -> None:
        """Ends well."""
        self.work.run(partial(copy_back, self.copies))

    def fail(self, error: BaseException) -> None:
        """Ends with an error, which whoever waits raises."""

        def raise_error() -> None:
            raise error

        self.work.run(raise_error)


class _Outgoing:
    """Traffic to one rank: the connection, once there is one, and messages in order."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.call: Handshakes | None = None
        self.queue: deque[_Asked] = deque()
        self.rest: list[memoryview] = []  # of the first message, which has begun
        self.is_watched = False


class _Incoming:
    """Traffic from one rank: the message under way, and messages that nobody has asked for."""

    def __init__(self, found: socket.socket) -> None:
        self.socket = found
        self.header, self.filled = bytearray(_HEADER.size), 0
        self.frame: _Frame | None = None
        self.kept: deque[_Frame] = deque()
        self.is_held = False  # nothing is read: a long message waits for its receive


class _Frame(NamedTuple):
    """A message that has begun to arrive; `asked` is a list with the receive that it is for, empty before one is."""

    tag: int
    num_bytes: int
    dtype: str
    asked: list[_Asked]
    content: list[memoryview]

    @property
    def text(self) -> str:
        """Bytes and dtype in messages."""
        return f"{self.num_bytes} bytes of {self.dtype}"


class Mailbox:
    """One rank's messages in a process group; `ranks` are the group's, as ranks of the world."""

    def __init__(self, name: str, ranks: tuple[int, ...], own: int, timeout: timedelta) -> None:
        self._name, self._ranks, self._own, self.timeout = name, ranks, own, timeout
        self._starting, self._ended = threading.Lock(), ""
        self._carrier: _Carrier | None = None
        self._world: ProcessWorld | None = None
        _mailboxes.add(self)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, text: str) -> MessageWork:
        """The Work of a message to a rank of the group."""
        work = MessageWork(text, [], self._own)
        memory = readable(tensor.detach())
        self._open(text).ask(_Asked(work, peer, tag, memory, (), self.timeout.total_seconds()), is_send=True)
        return work

    def receive(self, tensor: torch.Tensor, source: int, tag: int, text: str) -> MessageWork:
        """The Work of a message from a rank of the group, or from any."""
        copies: NewCopies = []
        memory = in_place(tensor, copies)
        work = MessageWork(text, [tensor], source)
        self._open(text).ask(_Asked(work, source, tag, memory, copies, self.timeout.total_seconds()), is_send=False)
        return work

    def _open(self, text: str) -> "_Carrier":
        """The carrier of messages in the current world."""
        with self._starting:
            if self._ended:
                raise WorldError(f"{text} was asked of {self._name}, which {self._ended}; make a new one")
            if self._carrier is None or self._world is None or self._world.is_closed:
                found = world.current()
                if not isinstance(found, ProcessWorld):
                    raise WorldError("a process group was used by a rank that is a thread; it connects processes")
                name = f"{self._name}{presence.PART_OF_GROUP}the CPU, messages"
                with found.entering(name, tuple(sorted(self._ranks)), self.timeout) as context:
                    self._carrier, self._world = _Carrier(context, self._ranks, self._own, found.identity.size), found
                found.keep(name, self._carrier)
            return self._carrier

    def disown(self) -> None:
        """Closes this process's connections, which a fork copied: the others must notice when the parent dies."""
        self._starting, self._ended = threading.Lock(), "is the parent's of this process, which was forked from it"
        if self._carrier is not None:
            self._carrier.close_sockets()

    def end(self, how: str) -> None:
        """Ends the group: what is under way fails."""
        with self._starting:
            self._ended = self._ended or how
            carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.abort()
            if self._world is not None:
                self._world.forget(f"{self._name}{presence.PART_OF_GROUP}the CPU, messages")


class _Carrier:
    """The connections of one rank's messages, and the thread that carries these."""

    def __init__(self, context: ProcessContext, ranks: tuple[int, ...], own: int, world_size: int) -> None:
        self._context, self._ranks, self._own = context, ranks, own
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._receives: list[_Asked] = []
        self._new: deque[tuple[_Asked, bool]] = deque()
        self._closed, self._next_look = False, time.monotonic() + _LOOK_S
        tokens = drawn_tokens()
        self._listeners = listeners_of_rank(world_size)
        reached = {which: listener.getsockname()[:2] for which, listener in self._listeners.items()}
        others = {rank for rank in range(len(ranks)) if rank != own}
        self._callers = Handshakes(own, {}, list(self._listeners.values()), tokens, set(), others, context.secret)
        self._callers.open()
        self._waking, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._waking, self._woken):
            each.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)
        self._selector.register(self._callers.fileno(), selectors.EVENT_READ, self._accept)
        said = json.dumps([machine(), reached, *tokens])
        context.client.call(lambda store: store.set(self._key(own), said), context.timeout.total_seconds())
        self._thread = start_daemon(self._run, "tritondt-messages")

    def _key(self, rank: int) -> str:
        return f"{self._context.key}/mailbox/{rank}"

    def ask(self, asked: _Asked, *, is_send: bool) -> None:
        """Carries a message, in its turn."""
        self._new.append((asked, is_send))
        if self._closed:
            self._fail_all(WorldError(f"{asked.work.text} was asked of a process group that has ended"))
        self._wake()

    def _wake(self) -> None:
        try:
            self._waking.send(b"\0")
        except BlockingIOError:  # it is being woken
            pass
        except OSError:  # it has ended, and fails what is left
            self._fail_all(WorldError("a process group has ended"))

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        try:
            while not self._closed:
                calls = [each for each in self._outgoing.values() if each.queue and each.socket is None]
                limit_s = min(pause if calls else _LOOK_S, self._left_s())
                for key, _ in self._selector.select(limit_s):
                    key.data()
                pause = min(2 * pause, _LONGEST_PAUSE_S) if calls and not self._new else _FIRST_PAUSE_S
                while self._new:
                    self._begin(*self._new.popleft())
                self._call()
                self._look()
            self._fail_all(WorldError(f"{self._context.name} has ended"))
        except BaseException as error:
            self._closed = True
            self._fail_all(error)
            raise
        finally:
            self.close_sockets()

    def _pending(self) -> list[_Asked]:
        sends = [asked for each in self._outgoing.values() for asked in each.queue]
        return [*sends, *self._receives, *(asked for each in self._frames() for asked in each.asked)]

    def _frames(self) -> list[_Frame]:
        return [each.frame for each in self._incoming.values() if each.frame is not None]

    def _left_s(self) -> float:
        """Seconds until the first message is late."""
        deadlines = [asked.deadline for asked in self._pending()]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else _LOOK_S

    def _begin(self, asked: _Asked, is_send: bool) -> None:
        if asked.peer == self._own:
            asked.fail(WorldError(f"{asked.work.text} is of a rank to itself; copy the tensor"))
        elif is_send:
            outgoing = self._outgoing.setdefault(asked.peer, _Outgoing())
            outgoing.queue.append(asked)
            if outgoing.socket is not None:
                self._send(asked.peer)
        else:
            self._match(asked)

    # Sending.

    def _call(self) -> None:
        """Goes on calling the ranks that messages are for."""
        for peer, outgoing in list(self._outgoing.items()):  # of which one may fail
            if not outgoing.queue or outgoing.socket is not None:
                continue
            try:
                if outgoing.call is None and not self._look_up(peer, outgoing):
                    continue
                assert outgoing.call is not None, "its address is known"
                outgoing.call.step(0.0)
            except (UnreachableError, WorldError) as error:
                outgoing.call = None
                self._fail_sends(
                    peer, PeerError(f"rank {self._rank(self._own)} could not send to rank {self._rank(peer)}: {error}")
                )
                continue
            found = outgoing.call.connected.pop(peer, None)
            if found is not None:
                outgoing.call.end()
                outgoing.call, outgoing.socket = None, found
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._send(peer)

    def _look_up(self, peer: int, outgoing: _Outgoing) -> bool:
        """Begins to call a rank where it has said at which address; WorldError where it has none for this host."""
        client, key = self._context.client, self._key(peer)
        try:
            if not client.call(lambda store: store.check([key])):
                return False
            there, reached, *tokens = json.loads(client.call(lambda store: store.get(key)))
        except SilentStoreError:  # no news: the timeout tells
            return False
        which = NEAR if there == machine() else FAR
        if which not in reached:
            raise WorldError(f"that host gives no address to others: {no_address()}")
        addresses = {peer: Address(*reached[which], *tokens)}
        outgoing.call = Handshakes(self._own, addresses, [], Tokens("", ""), set(), set(), self._context.secret)
        outgoing.call.open()
        return True

    def _send(self, peer: int) -> None:
        """Sends what the connection takes."""
        outgoing = self._outgoing[peer]
        assert outgoing.socket is not None, "it is connected"
        try:
            while outgoing.queue:
                asked = outgoing.queue[0]
                if not outgoing.rest:
                    header = _HEADER.pack(asked.tag, asked.num_bytes, asked.dtype.encode())
                    outgoing.rest = [memoryview(header), asked.content]
                sent = outgoing.socket.sendmsg(outgoing.rest)
                outgoing.rest = _without(outgoing.rest, sent)
                if not outgoing.rest:
                    outgoing.queue.popleft()
                    asked.finish()
        except BlockingIOError:
            self._watch_writes(peer, outgoing, is_on=True)
            return
        except OSError:
            self._lose(peer)
            return
        self._watch_writes(peer, outgoing, is_on=False)

    def _watch_writes(self, peer: int, outgoing: _Outgoing, *, is_on: bool) -> None:
        if is_on != outgoing.is_watched:
            assert outgoing.socket is not None, "it is connected"
            if is_on:
                self._selector.register(outgoing.socket, selectors.EVENT_WRITE, partial(self._send, peer))
            else:
                self._selector.unregister(outgoing.socket)
            outgoing.is_watched = is_on

    def _lose(self, peer: int) -> None:
        """Fails the messages for a rank that has closed its connection."""
        self._fail_sends(peer, self._closed_error)

    def _fail_sends(self, peer: int, why: "PeerError | Callable[[_Asked, int], PeerError]") -> None:
        outgoing = self._outgoing.pop(peer)
        if outgoing.socket is not None:
            self._watch_writes(peer, outgoing, is_on=False)
            outgoing.socket.close()
        if outgoing.call is not None:
            outgoing.call.end()
        for asked in outgoing.queue:
            asked.fail(why if isinstance(why, PeerError) else why(asked, peer))

    # Receiving.

    def _accept(self) -> None:
        self._callers.step(0.0)
        for peer, found in list(self._callers.connected.items()):
            del self._callers.connected[peer]
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            before = self._incoming.pop(peer, None)
            if before is not None:
                self._drop(peer, before)
            self._incoming[peer] = _Incoming(found)
            self._selector.register(found, selectors.EVENT_READ, partial(self._receive, peer))

    def _match(self, asked: _Asked) -> None:
        """Gives a receive the first message that is there for it, or lets it wait."""
        for peer, incoming in self._incoming.items():
            if asked.peer not in (ANY, peer):
                continue
            for frame in incoming.kept:
                if frame.tag == asked.tag:
                    incoming.kept.remove(frame)
                    frame.asked.append(asked)
                    self._deliver(frame, peer)
                    return
            frame_now = incoming.frame
            if frame_now is not None and not frame_now.asked and frame_now.tag == asked.tag:
                frame_now.asked.append(asked)
                if incoming.is_held:
                    self._take(peer, incoming)
                    self._receive(peer)
                return
        self._receives.append(asked)
        for peer, incoming in list(self._incoming.items()):
            if incoming.is_held and asked.peer in (ANY, peer):  # what it waits for may be behind
                self._take(peer, incoming)
                self._receive(peer)

    def _take(self, peer: int, incoming: _Incoming) -> None:
        """Reads the bytes of a message that was held: straight into the tensor that they are for, where they fit."""
        frame = incoming.frame
        assert frame is not None, "a message is held"
        asked = frame.asked[0] if frame.asked else None
        is_straight = asked is not None and (asked.num_bytes, asked.dtype) == (frame.num_bytes, frame.dtype)
        frame.content.append(
            asked.content if asked is not None and is_straight else memoryview(bytearray(frame.num_bytes))
        )
        incoming.is_held = False
        self._selector.register(incoming.socket, selectors.EVENT_READ, partial(self._receive, peer))

    def _receive(self, peer: int) -> None:
        """Reads what has come from a rank."""
        incoming = self._incoming.get(peer)
        if incoming is None:
            return
        try:
            while not incoming.is_held and self._read(peer, incoming):
                pass
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer, incoming)

    def _read(self, peer: int, incoming: _Incoming) -> bool:
        """Reads once; False where the rank has closed its connection."""
        frame = incoming.frame
        whole = memoryview(incoming.header) if frame is None else frame.content[0]
        if incoming.filled < len(whole):
            num = incoming.socket.recv_into(whole[incoming.filled :])
            if num == 0:
                self._drop(peer, incoming)
                return False
            incoming.filled += num
        if incoming.filled == len(whole):
            incoming.filled = 0
            if frame is None:
                self._open_frame(peer, incoming)
            else:
                incoming.frame = None
                if frame.asked:
                    self._deliver(frame, peer)
                else:
                    incoming.kept.append(frame)
        return True

    def _open_frame(self, peer: int, incoming: _Incoming) -> None:
        """Finds the receive that a message is for; without one a long message is held."""
        tag, num_bytes, dtype = _HEADER.unpack(incoming.header)
        incoming.frame = frame = _Frame(tag, num_bytes, dtype.rstrip(b"\0").decode(), [], [])
        asked = next((each for each in self._receives if each.peer in (ANY, peer) and each.tag == tag), None)
        if asked is not None:
            self._receives.remove(asked)
            frame.asked.append(asked)
        is_wanted = any(each.peer in (ANY, peer) for each in self._receives)
        self._selector.unregister(incoming.socket)
        incoming.is_held = True
        if asked is not None or is_wanted or num_bytes <= _SHORT_BYTES:
            self._take(peer, incoming)

    def _deliver(self, frame: _Frame, peer: int) -> None:
        """Ends a receive whose message is there."""
        (asked,) = frame.asked
        asked.work.source = peer
        if (asked.num_bytes, asked.dtype) != (frame.num_bytes, frame.dtype):
            asked.fail(
                MismatchError(
                    f"rank {self._rank(peer)} sent {frame.text} to rank {self._rank(self._own)}, which asked for "
                    f"{asked.num_bytes} bytes of {asked.dtype} in {asked.work.text}; send and receive tensors of one "
                    "dtype and size"
                )
            )
            return
        if frame.content[0] is not asked.content:
            asked.content[:] = frame.content[0]
        asked.finish()

    def _drop(self, peer: int, incoming: _Incoming) -> None:
        """Fails the receives from a rank that has closed its connection."""
        if not incoming.is_held:
            self._selector.unregister(incoming.socket)
        incoming.socket.close()
        self._incoming.pop(peer, None)
        lost = [asked for asked in self._receives if asked.peer == peer]
        self._receives = [asked for asked in self._receives if asked.peer != peer]
        for asked in (*(incoming.frame.asked if incoming.frame else ()), *lost):
            asked.fail(self._closed_error(asked, peer))

    # Failures.

    def _rank(self, place: int) -> int:
        return self._ranks[place]

    def _closed_error(self, asked: _Asked, peer: int) -> PeerError:
        return PeerError(
            f"rank {self._rank(peer)} closed its connection while rank {self._rank(self._own)} waited for it in "
            f"{asked.work.text}; it has failed or left"
        )

    def _awaited(self, asked: _Asked) -> str:
        others = [rank for place, rank in enumerate(self._ranks) if place != self._own]
        return f"one of ranks {others}" if asked.peer == ANY else f"rank {self._rank(asked.peer)}"

    def _look(self) -> None:
        """Ends what is late, and once a second what is for ranks that have failed."""
        now = time.monotonic()
        for asked in self._pending():
            if asked.deadline <= now:
                self._end(
                    asked,
                    PeerError(
                        f"rank {self._rank(self._own)} waited {asked.limit_s:g} s for {self._awaited(asked)} in "
                        f"{asked.work.text} and got no answer; the timeout is {asked.limit_s:g} s (the process "
                        "group's)"
                    ),
                )
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        pending = self._pending()
        if not pending:
            return
        others = [rank for place, rank in enumerate(self._ranks) if place != self._own]
        waited = others if any(asked.peer == ANY for asked in pending) else [self._rank(each.peer) for each in pending]
        try:
            failed = self._context.watch.failure(self._context.key, sorted(set(waited)))
        except RuntimeError:  # the store's process has gone: connections and timeouts tell
            return
        if failed is None:
            return
        for asked in pending:
            if asked.peer == ANY or self._rank(asked.peer) == failed.rank:
                self._end(
                    asked,
                    PeerError(
                        f"rank {failed.rank} failed while rank {self._rank(self._own)} waited for "
                        f"{self._awaited(asked)} in {asked.work.text}: {failed.error}"
                    ),
                )

    def _end(self, asked: _Asked, error: PeerError) -> None:
        """Ends one message without its peer."""
        if asked in self._receives:
            self._receives.remove(asked)
            asked.fail(error)
            return
        for peer, incoming in list(self._incoming.items()):
            if incoming.frame is not None and asked in incoming.frame.asked:  # half of it is here
                incoming.frame.asked.remove(asked)
                asked.fail(error)
                self._drop(peer, incoming)
                return
        outgoing = self._outgoing.get(asked.peer)
        if outgoing is None or asked not in outgoing.queue:
            return
        if outgoing.queue[0] is asked and outgoing.rest:  # half of it has gone
            self._fail_sends(asked.peer, error)
            return
        outgoing.queue.remove(asked)
        asked.fail(error)

    def _fail_all(self, error: BaseException) -> None:
        while self._new:
            self._new.popleft()[0].fail(error)
        for asked in self._pending():
            asked.fail(error)
        self._receives.clear()
        for outgoing in self._outgoing.values():
            outgoing.queue.clear()

    # Its end.

    def close(self) -> None:
        """Ends the messages with their world."""
        self.abort()

    def abort(self) -> None:
        """Ends the messages; what is under way fails."""
        self._closed = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_LOOK_S)

    def end_with_process(self, limit_s: float) -> None:
        """Ends the messages with the process."""
        self.abort()

    def close_sockets(self) -> None:
        """Closes what this process has of all connections."""
        self._callers.end()
        self._callers.close()
        for outgoing in self._outgoing.values():
            if outgoing.call is not None:
                outgoing.call.close()
        connected = [each.socket for each in self._outgoing.values()]
        connected += [each.socket for each in self._incoming.values()]
        for each in (*connected, *self._listeners.values(), self._waking, self._woken):
            if each is not None:
                each.close()
        self._selector.close()


def _without(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The rest of some bytes in parts, of which the first are over.

    >>> [bytes(each) for each in _without([memoryview(b"ab"), memoryview(b"cde")], 3)]
    [b'de']
    """
    left = []
    for part in parts:
        if num_bytes < len(part):
            left.append(part[num_bytes:])
        num_bytes = max(num_bytes - len(part), 0)
    return left
