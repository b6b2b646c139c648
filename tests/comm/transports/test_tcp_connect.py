"""Ranks that find each other through a store and connect pairwise over TCP; strangers are turned away."""

import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

import tritondt as T
from tritondt.comm.answers import Attempt
from tritondt.comm.processes import machine
from tritondt.comm.secret import Secret
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.comm.transports.tcp_connect import Connections

RANKS, KEY = (4, 7, 9), "some communicator"
Sockets = list[socket.socket | None]


class Places:
    """`Connections` in one thread per place, on one store: each reaches all others, or those of `wanted`."""

    look: Callable[[Sequence[int]], object] = staticmethod(lambda _: None)
    wanted: Mapping[int, Sequence[int]] = {place: range(3) for place in range(3)}

    def __init__(self, timeout_s: float = 20.0, secret: Secret | None = None) -> None:
        self.secret = secret
        self.whole_store: dist.Store = dist.HashStore()
        self.store = dist.PrefixStore(KEY, self.whole_store)
        self._timeout_s = timeout_s
        self._threads: list[tuple[int, threading.Thread]] = []
        self.found: dict[int, Sockets] = {}
        self.made: dict[int, Connections] = {}
        self.errors: dict[int, Exception] = {}

    def start(self, place: int) -> None:
        thread = threading.Thread(target=self._connect, args=(place,))
        self._threads.append((place, thread))
        thread.start()

    def announce(self, place: int) -> None:
        """Says where `place` is, as it does first; others wait for it to connect then."""
        self.store.set(f"machine/{place}", json.dumps([machine(), ""]))

    def _connect(self, place: int) -> None:
        client = StoreClient(self.whole_store, StoreHost(self.whole_store))
        try:
            attempt = Attempt.of(self._timeout_s, self.look)
            if place not in self.made:
                self.made[place] = Connections(client, KEY, RANKS, place, attempt, self.secret)
            self.made[place].reach(self.wanted[place], attempt)
            self.found[place] = self.made[place].sockets
        except (T.PeerError, T.WorldError) as error:
            self.errors[place] = error
        finally:
            client.close()

    def join(self) -> None:
        for place in range(3):
            self.join_of(place)

    def join_of(self, place: int) -> None:
        """Returns when the threads of a place have ended."""
        for at, thread in self._threads:
            if at == place:
                thread.join(30)
                assert not thread.is_alive()


@contextmanager
def places(timeout_s: float = 20.0, secret: Secret | None = None) -> Iterator[Places]:
    made = Places(timeout_s, secret)
    try:
        yield made
    finally:
        made.join()
        for connections in made.made.values():
            connections.close()


def assert_connected(found: dict[int, Sockets]) -> None:
    """Each place has one socket to every other, and what goes in at one end comes out at the right other."""
    assert found.keys() == {0, 1, 2}
    for place, sockets in found.items():
        assert [item is None for item in sockets] == [other == place for other in range(3)]
        for other, item in enumerate(sockets):
            if item is not None:
                assert item.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                item.sendall(bytes([place, other]))
    for place, sockets in found.items():
        for other, item in enumerate(sockets):
            if item is not None:
                item.settimeout(10)
                assert item.recv(2, socket.MSG_WAITALL) == bytes([other, place])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_every_pair_is_connected_once_whoever_comes_first(order: tuple[int, ...]) -> None:
    with places() as made:
        for place in order:
            made.start(place)
        made.join()
        assert_connected(made.found)


def knock_and_leave(stranger: socket.socket) -> None:
    stranger.close()


def knock_and_reset(stranger: socket.socket) -> None:
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


def knock_with_a_wrong_token(stranger: socket.socket) -> None:
    stranger.sendall(bytes(20))
    stranger.close()


def knock_and_break_off(stranger: socket.socket) -> None:
    stranger.sendall(bytes(3))
    stranger.close()


def knock_and_stay(stranger: socket.socket) -> None:
    """Says nothing until the test is over."""
    stranger.setblocking(False)


@pytest.mark.parametrize(
    "knock", [knock_and_leave, knock_and_reset, knock_with_a_wrong_token, knock_and_break_off, knock_and_stay]
)
def test_strangers_do_not_disturb(knock: Callable[[socket.socket], None]) -> None:
    with places() as made:
        made.start(0)
        for place in (1, 2):
            made.announce(place)
        made.store.wait(["address/0"], timedelta(seconds=20))
        ((_, port),) = json.loads(made.store.get("address/0"))[0].values()
        with socket.create_connection(("127.0.0.1", port), 20) as stranger:
            knock(stranger)
            for place in (1, 2):
                made.start(place)
            made.join()
        assert not made.errors
        assert_connected(made.found)


