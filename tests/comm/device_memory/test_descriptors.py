"""Descriptors that places pass to each other: among strangers, with places missing, and with nothing left open."""

import os
import resource
import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.harness.descriptors import open_targets
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.device_memory import descriptors
from tritondt.comm.device_memory.descriptors import DescriptorSwap
from tritondt.errors import PeerError

LONG_S = 60.0
Told = Mapping[int, Mapping[str, str]]


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = opened()
    yield
    assert not opened() - before  # what earlier tests left may go meanwhile


def opened() -> Counter[str]:
    """Sockets, and files of these tests, that this process has open."""
    return Counter(each for each in open_targets() if each.startswith("socket:") or "memfd:swapped" in each)


@contextmanager
def file_of(place: int) -> Iterator[int]:
    """A descriptor of a file that says whose it is."""
    descriptor = os.memfd_create("swapped")
    os.write(descriptor, f"of {place}".encode())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def contents(found: Mapping[int, int]) -> dict[int, str]:
    """What the files say, by place; the descriptors are closed."""
    said = {place: os.pread(descriptor, 100, 0).decode() for place, descriptor in found.items()}
    inherited = [os.get_inheritable(descriptor) for descriptor in found.values()]
    for descriptor in found.values():
        os.close(descriptor)
    assert not any(inherited), "a program that this process starts must not have them"
    return said


def of_others(place: int, size: int) -> dict[int, str]:
    return {other: f"of {other}" for other in range(size) if other != place}


class Places:
    """Places that are told of each other, each of which swaps in a thread once it is started."""

    def __init__(self, size: int) -> None:
        self.closing = ExitStack()
        self._pool = self.closing.enter_context(ThreadPoolExecutor(size))
        self.swaps = [self.closing.enter_context(DescriptorSwap()) for _ in range(size)]
        self.told: dict[int, Mapping[str, str]] = {place: swap.told for place, swap in enumerate(self.swaps)}

    def start(self, place: int, timeout_s: float = LONG_S) -> "Future[dict[int, int]]":
        file = self.closing.enter_context(file_of(place))
        return self._pool.submit(self.swaps[place].swap, file, dict(self.told), place, timeout_s)


@pytest.fixture
def three() -> Iterator[Places]:
    made = Places(3)
    with made.closing:
        yield made


def calling(told: Mapping[str, str], greeting: bytes = b"") -> socket.socket:
    """A connection to a place, which is sent a greeting."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(LONG_S)
    made.connect("\0" + told["name"])
    with suppress(BrokenPipeError):  # it has hung up already, which receiving tells
        made.sendall(greeting)
    return made


def greeting(told: Mapping[str, str], place: int) -> bytes:
    return bytes.fromhex(told["token"]) + place.to_bytes(4, "little")


def answer(call: socket.socket) -> list[int]:
    """The descriptors that a call is answered with; none where the other side hangs up."""
    with call:
        try:
            return socket.recv_fds(call, 1, 4)[1]
        except ConnectionResetError:  # there is more of the greeting than it has read
            return []


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_all_places_get_each_others_files(order: tuple[int, ...]) -> None:
    made = Places(4)
    with made.closing:
        swapping = {place: made.start(place) for place in order}
        assert {place: contents(each.result()) for place, each in swapping.items()} == {
            place: of_others(place, 4) for place in range(4)
        }


def test_places_swap_again(three: Places) -> None:
    """A place that is through may call for the second time before another one has ended the first."""
    for _ in range(20):
        swapping = [three.start(place) for place in range(3)]
        assert [contents(each.result()) for each in swapping] == [of_others(place, 3) for place in range(3)]


def test_one_place_alone_has_nothing_to_swap() -> None:
    with DescriptorSwap() as swap, file_of(0) as file:
        assert swap.swap(file, {0: swap.told}, 0, LONG_S) == {}


def test_what_is_told_is_of_one_swap() -> None:
    with DescriptorSwap() as first, DescriptorSwap() as second:
        assert len(bytes.fromhex(first.told["token"])) == 32
        assert first.told.keys() == {"name", "token"}
        assert not set(first.told.values()) & set(second.told.values())


def test_strangers_are_turned_away(three: Places) -> None:
    """All call while a place waits for others, some before the others do, and one stays."""
    told = three.told[0]
    silent = calling(told)
    slow = calling(told, greeting(told, 1)[:-1])
    calling(told).close()
    calling(told, greeting(told, 1)).close()
    first = three.start(0)
    refused = [
        secrets.token_bytes(36),  # a wrong token
        greeting(told, 1)[:31] + b"\0" + greeting(told, 1)[32:],
        greeting(told, 0),  # its own place
        greeting(told, 3),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    ]
    assert [answer(calling(told, each)) for each in refused] == [[]] * len(refused)
    others = [three.start(1), three.start(2)]
    assert [contents(each.result()) for each in (first, *others)] == [of_others(place, 3) for place in range(3)]
    for stranger in (silent, slow):
        stranger.close()


def test_a_silent_stranger_is_hung_up_on(three: Places) -> None:
    """It would keep a descriptor of the place's for as long as the others take."""
    first = three.start(0)
    assert answer(calling(three.told[0])) == []
    others = [three.start(1), three.start(2)]
    assert [contents(each.result()) for each in (first, *others)] == [of_others(place, 3) for place in range(3)]


