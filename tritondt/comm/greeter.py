"""Ranks that greet each other over new connections: each calls others and is called, side by side, in one thread.

Strangers may connect, be silent, slow or talk nonsense: they cost a descriptor each, of which there is a bound, and no
time. No call waits for one peer alone.
"""

import math
import secrets
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# Callers that have not shown a token: more than these, and the one that has waited longest has to call again.
_MAX_CALLERS = 256
_PLACE_BYTES = 4


@dataclass(slots=True, eq=False)
class Connection:
    """One end of a new connection: bytes that came, of `num_bytes`; `place` is the other rank's, -1 before it is known.

    It is dropped at `until`, by time.monotonic, unless it has been greeted by then.
    """

    socket: socket.socket
    num_bytes: int
    place: int = -1
    until: float = math.inf
    content: bytearray = field(default_factory=bytearray)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes that are waited for have come."""
        return len(self.content) == self.num_bytes

    def read(self) -> bool:
        """Reads what has come of the bytes, never more; False where the other end has left."""
        try:
            found = self.socket.recv(self.num_bytes - len(self.content))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.content += found
        return bool(found)

    def send(self, content: bytes) -> bool:
        """Sends so few bytes that a new connection takes them at once; False where it has broken."""
        try:
            return self.socket.send(content) == len(content)
        except OSError:
            return False


Kind = TypeVar("Kind", bound=Connection)


class Greeter(ABC, Generic[Kind]):
    """Calls of this rank and to it, each a connection of some kind, until nobody is missing."""

    # Errors of `look` that leave open what is not finished, for one that goes on with it.
    _keeping: type[BaseException] | tuple[type[BaseException], ...] = ()

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        places: Iterable[int],
        pause_s: float,
        left: "Greeter[Kind] | None" = None,
    ) -> None:
        """`places` are called; those that cannot be reached again after `pause_s`.

        The connections that `left` has begun and not finished go on here.
        """
        self._listeners, self._pause_s = listeners, pause_s
        self._selector = selectors.DefaultSelector()
        self._callers: dict[socket.socket, Kind] = {} if left is None else left._callers  # the oldest first
        self._calls: dict[socket.socket, Kind] = {} if left is None else left._calls
        begun = {call.place for call in self._calls.values()}
        self._waiting = {place: 0.0 for place in places if place not in begun}  # ranks to call, from when on

    @property
    @abstractmethod
    def missing(self) -> list[int]:
        """Places of the ranks that are waited for."""

    @abstractmethod
    def _call(self, place: int) -> None:
        """Begins a call, which `_began` is told of."""

    @abstractmethod
    def _go_on(self, call: Kind) -> None:
        """Does what comes next in a call, whose socket is ready."""

    @abstractmethod
    def _welcomed(self, found: socket.socket) -> Kind | None:
        """The connection of a new caller, or None where it is none that may call."""

    @abstractmethod
    def _hear(self, caller: Kind) -> bool:
        """Answers a caller whose bytes have all come; False where it is dropped: it is wrong, or has what it wants."""

    def _events_of(self, call: Kind) -> int:
        """The events of selectors that a call waits for, which was begun before."""
        return selectors.EVENT_READ

    def run(self, deadline: float, look: Callable[[Sequence[int]], object], interval_s: float) -> bool:
        """Greets until nobody is missing; False at `deadline`, by time.monotonic. Tells `look` every `interval_s`.

        Unfinished connections are closed in the end, unless `look` raises an error that keeps them.
        """
        next_look, is_kept = time.monotonic() + interval_s, False
        try:
            self.open()
            while missing := self.missing:
                now = time.monotonic()
                if now >= deadline:
                    return False
                if now >= next_look:
                    look(missing)
                    next_look = time.monotonic() + interval_s
                self.step(min(deadline - now, self._pause_s))
            return True
        except self._keeping:
            is_kept = True
            raise
        finally:
            self._selector.close()
            if not is_kept:
                self._close_unfinished()

    def open(self) -> None:
        """Lets those who call be heard, from `step` on."""
        for found in self._callers:
            self._selector.register(found, selectors.EVENT_READ)
        for found, call in self._calls.items():
            self._selector.register(found, self._events_of(call))
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def step(self, limit_s: float) -> None:
        """Goes on with what can go on within so many seconds."""
        now = time.monotonic()
        self._call_waiting(now)
        for silent in [found for found in self._callers.values() if found.until <= now]:
            self._drop(silent)
        for key, _ in self._selector.select(limit_s):
            self._serve(key.fileobj)  # type: ignore[arg-type]  # sockets alone are registered

    def fileno(self) -> int:
        """The descriptor that can be read where `step` has something to go on with, but for calling again."""
        return self._selector.fileno()

    def end(self) -> None:
        """Ends what is unfinished."""
        self._selector.close()
        self._close_unfinished()

    def _close_unfinished(self) -> None:
        for found in (*self._callers, *self._calls):
            found.close()

    def _call_waiting(self, now: float) -> None:
        for place in [place for place, start in self._waiting.items() if start <= now]:
            del self._waiting[place]
            self._call(place)

    def _began(self, call: Kind, events: int) -> None:
        self._calls[call.socket] = call
        self._selector.register(call.socket, events)

    def _serve(self, ready: socket.socket) -> None:
        if ready in self._listeners:
            self._accept(ready)
        elif ready in self._callers:
            caller = self._callers[ready]
            # How much of a token is right is not to be told: nothing is, before all has come.
            if not caller.read() or (caller.is_whole and not self._hear(caller)):
                self._drop(caller)
        elif ready in self._calls:  # else it was dropped for another one that was ready, too
            self._go_on(self._calls[ready])

    def _accept(self, listener: socket.socket) -> None:
        try:
            found, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it has left already
            return
        found.setblocking(False)
        caller = self._welcomed(found)
        if caller is None:
            found.close()
            return
        self._callers[found] = caller
        self._selector.register(found, selectors.EVENT_READ)
        if len(self._callers) > _MAX_CALLERS:
            self._drop(next(iter(self._callers.values())))

    def _call_again(self, call: Kind) -> None:
        """Ends a call, and calls its place again a little later."""
        self._drop(call)
        self._waiting[call.place] = time.monotonic() + self._pause_s

    def _drop(self, found: Kind) -> None:
        self._forget(found)
        found.socket.close()

    def _forget(self, found: Kind) -> None:
        self._selector.unregister(found.socket)
        self._callers.pop(found.socket, None)
        self._calls.pop(found.socket, None)


def greeting(token: bytes, place: int) -> bytes:
    """The bytes that a caller shows: the token of the place that it calls, and its own place."""
    return token + place.to_bytes(_PLACE_BYTES, "little")


def greeting_bytes(token_bytes: int) -> int:
    """Bytes of a greeting with a token of so many.

    >>> greeting_bytes(16) == len(greeting(bytes(16), 3))
    True
    """
    return token_bytes + _PLACE_BYTES


def greeted_by(content: bytes, token: bytes) -> int | None:
    """The place in a greeting that shows the right token; None where the token is another one.

    >>> greeted_by(greeting(b"right", 3), b"right"), greeted_by(greeting(b"wrong", 3), b"right")
    (3, None)
    """
    end = len(token)
    if not secrets.compare_digest(content[:end], token):
        return None
    return int.from_bytes(content[end : end + _PLACE_BYTES], "little")
