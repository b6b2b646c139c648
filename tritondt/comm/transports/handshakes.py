"""Handshakes over new TCP connections: a rank calls others and is called, side by side, until all it needs are there.

A caller shows the token of the rank that it calls and its own place, 20 bytes, and is answered with another token; both
are known from the store, to whoever may read it. Ranks that share a secret draw a number each, too, and prove to each
other that they know the secret: the called rank in its answer, the caller behind it. Strangers may connect, be silent,
slow or talk nonsense: they cost a descriptor each, of which there is a bound, and no time.
"""

import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from tritondt.comm.greeter import Connection, Greeter, greeted_by, greeting, greeting_bytes
from tritondt.comm.secret import NONCE_BYTES, PROOF_BYTES, Connecting, Secret, draw
from tritondt.comm.transports.interfaces import way_to
from tritondt.errors import RefusalError

TOKEN_BYTES = 16
_GREETING_BYTES = greeting_bytes(TOKEN_BYTES)
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
class _Handshake(Connection):
    """A new connection by TCP. `nonce` is this end's; `connecting` is there where a caller has yet to prove itself."""

    is_connected: bool = True
    nonce: bytes = b""
    connecting: Connecting | None = None


class Handshakes(Greeter[_Handshake]):
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
        left: "Handshakes | None" = None,
    ) -> None:
        """`own` are the tokens that callers were given; `welcome` may call as well, and are not waited for.

        With a `secret` both ends of each connection prove that they know it. Connections that ranks have begun with
        each other in `left`, which has not come to its end, go on here.
        """
        super().__init__(listeners, addresses, _PAUSE_S, left)
        self.connected: dict[int, socket.socket] = {} if left is None else left.connected
        self._place, self._wanted, self._own = place, addresses.keys(), own
        self._expected, self._welcome, self._secret = callers, welcome | callers, secret
        self._nonce_bytes = 0 if secret is None else NONCE_BYTES
        self._addresses: dict[int, Address] = {} if left is None else left._addresses
        self._addresses.update(addresses)
        self._first_called: dict[int, float] = {} if left is None else left._first_called
        for place in self.connected.keys() & self._waiting.keys():
            del self._waiting[place]

    # A rank that took no part in an exchange goes on with these in the next.
    _keeping = RefusalError

    def _events_of(self, call: _Handshake) -> int:
        return selectors.EVENT_READ if call.is_connected else selectors.EVENT_WRITE

    @property
    def missing(self) -> list[int]:
        """Places of the ranks that are not connected."""
        return sorted((self._expected | self._wanted) - self.connected.keys())

    def connect(self, deadline: float, look: Callable[[Sequence[int]], object]) -> bool:
        """Connects until nobody is missing; False at `deadline`, by time.monotonic. Tells `look` ten times a second.

        Raises UnreachableError. Only `connected` sockets stay open, and all where `look` raises RefusalError.
        """
        return self.run(deadline, look, _INTERVAL_S)

    def close(self) -> None:
        """Closes all sockets, of what runs in another thread, or did in the process that this one was forked from."""
        self._close_unfinished()
        for found in list(self.connected.values()):
            found.close()

    def _welcomed(self, found: socket.socket) -> _Handshake:
        return _Handshake(found, _GREETING_BYTES + self._nonce_bytes)

    def _hear(self, caller: _Handshake) -> bool:
        """Answers a greeting that shows the token, and a proof behind it."""
        if not (self._answer(caller) if caller.place < 0 else self._is_proven(caller)):
            return False
        if caller.connecting is None:
            self._forget(caller)
            before = self.connected.pop(caller.place, None)
            if before is not None:  # it has called again, and uses the latest
                before.close()
            self.connected[caller.place] = caller.socket
        return True

    def _answer(self, caller: _Handshake) -> bool:
        """Answers a caller that shows the token and a place that may call; False for any other."""
        place = greeted_by(bytes(caller.content), bytes.fromhex(self._own.token))
        if place is None or place not in self._welcome:
            return False
        caller.place = place
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
        return caller.send(answer)

    def _is_proven(self, caller: _Handshake) -> bool:
        """Whether a caller that was answered has shown that it knows the secret."""
        assert self._secret is not None, "who is asked for a proof was asked with a secret"
        assert caller.connecting is not None, "and has been answered"
        connecting, caller.connecting = caller.connecting, None
        return self._secret.is_proof(bytes(caller.content), "caller", connecting)

    def _call(self, place: int) -> None:
        self._first_called.setdefault(place, time.monotonic())
        address = self._addresses[place]
        made = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        num_bytes = TOKEN_BYTES if self._secret is None else TOKEN_BYTES + NONCE_BYTES + PROOF_BYTES
        call = _Handshake(made, num_bytes, place, is_connected=False)
        self._began(call, selectors.EVENT_WRITE)
        error = made.connect_ex((address.host, address.port))
        if error not in (0, errno.EINPROGRESS):
            self._call_later(call, error)

    def _go_on(self, call: _Handshake) -> None:
        """Greets the rank that was called, once it is connected, and then reads its answer."""
        address = self._addresses[call.place]
        if not call.is_connected:
            error = call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            call.nonce = b"" if self._secret is None else draw()
            if error != 0 or not call.send(greeting(bytes.fromhex(address.token), self._place) + call.nonce):
                self._call_later(call, error)
                return
            call.is_connected = True
            self._selector.modify(call.socket, selectors.EVENT_READ)
            return
        if not call.read():  # its callers were too many
            self._call_later(call, 0)
        elif not bytes.fromhex(address.answer).startswith(call.content[:TOKEN_BYTES]):
            self._drop(call)
            raise UnreachableError(call.place, f"somebody else answers at {address.host}, port {address.port}")
        elif call.is_whole:
            self._prove(call, address)

    def _prove(self, call: _Handshake, address: Address) -> None:
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
                self._drop(call)
                raise UnreachableError(
                    call.place,
                    f"whoever answers at {address.host}, port {address.port}, does not know the secret of this job "
                    "(TRITONDT_SECRET)",
                )
            if not call.send(self._secret.proof("caller", connecting)):
                self._call_later(call, 0)
                return
        self._forget(call)
        self.connected[call.place] = call.socket

    def _call_later(self, call: _Handshake, error: int) -> None:
        """Calls a rank again: for some seconds where it could not be reached, else for as long as it takes."""
        address = self._addresses[call.place]
        # ETIMEDOUT is of a queue of callers that is full: the rank has yet to come to this exchange.
        is_known = error in (0, errno.ETIMEDOUT)
        if not is_known and time.monotonic() - self._first_called[call.place] > _PERSISTENCE_S:
            self._drop(call)
            reason = f"[Errno {error}] {errno.errorcode.get(error, 'error')}"
            way = way_to(address.host)
            raise UnreachableError(call.place, f"{reason} at {address.host}, port {address.port}{way}")
        self._call_again(call)


def _address_of(name: tuple[Any, ...]) -> tuple[str, int]:
    """Host and port of what a socket says of an end; of IPv6 it says more."""
    return name[0], name[1]