def test_many_silent_strangers_leave_room_for_places(three: Places) -> None:
    """They fill the queue of those who call, which is 128 long, before the place looks at it."""
    silent: list[socket.socket] = []
    try:
        while len(silent) < 1000:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            silent.append(made)
            made.setblocking(False)
            made.connect("\0" + three.told[0]["name"])
    except BlockingIOError:
        pass
    assert 100 < len(silent) < 1000
    others = [three.start(1), three.start(2)]
    first = three.start(0)
    assert [contents(each.result()) for each in (first, *others)] == [of_others(place, 3) for place in range(3)]
    for stranger in silent:
        stranger.close()


def serve(listener: socket.socket, token: bytes, file: int, count: int) -> list[int]:
    """A place by hand: sends its file to so many others; returns their places."""
    places = []
    for _ in range(count):
        found, _ = listener.accept()
        with found:
            content = found.recv(36, socket.MSG_WAITALL)
            assert content[:32] == token
            places.append(content[32])
            socket.send_fds(found, [b"x"], [file])
    return places


@contextmanager
def place_by_hand(three: Places) -> Iterator[tuple[socket.socket, bytes]]:
    """Place 1 as a socket of the test's, with its token."""
    name, token = secrets.token_hex(8), secrets.token_bytes(32)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(LONG_S)
        listener.bind("\0" + name)
        listener.listen()
        three.told[1] = {"name": name, "token": token.hex()}
        yield listener, token


def test_a_place_that_comes_twice_is_refused_the_second_time(three: Places) -> None:
    with place_by_hand(three) as (listener, token), file_of(1) as file:
        first = three.start(0)
        got = answer(calling(three.told[0], greeting(three.told[0], 1)))
        assert answer(calling(three.told[0], greeting(three.told[0], 1))) == []
        last = three.start(2)
        got += answer(calling(three.told[2], greeting(three.told[2], 1)))
        for descriptor in got:
            os.set_inheritable(descriptor, False)
        assert sorted(serve(listener, token, file, 2)) == [0, 2]
        assert contents(dict(zip((0, 2), got, strict=True))) == of_others(1, 3)
        assert [contents(each.result()) for each in (first, last)] == [of_others(0, 3), of_others(2, 3)]


def test_missing_places_are_named(three: Places) -> None:
    """Place 1 listens, place 2 has gone."""
    three.swaps[2].close()
    with pytest.raises(PeerError) as error:
        three.start(0, 0.3).result()
    assert str(error.value) == (
        "place 0 swaps file descriptors with 2 other places and has waited 0.3 s; missing are 1 (has not answered), "
        "2 ([Errno 111] Connection refused); every place must come within that time"
    )


def test_what_was_received_is_closed_where_places_are_missing(three: Places) -> None:
    """Place 1 answers and does not call, place 2 hangs up."""
    with place_by_hand(three) as (listener, token), file_of(1) as file:
        three.swaps[2].close()
        first = three.start(0, 0.5)
        serve(listener, token, file, 1)
        with pytest.raises(
            PeerError, match=r"missing are 1 \(has not called\), 2 \(\[Errno 111\] Connection refused\);"
        ):
            first.result()


def test_two_places_of_three_name_the_third(three: Places) -> None:
    found = [three.start(place, 0.5) for place in range(2)]
    for each in found:
        with pytest.raises(PeerError, match=r"missing are 2 \(has not answered\); every place"):
            each.result()


def test_a_descriptor_that_cannot_be_opened_is_an_error() -> None:
    """It is sent once: whoever called again would wait for nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs, file_of(0) as file:
        socket.send_fds(theirs, [b"x"], [file])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError, match=r"\[Errno 24\] a file descriptor was received that this process may not"):
                descriptors._received(ours)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def call_as_nobody(rank: int, told: Mapping[str, str]) -> list[int]:
    """What place 0 answers to a place of another user."""
    os.seteuid(65534)
    try:
        return answer(calling(told, greeting(told, 1)))
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_is_turned_away(three: Places, four_shared_memory_ranks: GlooRanks) -> None:
    """Its token is right. Processes of their own change their user: in this one, all threads would."""
    first = three.start(0)
    assert four_shared_memory_ranks.run(call_as_nobody, dict(three.told[0])) == [[]] * 4
    others = [three.start(1), three.start(2)]
    assert [contents(each.result()) for each in (first, *others)] == [of_others(place, 3) for place in range(3)]


def test_closing_twice_is_closing_once() -> None:
    with DescriptorSwap() as swap:
        swap.close()
        swap.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made, pytest.raises(ConnectionRefusedError):
            made.connect("\0" + swap.told["name"])
