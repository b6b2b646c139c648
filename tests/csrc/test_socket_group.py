"""Messages over sockets whose other end writes what it likes: nothing of a wrong message reaches its target."""

import ctypes
import os
import socket
import struct
import threading
import time

import pytest

from tritondt._C import SocketGroup

TAG = 7
UNTOUCHED = 0xA5
# Around the longest message that is read with its header, 16 kB, and far beyond.
SIZES = [1, 16383, 16384, 16385, 300_000]


def header(tag, num_bytes):
    return struct.pack("<QQ", tag, num_bytes)


@pytest.fixture
def ends():
    """A group of one rank, connected to the socket of another that the test writes to."""
    own, other = socket.socketpair()
    own.setblocking(False)
    yield SocketGroup([-1, own.fileno()]), other
    own.close()
    other.close()


def finish(group):
    outcome = group.finish()
    while outcome[0] == "pending":
        outcome = group.finish()
    return outcome


def target(num_bytes):
    made = (ctypes.c_uint8 * num_bytes)(*[UNTOUCHED] * num_bytes)
    return made, ctypes.addressof(made)


def written_by(other, content):
    """A thread that writes more than a socket's buffer holds; it may be left with what nobody reads."""

    def write():
        try:
            other.sendall(content)
        except OSError:  # the test is over
            return

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


WRONG = {
    "another exchange": lambda num_bytes: header(TAG + 1, num_bytes),
    "another length": lambda num_bytes: header(TAG, num_bytes + 1),
    "a length beyond all memory": lambda num_bytes: header(TAG, 2**64 - 1),
    "garbage": lambda num_bytes: b"GET / HTTP/1.1\r\n",
}


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("wrong", WRONG)
def test_no_byte_of_a_wrong_message_reaches_its_target(ends, num_bytes, wrong):
    group, other = ends
    kept, address = target(num_bytes)
    written_by(other, WRONG[wrong](num_bytes) + bytes(num_bytes))
    group.start([], [(1, address, num_bytes)], TAG)
    assert finish(group) == ("mismatch", 1)
    assert bytes(kept) == bytes([UNTOUCHED]) * num_bytes


@pytest.mark.parametrize("num_bytes", [0, *SIZES])
def test_a_message_arrives_whole_and_the_next_one_after_it(ends, num_bytes):
    group, other = ends
    for _ in range(3):
        content = os.urandom(num_bytes)
        writing = written_by(other, header(TAG, num_bytes) + content)
        kept, address = target(num_bytes + 8)
        group.start([], [(1, address, num_bytes)], TAG)
        assert finish(group) == ("done", -1)
        writing.join()
        assert bytes(kept) == content + bytes([UNTOUCHED]) * 8


@pytest.mark.parametrize("num_bytes", [5000, 20_000])
@pytest.mark.parametrize("cut", [1, 16, 17, 4113])
def test_a_message_in_two_pieces_arrives_whole(ends, cut, num_bytes):
    """The first piece ends within the header, with it, or one byte behind it, or far behind."""
    group, other = ends
    content = os.urandom(num_bytes)
    message = header(TAG, len(content)) + content
    kept, address = target(len(content))
    other.sendall(message[:cut])
    group.start([], [(1, address, len(content))], TAG)
    assert group.finish() == ("pending", 1)
    other.sendall(message[cut:])
    assert finish(group) == ("done", -1)
    assert bytes(kept) == content


def test_a_slow_writer_is_waited_for(ends):
    group, other = ends
    content = bytes(range(100))
    kept, address = target(len(content))
    group.start([], [(1, address, len(content))], TAG)

    def write():
        for byte in header(TAG, len(content)) + content:
            other.sendall(bytes([byte]))
            time.sleep(0.001)

    writing = threading.Thread(target=write)
    writing.start()
    assert finish(group) == ("done", -1)
    writing.join()
    assert bytes(kept) == content


def tag_of(number):
    return number << 31 | TAG


def receive(group, num_bytes, number):
    kept, address = target(num_bytes)
    group.start([], [(1, address, num_bytes)], tag_of(number))
    return finish(group), bytes(kept)


@pytest.mark.parametrize("left_bytes", [0, *SIZES])
@pytest.mark.parametrize("num_bytes", [0, 100, 20_000])
@pytest.mark.parametrize("cut", [0, 7, 16, 17, 99])
def test_what_arrives_of_skipped_exchanges_is_dropped(ends, left_bytes, num_bytes, cut):
    """Two are skipped, the second in the middle of a message, whose rest comes later; then a message of the next."""
    group, other = ends
    content = os.urandom(num_bytes)
    group.skip(1)
    message = header(tag_of(2), left_bytes) + os.urandom(left_bytes)
    other.sendall(message[:cut])
    _kept, address = target(left_bytes)
    group.start([], [(1, address, left_bytes)], tag_of(2))
    assert group.finish()[0] == ("pending" if cut < len(message) else "done")
    group.interrupt()
    group.skip(2)
    writing = written_by(
        other,
        message[cut:] + header(tag_of(1), left_bytes) + bytes(left_bytes) + header(tag_of(3), num_bytes) + content,
    )
    assert receive(group, num_bytes, 3) == (("done", -1), content)
    writing.join()


@pytest.mark.parametrize("num_bytes", [0, 100, 20_000])
@pytest.mark.parametrize("expected_bytes", [0, 50, 16384, 20_000])
def test_a_message_of_a_later_exchange_is_kept_where_its_own_is_skipped(ends, num_bytes, expected_bytes):
    group, other = ends
    content = os.urandom(num_bytes)
    writing = written_by(other, header(tag_of(2), num_bytes) + content + header(tag_of(3), num_bytes) + content)
    assert receive(group, expected_bytes, 1)[0] == ("mismatch", 1)
    group.skip(1)
    assert receive(group, num_bytes, 2) == (("done", -1), content)
    assert receive(group, num_bytes, 3) == (("done", -1), content)
    writing.join()


def test_a_message_that_has_gone_half_goes_to_its_end_from_a_copy(ends):
    group, other = ends
    num_bytes = 8_000_000
    sent = ctypes.create_string_buffer(bytes(range(250)) * (num_bytes // 250), num_bytes)
    group.start([(1, ctypes.addressof(sent), num_bytes)], [], tag_of(1))
    assert group.finish() == ("pending", 1)
    group.skip(1)
    expected = header(tag_of(1), num_bytes) + sent.raw + header(tag_of(2), 4) + b"next"
    ctypes.memset(ctypes.addressof(sent), 0, num_bytes)
    following = ctypes.create_string_buffer(b"next", 4)
    group.start([(1, ctypes.addressof(following), 4)], [], tag_of(2))
    found = bytearray()

    def read():
        while len(found) < len(expected):
            found.extend(other.recv(1 << 20))

    reading = threading.Thread(target=read)
    reading.start()
    assert finish(group) == ("done", -1)
    reading.join()
    assert found == expected


def test_a_message_of_an_exchange_before_that_was_not_skipped_is_wrong(ends):
    group, other = ends
    other.sendall(header(tag_of(2), 4) + b"left")
    group.skip(1)
    assert receive(group, 4, 3) == (("mismatch", 1), bytes([UNTOUCHED]) * 4)
