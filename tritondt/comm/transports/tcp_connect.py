"""TCP connections between all pairs of ranks of a communicator, which exchange their addresses through the store.

First all ranks say on which machine they are. Then each listens where those that call it come from: at the loopback
interface for ranks of its own machine, at one outer address for others, nowhere for nobody. Every rank calls those
before it and is called by those behind it.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from tritondt import environment
from tritondt.comm.store.client import PATIENCE_S, SilentStoreError, StoreClient
from tritondt.comm.transports.handshakes import TOKEN_BYTES, Address, Handshakes, Tokens, UnreachableError
from tritondt.comm.transports.interfaces import LOOPBACK, address_towards, machine, no_address, outer_addresses
from tritondt.errors import PeerError, WorldError

Result = TypeVar("Result")

# How often a rank looks what others have said: often at first, when all come at once.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_MIN_BACKLOG = 128
# Where a rank listens for those of its own machine, and for others.
_NEAR, _FAR = "near", "far"


def connect(
    client: StoreClient,
    key: str,
    ranks: Sequence[int],
    place: int,
    timeout: timedelta,
    look: Callable[[], object] = lambda: None,
) -> list[socket.socket | None]:
    """Sockets to all `ranks`, None at this rank's own `place`; a collective call.

    The ranks find each other in the store under `key`. All of it takes `timeout` at most, if the store stops, too.
    `look` is called once a second, and may raise what ends the waiting. Raises PeerError for ranks that do not come or
    cannot be reached, WorldError where no address can be given to others.
    """
    connecting = _Connecting(client, key, ranks, place, time.monotonic() + timeout.total_seconds(), timeout, look)
    try:
        return connecting.sockets()
    except (OSError, RuntimeError) as error:
        if isinstance(error, PeerError | WorldError):
            raise
        raise PeerError(f"rank {ranks[place]} could not connect to ranks {list(ranks)}: {error}") from error


@dataclass(frozen=True)
class _Connecting:
    """One rank's part in connecting all `ranks`, until `deadline`."""

    client: StoreClient
    key: str
    ranks: Sequence[int]
    place: int
    deadline: float
    timeout: timedelta
    look: Callable[[], object]

    def sockets(self) -> list[socket.socket | None]:
        """Connected sockets, non-blocking, by place."""
        others = [other for other in range(len(self.ranks)) if other != self.place]
        own_machine, guess = machine(), _guessed_address()
        self._tell("machine", json.dumps([own_machine, guess]))
        machines = dict(zip(others, (json.loads(text) for text in self._asked("machine", others)), strict=True))
        distant = {other: guessed for other, (found, guessed) in machines.items() if found != own_machine}
        callers = [other for other in others if other > self.place]
        called = [other for other in others if other < self.place]
        # Whoever has no address for other machines says so, called from there or not.
        outer = self._outer_address(distant, guess) if distant else ""
        token, answer = secrets.token_hex(TOKEN_BYTES), secrets.token_hex(TOKEN_BYTES)
        with ExitStack() as stack:
            listeners = {
                which: stack.enter_context(self._listener(host))
                for which, host, is_needed in (
                    (_NEAR, LOOPBACK, any(caller not in distant for caller in callers)),
                    (_FAR, outer, any(caller in distant for caller in callers)),
                )
                if is_needed
            }
            reached = {which: listener.getsockname()[:2] for which, listener in listeners.items()}
            self._tell("address", json.dumps([reached, token, answer]))
            addresses = {}
            for other, text in zip(called, self._asked("address", called), strict=True):
                theirs, *tokens = json.loads(text)
                addresses[other] = Address(*theirs[_FAR if other in distant else _NEAR], *tokens)
            own = Tokens(token, answer)
            return self._shake_hands(Handshakes(self.place, addresses, list(listeners.values()), own, callers))

    def _listener(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=max(len(self.ranks), _MIN_BACKLOG))

    def _outer_address(self, distant: dict[int, str], guess: str) -> str:
        """This host's address for `distant` ranks, given the ones at which they believe to be reached."""
        allowed = outer_addresses()
        if not allowed:
            raise WorldError(
                f"rank {self.ranks[self.place]} cannot be reached by ranks "
                f"{[self.ranks[other] for other in sorted(distant)]} of other hosts: {no_address()}; "
                "TRITONDT_SOCKET_IFNAME names the interface to use"
            )
        return guess or address_towards(filter(None, distant.values()), allowed) or allowed[0]

    def _asked(self, what: str, others: Sequence[int]) -> list[str]:
        """What `others` have set in the store, in their order, when all have; PeerError where some do not in time."""
        keys, pause = [self._named(what, other) for other in others], _FIRST_PAUSE_S
        next_look = time.monotonic() + 1.0
        while keys and not self._call(lambda store: store.check(keys)):
            if time.monotonic() >= self.deadline:
                there = {key: self._call(lambda store, key=key: store.check([key])) for key in keys}  # type: ignore[misc]
                raise self._late(other for other, key in zip(others, keys, strict=True) if not there[key])
            if time.monotonic() >= next_look:
                self.look()
                next_look = time.monotonic() + 1.0
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return [text.decode() for text in self._call(lambda store: [store.get(key) for key in keys])]

    def _tell(self, what: str, text: str) -> None:
        """Says something of this rank in the store."""
        self._call(lambda store: store.set(self._named(what, self.place), text))

    def _named(self, what: str, place: int) -> str:
        return f"{self.key}/{what}/{place}"

    def _call(self, function: Callable[[dist.Store], Result]) -> Result:
        """The result of `function` by the deadline; PeerError where the store has not answered by then."""
        try:
            return self.client.call(function, max(self.deadline - time.monotonic(), PATIENCE_S))
        except SilentStoreError as error:
            late = self._late(place for place in range(len(self.ranks)) if place != self.place)
            raise PeerError(f"{late}, {self.client.silence(error)}") from error

    def _shake_hands(self, handshakes: Handshakes) -> list[socket.socket | None]:
        try:
            if not handshakes.run(self.deadline, self.look):
                raise self._late(handshakes.missing)
            for found in handshakes.connected.values():
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException as error:
            for found in handshakes.connected.values():
                found.close()
            if isinstance(error, UnreachableError):
                rank, other = self.ranks[self.place], self.ranks[error.place]
                raise PeerError(f"rank {rank} could not connect to rank {other}: {error}") from error
            raise
        return [handshakes.connected.get(other) for other in range(len(self.ranks))]

    def _late(self, missing: Iterable[int]) -> PeerError:
        named = [self.ranks[other] for other in missing]
        return PeerError(
            f"rank {self.ranks[self.place]} waited {self.timeout.total_seconds():g} s for ranks {named} to connect"
        )


def _guessed_address() -> str:
    """The address of the route to the job's master, empty where that says nothing: it is on this host, or unknown."""
    master = environment.master_address()
    names = (socket.gethostname(),) if master is None else (master,)
    return address_towards(names, outer_addresses()) or ""