def test_ranks_that_do_not_come_are_named() -> None:
    with places(timeout_s=1.0) as made:
        made.start(0)
        made.start(1)
        made.join()
    assert str(made.errors[0]) == "rank 4 waited 1 s for ranks [9] to connect"
    assert str(made.errors[1]) == "rank 7 waited 1 s for ranks [9] to connect"


def test_ranks_that_never_listen_are_named() -> None:
    with places(timeout_s=0.5) as made:
        made.announce(0)
        made.announce(1)
        made.start(2)
        made.join()
    assert str(made.errors[2]) == "rank 9 waited 0.5 s for ranks [4, 7] to connect"


class StoppedStore(dist.HashStore):
    """A store whose process has stopped: questions are answered when it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.goes_on.wait()
        return super().check(keys)


def test_a_store_that_has_stopped_is_not_waited_for() -> None:
    with places(timeout_s=1.0) as made:
        made.whole_store = store = StoppedStore()
        made.start(0)
        made.join()
        store.goes_on.set()
    assert re.fullmatch(
        r"rank 4 waited 1 s for ranks \[7, 9\] to connect, and the store has not answered for 1 s", str(made.errors[0])
    )


def connected_pairs(made: Places) -> set[tuple[int, int]]:
    """Pairs of places with a socket at the first one, to the second one."""
    return {
        (place, other)
        for place, connections in made.made.items()
        for other, found in enumerate(connections.sockets)
        if found is not None
    }


def test_pairs_that_ask_are_connected_and_no_others() -> None:
    with places() as made:
        made.wanted = {0: (2,), 1: (), 2: (0,)}
        for place in range(3):
            made.start(place)
        made.join()
        assert connected_pairs(made) == {(0, 2), (2, 0)}
        made.wanted = {0: (2, 1), 1: (0,), 2: (0,)}
        for place in range(3):
            made.start(place)
        made.join()
        assert connected_pairs(made) == {(0, 2), (2, 0), (0, 1), (1, 0)}
        made.wanted = {place: range(3) for place in range(3)}
        for place in range(3):
            made.start(place)
        made.join()
        assert not made.errors
        assert_connected(made.found)


def test_whoever_calls_before_it_is_waited_for_is_welcome() -> None:
    """Place 0 waits for place 1 alone, and hears place 2 meanwhile, which is done with it."""
    with places() as made:
        made.wanted = {0: (1,), 1: (), 2: (0,)}
        for place in range(3):
            made.start(place)
        made.join_of(1)
        made.join_of(2)
        assert connected_pairs(made) == {(2, 0)}, "place 0 is still waiting"
        made.wanted = {**made.wanted, 1: (0,)}
        made.start(1)
        made.join()
        assert not made.errors
        assert connected_pairs(made) == {(0, 1), (1, 0), (0, 2), (2, 0)}
        assert made.made[0].reach((1, 2), Attempt.of(0)) == []


def test_what_is_being_connected_is_closed_too() -> None:
    """As a child does that was forked meanwhile: it would keep the others from noticing that its parent dies."""
    with places(timeout_s=2.0) as made:
        made.wanted = {0: (1,), 1: (), 2: (0,)}
        for place in range(3):
            made.start(place)
        made.join_of(1)
        made.join_of(2)
        made.made[0].close()
        (to_place_0,) = [found for found in made.found[2] if found is not None]
        to_place_0.settimeout(10)
        assert to_place_0.recv(1) == b""
        made.join()
    assert str(made.errors[0]) == "rank 4 waited 2 s for ranks [7] to connect"


def test_thirty_two_places_in_a_ring_have_two_connections_each() -> None:
    ranks = range(32)
    store = dist.HashStore()
    made: dict[int, Connections] = {}

    def connect(place: int) -> None:
        client = StoreClient(store, StoreHost(store))
        attempt = Attempt.of(30)
        made[place] = Connections(client, KEY, ranks, place, attempt)
        made[place].reach(((place - 1) % 32, (place + 1) % 32), attempt)
        client.close()

    threads = [threading.Thread(target=connect, args=(place,)) for place in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = {place: [other for other, at in enumerate(made[place].sockets) if at is not None] for place in ranks}
    for connections in made.values():
        connections.close()
    assert found == {place: sorted(((place - 1) % 32, (place + 1) % 32)) for place in ranks}
