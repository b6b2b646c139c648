"""Handshakes over new TCP connections: a rank calls others and is called, side by side, until all it needs are there.

A caller shows the token of the rank that it calls and its own place, 20 bytes, and is answered with another token; both
are known from the store, to whoever may read it. Ranks that share a secret draw a number each, too, and prove to each
other that they know the secret: the called rank in its answer, the caller behind it. Strangers may connect, be silent,
slow or talk nonsense: they cost a descriptor each, of which there is a bound, and no time.
"""

import errno
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tritondt.comm.secret import NONCE_BYTES, PROOF_BYTES, Connecting, Secret, draw

_PLACE_BYTES, TOKEN_BYTES = 4, 16
_GREETING_BYTES = TOKEN_BYTES + _PLACE_BYTES
# Callers that have not shown a token: more than these, and the one that has waited longest has to call again.
_MAX_PENDING = 256
# How long a rank that cannot be reached is called again: its host may not know the way yet.
_PERSISTENCE_S, _PAUSE_S = 5.0, 0.1
_INTERVAL_S = 0.1


class Tokens(NamedTuple):
    """The token that a rank wants to see, and the one that it answers with, as hexadecimal digits."""

    token: str
    answer: str


class Address(NamedTuple):
    """The address at which a rank listens, and its tokens."""

    host: str
    port: int
    token: str
    answer: str


