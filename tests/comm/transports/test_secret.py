"""Connections of ranks that share a secret: whoever reads and writes their store, but lacks it, gets no place.

A stranger here has all that the store says: addresses, both tokens of every rank, and may change them.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tritondt as T
from tests.comm.transports.test_shared_memory import set_to
from tests.comm.transports.test_tcp_connect import Places, assert_connected, places
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.secret import NONCE_BYTES, PROOF_BYTES, Connecting, Secret, draw

SECRET, OTHER = Secret(b"a secret of these ranks"), Secret(b"another, that a stranger has made up")
ANSWER_BYTES = 16 + NONCE_BYTES + PROOF_BYTES


def test_ranks_that_share_a_secret_connect() -> None:
    with places(secret=SECRET) as made:
        for place in (1, 2, 0):
            made.start(place)
        made.join()
        assert not made.errors
        assert_connected(made.found)


@pytest.fixture
def listening() -> Iterator[Places]:
    """Places of which the first two wait for the third, whose place a stranger wants."""
    with places(secret=SECRET) as made:
        made.announce(2)
        made.start(0)
        made.start(1)
        yield made


def told(made: Places, place: int) -> tuple[tuple[str, int], str]:
    """Where a place listens, and the token that it wants to see."""
    made.store.wait([f"address/{place}"])
    reached, token, _ = json.loads(made.store.get(f"address/{place}"))
    return tuple(reached["near"]), token


def greeting(token: str, nonce: bytes) -> bytes:
    return bytes.fromhex(token) + (2).to_bytes(4, "little") + nonce


def received(found: socket.socket, count: int) -> bytes:
    found.settimeout(20)
    return found.recv(count, socket.MSG_WAITALL)


def nothing(*_: Any) -> bytes:
    return bytes(PROOF_BYTES)


def proof_of_the_other_end(answer: bytes, _: Connecting) -> bytes:
    return answer[-PROOF_BYTES:]


def proof_by_another_secret(_: bytes, connecting: Connecting) -> bytes:
    return OTHER.proof("caller", connecting)


def proof_of_another_call(_: bytes, connecting: Connecting) -> bytes:
    """The proof that the rank itself would have shown, had it been asked with other numbers."""
    return SECRET.proof("caller", replace(connecting, caller_nonce=draw(), called_nonce=draw()))


@pytest.mark.parametrize("shown", [nothing, proof_of_the_other_end, proof_by_another_secret, proof_of_another_call])
def test_who_knows_all_that_the_store_says_takes_no_place(
    listening: Places, shown: Callable[[bytes, Connecting], bytes]
) -> None:
    address, token = told(listening, 0)
    nonce = draw()
    with socket.create_connection(address, 20) as stranger:
        stranger.sendall(greeting(token, nonce))
        answer = received(stranger, ANSWER_BYTES)
        connecting = Connecting(2, 0, token, address, nonce, answer[16:-PROOF_BYTES])
        stranger.sendall(shown(answer, connecting))
        assert received(stranger, 1) == b""  # turned away
    listening.start(2)
    listening.join()
    assert not listening.errors
    assert_connected(listening.found)


def test_a_greeting_without_a_number_is_not_answered(listening: Places) -> None:
    """As a rank without a secret calls: nothing that it shows is enough."""
    address, token = told(listening, 0)
    with socket.create_connection(address, 20) as stranger:
        stranger.sendall(greeting(token, b""))
        stranger.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stranger.recv(1)
    listening.start(2)
    listening.join()
    assert_connected(listening.found)


@pytest.mark.parametrize("secret", [None, OTHER])
def test_a_stranger_who_has_put_its_own_address_into_the_store_is_found_out(secret: Secret | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, places(secret=SECRET) as made:
        host, port = server.getsockname()
        made.announce(0)
        made.announce(2)
        made.store.set("address/0", json.dumps([{"near": [host, port]}, "00" * 16, "11" * 16]))
        made.start(1)
        found, _ = server.accept()
        nonce, own = received(found, 20 + NONCE_BYTES)[20:], draw()
        connecting = Connecting(1, 0, "00" * 16, (host, port), nonce, own)
        proof = bytes(PROOF_BYTES) if secret is None else secret.proof("called", connecting)
        found.sendall(bytes.fromhex("11" * 16) + own + proof)
        made.join()
        assert str(made.errors[1]) == (
            f"rank 7 could not connect to rank 4: whoever answers at 127.0.0.1, port {port}, does not know the secret "
            "of this job (TRITONDT_SECRET)"
        )
        assert received(found, 1) == b""  # no proof of the caller's
        found.close()


def test_a_stranger_who_passes_on_what_both_ranks_say_is_found_out() -> None:
    """Between them it would read and change all that follows; it is called at another address than it calls."""
    with socket.create_server(("127.0.0.1", 0)) as server, places(secret=SECRET, timeout_s=1.5) as made:
        made.announce(1)
        made.announce(2)
        made.wanted = {0: (1,), 1: (0,)}
        made.start(0)
        address, _ = told(made, 0)
        said = json.loads(made.store.get("address/0"))
        made.store.set("address/0", json.dumps([{"near": server.getsockname()}, *said[1:]]))
        made.start(1)
        called, _ = server.accept()
        with called, socket.create_connection(address, 20) as calling:
            calling.sendall(received(called, 20 + NONCE_BYTES))
            called.sendall(received(calling, ANSWER_BYTES))
            assert received(called, 1) == b""
        made.join_of(1)
        assert "does not know the secret of this job" in str(made.errors[1])
        made.join()


def test_two_ranks_prove_nothing_to_each_other_twice() -> None:
    """No number that goes over a connection is of use on the next one."""
    seen = []
    for _ in range(2):
        connecting = Connecting(1, 0, "00" * 16, ("127.0.0.1", 4000), draw(), draw())
        seen += [SECRET.proof("caller", connecting), SECRET.proof("called", connecting)]
    assert len(set(seen)) == 4


SAYS = "; set TRITONDT_SECRET or TRITONDT_SECRET_FILE to the same on all ranks, or on none"


@pytest.mark.in_core(3)
@pytest.mark.parametrize("own", [None, "another secret of rank 1", "short"])
@pytest.mark.parametrize(("transport", "late"), [("shared-memory", 1), ("sockets", 2), ("gloo", 0)])
def test_a_rank_with_another_secret_is_named_on_all_ranks(
    four_shared_memory_ranks: GlooRanks, transport: str, late: int, own: str | None
) -> None:
    """One rank comes when the others have refused and left."""
    texts = four_shared_memory_ranks.run(connect_with_secret, transport, own, late, timeout_s=40)
    for rank, text in enumerate(texts):
        assert text.startswith("rank ") if own != "short" or rank != 1 else text.startswith("TRITONDT_SECRET is"), text
        assert "rank 1" in text or rank == 1, text
        if own == "short":
            assert "TRITONDT_SECRET is set to a secret of 5 bytes; allowed are 16 to 4096" in text, text
            continue
        what = "no secret" if own is None else "another secret than"
        assert what in text or (own is None and "and rank 1 has none" in text), text
        assert text.endswith(SAYS), text


def connect_with_secret(rank: int, transport: str, own: str | None, late: int) -> str:
    T.close()
    secret = own if rank == 1 else "the secret of the others"
    with set_to("TRITONDT_TRANSPORT", transport), set_to("TRITONDT_SECRET", secret):
        mesh = T.Mesh((4,))
        time.sleep(0.5 * (rank == late))
        with pytest.raises((T.WorldError, T.PeerError)) as caught:
            T.DTensor.from_local(torch.ones(1), mesh, [T.Shard(0)]).full_tensor()
    T.abort()
    return str(caught.value)


@pytest.mark.in_core(1)
@pytest.mark.parametrize("transport", ["shared-memory", "sockets", "gloo"])
def test_ranks_with_the_same_secret_exchange(
    four_shared_memory_ranks: GlooRanks, tmp_path: Path, transport: str
) -> None:
    """One has it in a file, the others in the variable."""
    file = tmp_path / "secret"
    file.write_text("the secret of all of them\n")
    file.chmod(0o600)
    assert four_shared_memory_ranks.run(exchange_with_secret, transport, str(file)) == [[0.0, 1.0, 2.0, 3.0]] * 4


def exchange_with_secret(rank: int, transport: str, file: str) -> list[float]:
    T.close()
    name, value = ("TRITONDT_SECRET_FILE", file) if rank == 1 else ("TRITONDT_SECRET", "the secret of all of them")
    with set_to("TRITONDT_TRANSPORT", transport), set_to(name, value):
        found = T.DTensor.from_local(torch.full((1,), float(rank)), T.Mesh((4,)), [T.Shard(0)]).full_tensor()
        T.close()
    values: list[float] = found.tolist()
    return values
