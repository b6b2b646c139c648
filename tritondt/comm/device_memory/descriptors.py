"""File descriptors that processes of one machine and one user pass to each other, over abstract Unix sockets.

Such a socket has a name and no file, and nothing of it outlives its process. Every place calls every other one, shows
the token that this one has told, and its own place, 36 bytes; it is answered with a descriptor. A token is known from
the store, to ranks of the job alone, and both ends ask the kernel for the other's user. Strangers may connect, be
silent or talk nonsense: they cost a descriptor each, for a second, and no time.
"""

import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from tritondt.errors import PeerError

_TOKEN_BYTES, _PLACE_BYTES = 32, 4
_GREETING_BYTES = _TOKEN_BYTES + _PLACE_BYTES
_CREDENTIALS = struct.Struct("=iII")  # of SO_PEERCRED: process, user, group
_DESCRIPTOR = struct.Struct("=i")
# A caller writes its greeting as soon as it is connected; one that has not after so long is a stranger.
_PATIENCE_S = 1.0
# How soon a place is called again that could not be reached, or has hung up.
_PAUSE_S = 0.05


def _find_nothing() -> None:
    """Nobody is known to have failed."""


class DescriptorSwap:
    """One place's part in a swap of file descriptors: a listening socket until it is closed, a context manager.

    `told` is what others must know to call, fit for JSON: they read it from a store that only the job's ranks reach.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> file = os.memfd_create("example")
    >>> with DescriptorSwap() as first, DescriptorSwap() as second, ThreadPoolExecutor() as pool:
    ...     told = {0: first.told, 1: second.told}
    ...     later = pool.submit(second.swap, file, told, 1, 20.0)
    ...     mine = first.swap(file, told, 0, 20.0)
    ...     theirs = later.result()
    >>> os.path.sameopenfile(file, mine[1]), os.path.sameopenfile(file, theirs[0])
    (True, True)
    >>> for descriptor in (file, mine[1], theirs[0]):
    ...     os.close(descriptor)
    """

    def __init__(self) -> None:
        self._name, self._token = f"tritondt-{secrets.token_hex(16)}", secrets.token_bytes(_TOKEN_BYTES)
        self.told = {"name": self._name, "token": self._token.hex()}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(_address(self._name))
            self._listener.listen()
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise

    def __enter__(self) -> "DescriptorSwap":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The end of the listening socket; a second call does nothing."""
        self._listener.close()

    def swap(
        self,
        descriptor: int,
        told_by_place: Mapping[int, Mapping[str, str]],
        place: int,
        timeout_s: float,
        look: Callable[[], None] = _find_nothing,
    ) -> dict[int, int]:
        """Descriptors of all other places' files by place, which the caller closes; `descriptor` stays the caller's.

        A collective call of all places in `told_by_place`, among them the own one, `place`. Returns when this place has
        all descriptors, and all others have been sent this place's. Raises PeerError, with all of them closed, where
        places are missing after `timeout_s` seconds; `look` is called each second, and may raise what is known before.
        """
        return _Swap(self._listener, self._token, descriptor, told_by_place, place).run(timeout_s, look)


@dataclass(slots=True, eq=False)
class _Caller:
    """Somebody who has connected: what came of the greeting, which is waited for `until` a time."""

    socket: socket.socket
    until: float
    content: bytearray = field(default_factory=bytearray)


class _Swap:
    """One swap under way, all in the calling thread: no call in it waits for one peer alone."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        descriptor: int,
        told_by_place: Mapping[int, Mapping[str, str]],
        place: int,
    ) -> None:
        self._listener, self._token, self._descriptor, self._place = listener, token, descriptor, place
        self._told = {other: told for other, told in told_by_place.items() if other != place}
        self._received: dict[int, int] = {}
        self._served: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._callers: dict[socket.socket, _Caller] = {}
        self._calls: dict[socket.socket, int] = {}
        self._waiting = dict.fromkeys(self._told, 0.0)  # places to call, from when on
        self._reasons = dict.fromkeys(self._told, "has not answered")

    def run(self, timeout_s: float, look: Callable[[], None]) -> dict[int, int]:
        """The descriptors of all others; PeerError after `timeout_s`. Nothing else stays open."""
        deadline, next_look = time.monotonic() + timeout_s, time.monotonic() + _PATIENCE_S
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while missing := self._missing():
                now = time.monotonic()
                if now >= deadline:
                    raise self._error(missing, timeout_s)
                if now >= next_look:
                    look()
                    next_look = now + _PATIENCE_S
                self._call_waiting(now)
                self._drop_silent(now)
                for key, _ in self._selector.select(min(deadline - now, _PAUSE_S)):
                    self._serve(key.fileobj)  # type: ignore[arg-type]  # sockets alone are registered
            return self._received
        except BaseException:
            for descriptor in self._received.values():
                os.close(descriptor)
            raise
        finally:
            self._selector.close()
            for found in (*self._callers, *self._calls):
                found.close()

    def _missing(self) -> list[int]:
        """Places that have not answered, or not called."""
        return sorted(place for place in self._told if place not in self._received or place not in self._served)

    def _error(self, missing: list[int], timeout_s: float) -> PeerError:
        reasons = [
            f"{place} ({self._reasons[place] if place not in self._received else 'has not called'})"
            for place in missing
        ]
        return PeerError(
            f"place {self._place} swaps file descriptors with {len(self._told)} other places and has waited "
            f"{timeout_s:g} s; missing are {', '.join(reasons)}; every place must come within that time"
        )

    def _serve(self, ready: socket.socket) -> None:
        if ready is self._listener:
            self._accept()
        elif ready in self._callers:
            self._hear(self._callers[ready])
        else:
            self._take_answer(ready, self._calls[ready])

    def _call_waiting(self, now: float) -> None:
        for place in [place for place, start in self._waiting.items() if start <= now]:
            del self._waiting[place]
            self._call(place)

    def _call(self, place: int) -> None:
        """Connects to a place and greets it, which takes no time: the kernel answers, and keeps so few bytes."""
        told = self._told[place]
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        self._calls[made] = place
        self._selector.register(made, selectors.EVENT_READ)
        try:
            made.connect(_address(told["name"]))
            if not _is_of_this_user(made):
                self._call_again(made, "is of another user")
                return
            made.send(bytes.fromhex(told["token"]) + self._place.to_bytes(_PLACE_BYTES, "little"))
        except OSError as error:  # its queue of callers may be full, it may be gone: both are told at the end
            self._call_again(made, str(error))

    def _call_again(self, call: socket.socket, reason: str) -> None:
        place = self._calls.pop(call)
        self._hang_up(call)
        self._reasons[place] = reason
        self._waiting[place] = time.monotonic() + _PAUSE_S

    def _take_answer(self, call: socket.socket, place: int) -> None:
        """Receives the descriptor of a place that was called."""
        try:
            descriptor = _received(call)
        except BlockingIOError:
            return
        except ConnectionError as error:
            self._call_again(call, str(error))
            return
        if descriptor is None:
            self._call_again(call, "has hung up")
            return
        del self._calls[call]
        self._received[place] = descriptor
        self._hang_up(call)

    def _accept(self) -> None:
        try:
            found, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it has left already
            return
        if not _is_of_this_user(found):
            found.close()
            return
        found.setblocking(False)
        self._callers[found] = _Caller(found, time.monotonic() + _PATIENCE_S)
        self._selector.register(found, selectors.EVENT_READ)

    def _drop_silent(self, now: float) -> None:
        for caller in [caller for caller in self._callers.values() if caller.until <= now]:
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        del self._callers[caller.socket]
        self._hang_up(caller.socket)

    def _hear(self, caller: _Caller) -> None:
        """Reads a caller's greeting, as far as it has come, and answers a whole one that shows the token."""
        try:
            found = caller.socket.recv(_GREETING_BYTES - len(caller.content))
        except BlockingIOError:
            return
        except ConnectionError:
            found = b""
        caller.content += found
        if found and len(caller.content) < _GREETING_BYTES:  # how much of a token is right is not to be told
            return
        if len(caller.content) == _GREETING_BYTES:
            self._answer(caller)
        self._drop(caller)

    def _answer(self, caller: _Caller) -> None:
        """Sends this place's descriptor to one that shows the token, once to each place."""
        token, place = bytes(caller.content[:_TOKEN_BYTES]), int.from_bytes(caller.content[_TOKEN_BYTES:], "little")
        if not hmac.compare_digest(token, self._token) or place not in self._told or place in self._served:
            return
        try:
            socket.send_fds(caller.socket, [b"\0"], [self._descriptor])
        except ConnectionError:  # it has left, and may call again
            return
        self._served.add(place)

    def _hang_up(self, found: socket.socket) -> None:
        self._selector.unregister(found)
        found.close()


def _received(call: socket.socket) -> int | None:
    """The descriptor that has come over a connection; None where the other side has hung up.

    Raises OSError where this process may not open it; it is lost then. socket.recv_fds of Python 3.11 drops its flags.
    """
    num_bytes = socket.CMSG_LEN(_DESCRIPTOR.size)
    _, ancillary, flags, _ = call.recvmsg(1, num_bytes, socket.MSG_CMSG_CLOEXEC)
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, "a file descriptor was received that this process may not open: it has too many")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptor: int = _DESCRIPTOR.unpack(content)[0]
            return descriptor
    return None


def _address(name: str) -> str:
    """The address of an abstract socket, which begins with a zero."""
    return f"\0{name}"


def _is_of_this_user(found: socket.socket) -> bool:
    """Whether this user's process is at the other end; of a listener's connections, the one that began to listen."""
    credentials = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
