"""TCP connections between ranks of a communicator, which exchange their addresses through the store.

First all ranks say on which machine they are. Then each listens where those that call it come from: at the loopback
interface for ranks of its own machine, at one outer address for others, nowhere for nobody. Two ranks connect when they
first have messages for each other, of which both know: the one behind calls the one before. Connections between all
pairs of 1,024 ranks would be more descriptors than a process may have by default.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from tritondt import environment
from tritondt.comm.secret import Secret
from tritondt.comm.store.client import PATIENCE_S, SilentStoreError, StoreClient, values
from tritondt.comm.transports.handshakes import TOKEN_BYTES, Address, Handshakes, Tokens, UnreachableError
from tritondt.comm.transports.interfaces import LOOPBACK, address_towards, machine, no_address, outer_addresses
from tritondt.errors import PeerError, WorldError

Result = TypeVar("Result")

# How often a rank looks what others have said: often at first, when all come at once.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_MIN_BACKLOG = 128
# Where a rank listens for those of its own machine, and for others.
NEAR, FAR = "near", "far"


class Attempt(NamedTuple):
    """One time that a rank waits for others: until `deadline`, by time.monotonic, `timeout_s` from its beginning.

    `look` is called now and then with the places of ranks that are missing, and may raise what ends the waiting.
    """

    deadline: float
    timeout_s: float
    look: Callable[[Sequence[int]], object]

    @classmethod
    def of(cls, timeout_s: float, look: Callable[[Sequence[int]], object] = lambda _: None) -> "Attempt":
        """An attempt that begins now."""
        return cls(time.monotonic() + timeout_s, timeout_s, look)


class Connections:
    """A rank's connections to others of a communicator, each made when both first need it.

    `sockets` are connected and non-blocking, by place; None where there is none so far, and at this rank's own.
    """

    def __init__(
        self,
        client: StoreClient,
        key: str,
        ranks: Sequence[int],
        place: int,
        attempt: Attempt,
        secret: Secret | None = None,
    ) -> None:
        """Says in the store, under `key`, where the others reach this rank; a collective call.

        With a `secret`, which all ranks have then, both ends of each connection prove that they know it.
        Raises PeerError for ranks that do not come, WorldError where no address can be given to others.
        """
        self.sockets: list[socket.socket | None] = [None] * len(ranks)
        self._ranks, self._place, self._secret = ranks, place, secret
        self._told = _Told(client, key, ranks, place)
        self._own = drawn_tokens()
        self._listeners: dict[str, socket.socket] = {}
        self._addresses: dict[int, Address] = {}
        self._handshakes: Handshakes | None = None  # while it connects
        self._lacking = {other for other in range(len(ranks)) if other != place}
        try:
            with self._named_errors():
                self._listen(attempt)
        except BaseException:
            self._close_listeners()
            raise

    def _listen(self, attempt: Attempt) -> None:
        others = sorted(self._lacking)
        own_machine, guess = machine(), _guessed_address()
        self._told.tell("machine", json.dumps([own_machine, guess]), attempt)
        machines = dict(zip(others, map(json.loads, self._told.asked("machine", others, attempt)), strict=True))
        distant = {other: guessed for other, (found, guessed) in machines.items() if found != own_machine}
        callers = [other for other in others if other > self._place]
        # Whoever has no address for other machines says so, called from there or not.
        outer = self._outer_address(distant, guess) if distant else ""
        for which, host, is_needed in (
            (NEAR, LOOPBACK, any(caller not in distant for caller in callers)),
            (FAR, outer, any(caller in distant for caller in callers)),
        ):
            if is_needed:
                self._listeners[which] = _listener(host, len(self._ranks))
        reached = {which: listener.getsockname()[:2] for which, listener in self._listeners.items()}
        self._told.tell("address", json.dumps([reached, *self._own]), attempt)
        # Now, as the store may have gone, or stopped, when they are called.
        called = [other for other in others if other < self._place]
        for other, text in zip(called, self._told.asked("address", called, attempt), strict=True):
            theirs, *tokens = json.loads(text)
            self._addresses[other] = Address(*theirs[FAR if other in distant else NEAR], *tokens)

    @property
    def lacking(self) -> set[int]:
        """Places of the ranks to which there is no connection."""
        return self._lacking

    def reach(self, places: Iterable[int], attempt: Attempt) -> list[int]:
        """Connects to the ranks at `places`, which do the same; returns the places of new connections, maybe more.

        Raises PeerError for ranks that do not come or cannot be reached.
        """
        wanted = self._lacking.intersection(places)
        addresses = {other: self._addresses[other] for other in wanted if other < self._place}
        callers = {other for other in self._lacking if other > self._place}
        listeners = list(self._listeners.values())
        try:
            with self._named_errors():
                self._handshakes = Handshakes(
                    self._place, addresses, listeners, self._own, wanted & callers, callers, self._secret
                )
                found = self._shake_hands(self._handshakes, attempt)
        finally:
            self._handshakes = None
        for other, connected in found.items():
            self.sockets[other] = connected
        self._lacking -= found.keys()
        if not any(other > self._place for other in self._lacking):
            self._close_listeners()
        return sorted(found)

    def meet(self, where: str, look: Callable[[Iterable[int]], object]) -> None:
        """Returns when the ranks to which there is no connection have called it, too, with the same text.

        They meet in the store, as connecting is more than they want of each other. `look` is called now and then with
        their places, and may raise what ends the waiting.
        """
        pause = _FIRST_PAUSE_S
        self._told.come(where)
        while not self._told.have_come(where, self._lacking):
            look(self._lacking)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Closes the connections, also those that are being made, and refuses those who call."""
        self._close_listeners()
        if self._handshakes is not None:
            self._handshakes.close()
        for found in self.sockets:
            if found is not None:
                found.close()

    def _close_listeners(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            if isinstance(error, PeerError | WorldError):
                raise
            raise PeerError(
                f"rank {self._ranks[self._place]} could not connect to ranks {list(self._ranks)}: {error}"
            ) from error

    def _outer_address(self, distant: dict[int, str], guess: str) -> str:
        """This host's address for `distant` ranks, given the ones at which they believe to be reached."""
        allowed = outer_addresses()
        if not allowed:
            raise WorldError(
                f"rank {self._ranks[self._place]} cannot be reached by ranks "
                f"{[self._ranks[other] for other in sorted(distant)]} of other hosts: {no_address()}; "
                "TRITONDT_SOCKET_IFNAME names the interface to use"
            )
        return guess or address_towards(filter(None, distant.values()), allowed) or allowed[0]

    def _shake_hands(self, handshakes: Handshakes, attempt: Attempt) -> dict[int, socket.socket]:
        try:
            if not handshakes.run(attempt.deadline, attempt.look):
                raise self._told.late(handshakes.missing, attempt)
            for found in handshakes.connected.values():
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException as error:
            for found in handshakes.connected.values():
                found.close()
            if isinstance(error, UnreachableError):
                rank, other = self._ranks[self._place], self._ranks[error.place]
                raise PeerError(f"rank {rank} could not connect to rank {other}: {error}") from error
            raise
        return handshakes.connected


@dataclass(frozen=True)
class _Told:
    """What the ranks of a communicator say of themselves in the store."""

    client: StoreClient
    key: str
    ranks: Sequence[int]
    place: int

    def asked(self, what: str, others: Sequence[int], attempt: Attempt) -> list[str]:
        """What `others` have said, in their order, when all have; PeerError where some do not in time."""
        if not others:
            return []
        keys, pause = [self._named(what, other) for other in others], _FIRST_PAUSE_S
        next_look = time.monotonic() + 1.0
        while not self._call(lambda store: store.check(keys), attempt):
            if time.monotonic() >= attempt.deadline:
                there = {key: self._call(lambda store, key=key: store.check([key]), attempt) for key in keys}  # type: ignore[misc]
                raise self.late([other for other, key in zip(others, keys, strict=True) if not there[key]], attempt)
            if time.monotonic() >= next_look:
                attempt.look(others)
                next_look = time.monotonic() + 1.0
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return [text.decode() for text in self._call(lambda store: values(store, keys), attempt)]

    def tell(self, what: str, text: str, attempt: Attempt) -> None:
        """Says something of this rank."""
        self._call(lambda store: store.set(self._named(what, self.place), text), attempt)

    def _named(self, what: str, place: int) -> str:
        return f"{self.key}/{what}/{place}"

    def _call(self, function: Callable[[dist.Store], Result], attempt: Attempt) -> Result:
        """The result of `function` by the deadline; PeerError where the store has not answered by then."""
        try:
            return self.client.call(function, max(attempt.deadline - time.monotonic(), PATIENCE_S))
        except SilentStoreError as error:
            late = self.late([place for place in range(len(self.ranks)) if place != self.place], attempt)
            raise PeerError(f"{late}, {self.client.silence(error)}") from error

    def come(self, where: str) -> None:
        """Says that this rank has come there, as soon as the store listens."""
        with suppress(RuntimeError):
            self.client.call(lambda store: store.set(self._named(where, self.place), ""))

    def have_come(self, where: str, others: Iterable[int]) -> bool:
        """Whether others have come there; true where the store has gone, for its process has ended and meets nobody."""
        keys = [self._named(where, other) for other in others]
        try:
            return self.client.call(lambda store: store.check(keys))
        except SilentStoreError:
            return False
        except RuntimeError:
            return True

    def late(self, missing: Iterable[int], attempt: Attempt) -> PeerError:
        """The error that names those who have not come in time."""
        named = [self.ranks[other] for other in missing]
        return PeerError(f"rank {self.ranks[self.place]} waited {attempt.timeout_s:g} s for ranks {named} to connect")


def drawn_tokens() -> Tokens:
    """Tokens of a rank that others are about to call."""
    return Tokens(secrets.token_hex(TOKEN_BYTES), secrets.token_hex(TOKEN_BYTES))


def listeners_of_rank(world_size: int) -> dict[str, socket.socket]:
    """Where a rank listens whose callers are not known: for its own machine, and for others where it may have some.

    It has none where the ranks of its machine are all of the world's.
    """
    found = {NEAR: _listener(LOOPBACK, world_size)}
    per_host, allowed = environment.ranks_per_host(), outer_addresses()
    if allowed and (per_host is None or world_size > per_host):
        found[FAR] = _listener(_guessed_address() or allowed[0], world_size)
    return found


def _listener(host: str, num_ranks: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=max(num_ranks, _MIN_BACKLOG))


def _guessed_address() -> str:
    """The address of the route to the job's master, empty where that says nothing: it is on this host, or unknown."""
    master = environment.master_address()
    names = (socket.gethostname(),) if master is None else (master,)
    try:
        return address_towards(names, outer_addresses()) or ""
    except OSError:  # the system lists no interfaces: who has ranks on other machines is told so when it asks again
        return ""
