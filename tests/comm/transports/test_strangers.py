"""Ranks that connect while others call: silent, slow, talkative and many; and what the ranks listen at."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tritondt as T
from tests.comm.transports.test_tcp_connect import Places, assert_connected, places
from tests.harness.descriptors import open_targets
from tritondt.comm import greeter
from tritondt.comm.transports import handshakes, tcp_connect


def address(made: Places, place: int = 0) -> tuple[str, int]:
    """Where a place listens for those of its own machine, once it does."""
    made.store.wait([f"address/{place}"], timedelta(seconds=20))
    host, port = json.loads(made.store.get(f"address/{place}"))[0]["near"]
    return host, port


@pytest.fixture
def listening() -> Iterator[Places]:
    """Places of which the first two wait for the third."""
    with places() as made:
        made.announce(2)
        made.start(0)
        made.start(1)
        yield made


def connect_the_last(made: Places) -> float:
    """Seconds that the last place takes to connect to the others; all are connected then."""
    started = time.monotonic()
    made.start(2)
    made.join()
    assert not made.errors
    assert_connected(made.found)
    return time.monotonic() - started


def test_silent_strangers_cost_no_time(listening: Places) -> None:
    """Each was waited for, 2 s, before the next one."""
    strangers = [socket.create_connection(address(listening), 20) for _ in range(5)]
    assert connect_the_last(listening) < 5
    for stranger in strangers:
        stranger.close()


def test_a_slow_stranger_is_not_waited_for(listening: Places) -> None:
    stranger = socket.create_connection(address(listening), 20)
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            try:
                stranger.sendall(b"x")
            except OSError:
                return

    trickling = threading.Thread(target=trickle)
    trickling.start()
    assert connect_the_last(listening) < 5
    stop.set()
    trickling.join()
    stranger.close()


def test_how_much_of_a_token_is_right_is_not_told(listening: Places) -> None:
    """Whoever is turned away at the first wrong byte finds the token byte by byte."""
    with socket.create_connection(address(listening), 20) as stranger:
        stranger.sendall(bytes(19))
        stranger.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stranger.recv(1)
        stranger.sendall(bytes(1))
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
    connect_the_last(listening)


def test_of_many_strangers_the_oldest_are_dropped(listening: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeter, "_MAX_CALLERS", 8)
    strangers = [socket.create_connection(address(listening), 20) for _ in range(20)]
    strangers[0].settimeout(20)
    assert strangers[0].recv(1) == b""
    connect_the_last(listening)
    for stranger in strangers:
        stranger.close()


def test_strangers_do_not_stretch_the_timeout() -> None:
    with places(timeout_s=1.5) as made:
        made.announce(2)
        made.start(0)
        stop = threading.Event()
        called: list[socket.socket] = []

        def knock() -> None:
            host, port = address(made)
            while not stop.wait(0.2):
                try:
                    called.append(socket.create_connection((host, port), 20))
                except ConnectionError:
                    return

        knocking = threading.Thread(target=knock)
        knocking.start()
        made.start(1)
        started = time.monotonic()
        made.join()
        seconds = time.monotonic() - started
        stop.set()
        knocking.join()
        assert str(made.errors[0]) == "rank 4 waited 1.5 s for ranks [9] to connect"
        assert seconds < 30
        for stranger in called:
            stranger.close()


def test_a_rank_shows_no_more_to_somebody_else_who_answers() -> None:
    """A port that another process has taken over: the rank that calls says so at once."""
    with socket.create_server(("127.0.0.1", 0)) as server, places() as made:
        made.announce(0)
        host, port = server.getsockname()
        made.store.set("address/0", json.dumps([{"near": [host, port]}, "00" * 16, "11" * 16]))
        made.start(1)
        made.announce(2)
        found, _ = server.accept()
        found.settimeout(20)
        assert found.recv(100) == bytes(16) + (1).to_bytes(4, "little")
        found.sendall(b"220 mail ready")
        made.join()
        assert str(made.errors[1]) == (
            f"rank 7 could not connect to rank 4: somebody else answers at 127.0.0.1, port {port}"
        )
        found.close()


def test_a_rank_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "_PERSISTENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with places() as made:
        made.announce(0)
        made.announce(2)
        made.store.set("address/0", json.dumps([{"near": ["127.0.0.1", port]}, "00" * 16, "11" * 16]))
        made.start(1)
        made.join()
        assert str(made.errors[1]) == (
            f"rank 7 could not connect to rank 4: [Errno 111] ECONNREFUSED at 127.0.0.1, port {port}"
        )


def listening_addresses() -> set[str]:
    """Addresses, as the kernel writes them, of this process's listening IPv4 sockets."""
    own = set(open_targets())
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own}


def test_ranks_of_one_machine_listen_at_its_loopback_interface_alone(listening: Places) -> None:
    address(listening, 0)
    address(listening, 1)
    assert listening_addresses() == {"0100007F"}
    connect_the_last(listening)
    assert listening_addresses() == set()


def test_a_failure_of_another_rank_ends_the_waiting() -> None:
    def look(missing: Sequence[int]) -> None:
        raise T.PeerError("rank 9 failed")

    with places() as made:
        made.announce(2)
        made.look = look
        made.start(0)
        made.start(1)
        made.join()
    assert [str(made.errors[place]) for place in (0, 1)] == ["rank 9 failed"] * 2


def pretend(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    for name, value in replaced.items():
        monkeypatch.setattr(tcp_connect, name, value)


def test_ranks_of_other_machines_are_called_at_an_outer_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 stands for an address that other machines reach."""
    machines = iter("abcdefgh")
    pretend(monkeypatch, machine=lambda: next(machines), outer_addresses=lambda: ["127.0.0.2"])
    with places() as made:
        for place in range(3):
            made.start(place)
        made.join()
        assert not made.errors
        assert_connected(made.found)
        reached, *_ = json.loads(made.store.get("address/0"))
        assert [(name, host) for name, (host, _) in reached.items()] == [("far", "127.0.0.2")]
        assert json.loads(made.store.get("address/2"))[0] == {}  # nobody calls the last one


def test_a_loopback_address_is_given_to_no_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = iter("abcdefgh")
    pretend(monkeypatch, machine=lambda: next(machines), outer_addresses=list)
    monkeypatch.setenv("TRITONDT_SOCKET_IFNAME", "lo")
    with places(timeout_s=20) as made:
        for place in range(3):
            made.start(place)
        made.join()
    for place, rank in enumerate((4, 7, 9)):
        text = str(made.errors[place])
        assert text.startswith(f"rank {rank} cannot be reached by ranks ")
        assert "of other hosts: TRITONDT_SOCKET_IFNAME='lo' names no interface with an address that another" in text
        assert "host could reach; there are lo 127.0.0.1" in text
