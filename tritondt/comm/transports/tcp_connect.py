"""TCP connections between ranks of a communicator, which exchange their addresses through the store.

First all ranks say on which machine they are. Then each listens where those that call it come from: at the loopback
interface for ranks of its own machine, at one outer address for others, nowhere for nobody. Two ranks connect when they
first have messages for each other, of which both know: the one behind calls the one before. Connections between all
pairs of 1,024 ranks would be more descriptors than a process may have by default.
"""

import math
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tritondt import environment
from tritondt.comm.answers import Answers, Attempt
from tritondt.comm.processes import machine
from tritondt.comm.secret import Secret
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.polling import await_others
from tritondt.comm.transports.handshakes import TOKEN_BYTES, Address, Handshakes, Tokens, UnreachableError
from tritondt.comm.transports.interfaces import (
    LOOPBACK,
    address_towards,
    interface_of,
    no_address,
    outer_addresses,
    way_to,
)
from tritondt.errors import PeerError, RefusalError, WorldError

_MIN_BACKLOG = 128
# Addresses that an error message has.
_MOST_TOLD = 4
# Where a rank listens for those of its own machine, and for others.
NEAR, FAR = "near", "far"


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
        # Without what `attempt` looks at, which has these connections: sockets are closed with the last name of theirs.
        self._answers = Answers(client, key, ranks, place, Attempt.of(attempt.timeout_s))
        self._own = drawn_tokens()
        self._listeners: dict[str, socket.socket] = {}
        self._addresses: dict[int, Address] = {}
        self._handshakes: Handshakes | None = None  # while it connects, and what a refused exchange has left of that
        self._distant: frozenset[int] = frozenset()  # on other machines
        self._lacking = {other for other in range(len(ranks)) if other != place}
        try:
            with self._named_errors():
                self._listen(Answers(client, key, ranks, place, attempt))
        except BaseException:
            self._close_listeners()
            raise

    def _listen(self, answers: Answers) -> None:
        others = sorted(self._lacking)
        own_machine, guess = machine(), _guessed_address()
        answers.tell("machine", [own_machine, guess])
        machines = answers.of_others("machine")
        distant = {other: guessed for other, (found, guessed) in machines.items() if found != own_machine}
        self._distant = frozenset(distant)
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
        answers.tell("address", [reached, *self._own])
        # Now, as the store may have gone, or stopped, when they are called.
        called = [other for other in others if other < self._place]
        for other, (theirs, *tokens) in answers.of_others("address", called).items():
            self._addresses[other] = Address(*theirs[FAR if other in distant else NEAR], *tokens)

    @property
    def lacking(self) -> set[int]:
        """Places of the ranks to which there is no connection."""
        return self._lacking

    def tried(self, places: Iterable[int]) -> str:
        """Clause of an error message: how `places` of other hosts are reached; "" where there are none."""
        distant = sorted(self._distant.intersection(places))
        called = [(self._ranks[place], self._addresses[place]) for place in distant if place in self._addresses]
        texts = [f"calls rank {rank} at {found.host}, port {found.port}{way_to(found.host)}" for rank, found in called]
        callers = [self._ranks[place] for place in distant if place not in self._addresses]
        if callers and FAR in self._listeners:
            host, port = self._listeners[FAR].getsockname()[:2]
            texts.append(f"listens for ranks {callers} at {host}, port {port}, of {interface_of(host)}")
        return f"; it {', '.join(texts[:_MOST_TOLD])}" if texts else ""

    def reach(self, places: Iterable[int], attempt: Attempt) -> list[int]:
        """Connects to the ranks at `places`, which do the same; returns the places of new connections, maybe more.

        Raises PeerError for ranks that do not come or cannot be reached.
        """
        wanted = self._lacking.intersection(places)
        addresses = {other: self._addresses[other] for other in wanted if other < self._place}
        callers = {other for other in self._lacking if other > self._place}
        listeners = list(self._listeners.values())
        left, is_kept = self._handshakes, False
        try:
            with self._named_errors():
                self._handshakes = Handshakes(
                    self._place, addresses, listeners, self._own, wanted & callers, callers, self._secret, left
                )
                found = self._shake_hands(self._handshakes, attempt)
        except RefusalError:  # the others of this exchange may have done their part
            is_kept = True
            raise
        finally:
            if not is_kept:
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
        self._answers.come(where)

        def have_come() -> bool:
            if self._answers.have_come(where, self._lacking):
                return True
            look(self._lacking)
            return False

        await_others(have_come, math.inf)

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
            if not handshakes.connect(attempt.deadline, attempt.look):
                raise self._answers.late(handshakes.missing, attempt)
            for found in handshakes.connected.values():
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except RefusalError:
            raise
        except BaseException as error:
            handshakes.close()
            if isinstance(error, UnreachableError):
                rank, other = self._ranks[self._place], self._ranks[error.place]
                raise PeerError(f"rank {rank} could not connect to rank {other}: {error}") from error
            raise
        return handshakes.connected


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
