"""File descriptors that processes of one machine and one user pass to each other, over abstract Unix sockets.

An abstract socket has a name and no file, and nothing of it outlives its process. Every place calls every other one and
sends 36 bytes: the token that the called place has told, and the caller's own place. The called place answers with a
descriptor. Ranks of the job alone know a token, from the store, and both ends ask the kernel for the other's user.
Strangers may connect, be silent or talk nonsense: they cost a descriptor each, for a second, and no time.
"""

import errno
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from tritondt.comm.greeter import Connection, Greeter, greeted_by, greeting, greeting_bytes
from tritondt.errors import PeerError

_TOKEN_BYTES = 32
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
        return _Swap(self._listener, self._token, descriptor, told_by_place, place).swap(timeout_s, look)


class _Swap(Greeter[Connection]):
    """One swap under way, all in the calling thread: no call in it waits for one peer alone."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        descriptor: int,
        told_by_place: Mapping[int, Mapping[str, str]],
        place: int,
    ) -> None:
        self._told = {other: told for other, told in told_by_place.items() if other != place}
        super().__init__([listener], self._told, _PAUSE_S)
        self._token, self._descriptor, self._place = token, descriptor, place
        self._received: dict[int, int] = {}
        self._served: set[int] = set()
        self._reasons = dict.fromkeys(self._told, "has not answered")

    def swap(self, timeout_s: float, look: Callable[[], None]) -> dict[int, int]:
        """The descriptors of all others; PeerError after `timeout_s`. Nothing else stays open."""
        try:
            if not self.run(time.monotonic() + timeout_s, lambda _: look(), _PATIENCE_S):
                raise self._error(timeout_s)
            return self._received
        except BaseException:
            for descriptor in self._received.values():
                os.close(descriptor)
            raise

    @property
    def missing(self) -> list[int]:
        """Places that have not answered, or not called."""
        return sorted(place for place in self._told if place not in self._received or place not in self._served)

    def _error(self, timeout_s: float) -> PeerError:
        reasons = [
            f"{place} ({self._reasons[place] if place not in self._received else 'has not called'})"
            for place in self.missing
        ]
        return PeerError(
            f"place {self._place} swaps file descriptors with {len(self._told)} other places and has waited "
            f"{timeout_s:g} s; missing are {', '.join(reasons)}; every place must come within that time"
        )

    def _call(self, place: int) -> None:
        """Connects to a place and greets it, which takes no time: the kernel answers, and keeps so few bytes."""
        told = self._told[place]
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        call = Connection(made, 0, place)
        self._began(call, selectors.EVENT_READ)
        try:
            made.connect(_address(told["name"]))
            if not _is_of_this_user(made):
                self._call_later(call, "is of another user")
                return
            made.send(greeting(bytes.fromhex(told["token"]), self._place))
        except OSError as error:  # its queue of callers may be full, it may be gone: both are told at the end
            self._call_later(call, str(error))

    def _call_later(self, call: Connection, reason: str) -> None:
        self._reasons[call.place] = reason
        self._call_again(call)

    def _go_on(self, call: Connection) -> None:
        """Receives the descriptor of a place that was called."""
        try:
            descriptor = _received(call.socket)
        except BlockingIOError:
            return
        except ConnectionError as error:
            self._call_later(call, str(error))
            return
        if descriptor is None:
            self._call_later(call, "has hung up")
            return
        self._received[call.place] = descriptor
        self._drop(call)

    def _welcomed(self, found: socket.socket) -> Connection | None:
        if not _is_of_this_user(found):
            return None
        return Connection(found, greeting_bytes(_TOKEN_BYTES), until=time.monotonic() + _PATIENCE_S)

    def _hear(self, caller: Connection) -> bool:
        """Sends this place's descriptor to one that shows the token, once to each place; hangs up on everybody."""
        place = greeted_by(bytes(caller.content), self._token)
        if place in self._told and place not in self._served:
            try:
                socket.send_fds(caller.socket, [b"\0"], [self._descriptor])
            except ConnectionError:  # it has left, and may call again
                return False
            self._served.add(place)
        return False


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