class UnreachableError(Exception):
    """The rank at `place` cannot be reached at its address."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


@dataclass(slots=True, eq=False)
class _Exchange:
    """One end of a new connection: bytes that came, of `num_bytes`; `place` is the other rank's, -1 before it is known.

    `nonce` is this end's; `connecting` is there where a caller has yet to prove itself.
    """

    socket: socket.socket
    num_bytes: int
    place: int = -1
    is_connected: bool = True
    content: bytearray = field(default_factory=bytearray)
    nonce: bytes = b""
    connecting: Connecting | None = None


class Handshakes:
    """Connections of the rank at `place` to those whose `addresses` it calls, and from `callers`."""

    def __init__(
        self,
        place: int,
        addresses: Mapping[int, Address],
        listeners: Sequence[socket.socket],
        own: Tokens,
        callers: Set[int],
        welcome: Set[int],
        secret: Secret | None = None,
    ) -> None:
        """`own` are the tokens that callers were given; `welcome` may call as well, and are not waited for.

        With a `secret` both ends of each connection prove that they know it.
        """
        self.connected: dict[int, socket.socket] = {}
        self._place, self._addresses, self._own = place, addresses, own
        self._expected, self._welcome, self._secret = callers, welcome | callers, secret
        self._nonce_bytes = 0 if secret is None else NONCE_BYTES
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._pending: dict[socket.socket, _Exchange] = {}  # the oldest first
        self._calls: dict[socket.socket, _Exchange] = {}
        self._waiting = dict.fromkeys(addresses, 0.0)  # ranks to call, from when on
        self._first_called: dict[int, float] = {}

    @property
    def missing(self) -> list[int]:
        """Places of the ranks that are not connected."""
        return sorted((self._expected | self._addresses.keys()) - self.connected.keys())

    def run(self, deadline: float, look: Callable[[Sequence[int]], object]) -> bool:
        """Connects until nobody is missing; False at `deadline`, by time.monotonic. Tells `look` ten times a second.

        Raises UnreachableError. Only `connected` sockets stay open.
        """
        next_look = time.monotonic() + _INTERVAL_S
        try:
            self.open()
            while missing := self.missing:
                now = time.monotonic()
                if now >= deadline:
                    return False
                if now >= next_look:
                    look(missing)
                    next_look = time.monotonic() + _INTERVAL_S
                self.step(min(deadline - now, _PAUSE_S))
            return True
        finally:
            self.end()

    def open(self) -> None:
        """Lets those who call be heard, from `step` on."""
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def step(self, limit_s: float) -> None:
        """Goes on with what can go on within so many seconds. Raises UnreachableError."""
        self._call_waiting(time.monotonic())
        for key, _ in self._selector.select(limit_s):
            self._serve(key.fileobj)  # type: ignore[arg-type]  # sockets alone are registered

    def fileno(self) -> int:
        """The descriptor that can be read where `step` has something to go on with, but for calling again."""
        return self._selector.fileno()

    def end(self) -> None:
        """Ends what is unfinished."""
        self._selector.close()
        self._close_unfinished()

    def close(self) -> None:
        """Closes all sockets, of what runs in another thread, or did in the process that this one was forked from."""
        self._close_unfinished()
        for found in list(self.connected.values()):
            found.close()

    def _close_unfinished(self) -> None:
        for exchange in [*self._pending.values(), *self._calls.values()]:
            exchange.socket.close()

    def _serve(self, ready: socket.socket) -> None:
        if ready in self._listeners:
            self._accept(ready)
        elif ready in self._pending:
            self._hear(self._pending[ready])
        elif ready in self._calls:  # else it was dropped for another one that was ready, too
            self._go_on(self._calls[ready])

    def _accept(self, listener: socket.socket) -> None:
        try:
            found, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it has left already
            return
        found.setblocking(False)
        self._pending[found] = _Exchange(found, _GREETING_BYTES + self._nonce_bytes)
        self._selector.register(found, selectors.EVENT_READ)
        if len(self._pending) > _MAX_PENDING:
            self._drop(next(iter(self._pending)))

    def _drop(self, found: socket.socket) -> None:
        self._forget(found)
        found.close()

    def _forget(self, found: socket.socket) -> None:
        self._selector.unregister(found)
        self._pending.pop(found, None)
        self._calls.pop(found, None)

    def _hear(self, caller: _Exchange) -> None:
        """Reads a caller's greeting, as far as it has come, answers a whole one that shows the token, and its proof."""
        if not _read(caller):
            self._drop(caller.socket)
            return
        if len(caller.content) < caller.num_bytes:  # how much of a token is right is not to be told
            return
        is_right = self._answer(caller) if caller.place < 0 else self._is_proven(caller)
        if not is_right:
            self._drop(caller.socket)
        elif caller.connecting is None:
            self._forget(caller.socket)
            before = self.connected.pop(caller.place, None)
            if before is not None:  # it has called again, and uses the latest
                before.close()
            self.connected[caller.place] = caller.socket

    def _answer(self, caller: _Exchange) -> bool:
        """Answers a caller that shows the token and a place that may call; False for any other."""
        token, place = bytes(caller.content[:TOKEN_BYTES]), caller.content[TOKEN_BYTES:_GREETING_BYTES]
        caller.place = int.from_bytes(place, "little")
        if not secrets.compare_digest(token, bytes.fromhex(self._own.token)) or caller.place not in self._welcome:
            return False
        answer = bytes.fromhex(self._own.answer)
        if self._secret is not None:
            caller.nonce = draw()
            caller.connecting = Connecting(
                caller.place,
                self._place,
                self._own.token,
                _address_of(caller.socket.getsockname()),
                bytes(caller.content[_GREETING_BYTES:]),
                caller.nonce,
            )
            answer += caller.nonce + self._secret.proof("called", caller.connecting)
            caller.content, caller.num_bytes = bytearray(), PROOF_BYTES
        return _send(caller.socket, answer)

    def _is_proven(self, caller: _Exchange) -> bool:
        """Whether a caller that was answered has shown that it knows the secret."""
        assert self._secret is not None, "who is asked for a proof was asked with a secret"
        assert caller.connecting is not None, "and has been answered"
        connecting, caller.connecting = caller.connecting, None
        return self._secret.is_proof(bytes(caller.content), "caller", connecting)

    def _call_waiting(self, now: float) -> None:
        for place in [place for place, start in self._waiting.items() if start <= now]:
            del self._waiting[place]
            self._first_called.setdefault(place, now)
            self._call(place)

    def _call(self, place: int) -> None:
        address = self._addresses[place]
        made = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        num_bytes = TOKEN_BYTES if self._secret is None else TOKEN_BYTES + NONCE_BYTES + PROOF_BYTES
        self._calls[made] = call = _Exchange(made, num_bytes, place, is_connected=False)
        self._selector.register(made, selectors.EVENT_WRITE)
        error = made.connect_ex((address.host, address.port))
        if error not in (0, errno.EINPROGRESS):
            self._call_again(call, error)

    def _go_on(self, call: _Exchange) -> None:
        """Greets the rank that was called, once it is connected, and then reads its answer."""
        address = self._addresses[call.place]
        if not call.is_connected:
            error = call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            call.nonce = b"" if self._secret is None else draw()
            greeting = bytes.fromhex(address.token) + self._place.to_bytes(_PLACE_BYTES, "little") + call.nonce
            if error != 0 or not _send(call.socket, greeting):
                self._call_again(call, error)
                return
            call.is_connected = True
            self._selector.modify(call.socket, selectors.EVENT_READ)
            return
        if not _read(call):  # its callers were too many
            self._call_again(call, 0)
        elif not bytes.fromhex(address.answer).startswith(call.content[:TOKEN_BYTES]):
            self._drop(call.socket)
            raise UnreachableError(call.place, f"somebody else answers at {address.host}, port {address.port}")
        elif len(call.content) == call.num_bytes:
            self._prove(call, address)

    def _prove(self, call: _Exchange, address: Address) -> None:
        """Ends a call that was answered, with a secret by proofs of both ends."""
        if self._secret is not None:
            connecting = Connecting(
                self._place,
                call.place,
                address.token,
                _address_of(call.socket.getpeername()),
                call.nonce,
                bytes(call.content[TOKEN_BYTES:-PROOF_BYTES]),
            )
            if not self._secret.is_proof(bytes(call.content[-PROOF_BYTES:]), "called", connecting):
                self._drop(call.socket)
                raise UnreachableError(
                    call.place,
                    f"whoever answers at {address.host}, port {address.port}, does not know the secret of this job "
                    "(TRITONDT_SECRET)",
                )
            if not _send(call.socket, self._secret.proof("caller", connecting)):
                self._call_again(call, 0)
                return
        self._forget(call.socket)
        self.connected[call.place] = call.socket

    def _call_again(self, call: _Exchange, error: int) -> None:
        """Calls a rank again later: for some seconds where it could not be reached, else for as long as it takes."""
        self._drop(call.socket)
        now, address = time.monotonic(), self._addresses[call.place]
        # ETIMEDOUT is of a queue of callers that is full: the rank has yet to come to this exchange.
        if error not in (0, errno.ETIMEDOUT) and now - self._first_called[call.place] > _PERSISTENCE_S:
            reason = f"[Errno {error}] {errno.errorcode.get(error, 'error')}"
            raise UnreachableError(call.place, f"{reason} at {address.host}, port {address.port}")
        self._waiting[call.place] = now + _PAUSE_S


def _address_of(name: tuple[Any, ...]) -> tuple[str, int]:
    """Host and port of what a socket says of an end; of IPv6 it says more."""
    return name[0], name[1]


def _read(exchange: _Exchange) -> bool:
    """Reads what has come of an exchange's bytes, never more; False where its peer has left."""
    try:
        found = exchange.socket.recv(exchange.num_bytes - len(exchange.content))
    except BlockingIOError:
        return True
    except OSError:
        return False
    exchange.content += found
    return bool(found)


def _send(target: socket.socket, content: bytes) -> bool:
    """Sends so few bytes that a new connection takes them at once; False where it has broken."""
    try:
        return target.send(content) == len(content)
    except OSError:
        return False
