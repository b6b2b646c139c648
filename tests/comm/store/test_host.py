"""What errors say of a store that does not answer: its address, and the rank that holds it where one does."""

import gc
import os
import re
import signal
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.ops.sharded import distribute
from tritondt.comm.store import host
from tritondt.comm.store.client import SilentStoreError, StoreClient
from tritondt.comm.store.host import StoreHost

FREE_PORT = 0
FULL = torch.arange(15.0).view(5, 3)


@pytest.fixture
def held() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", FREE_PORT, is_master=True, wait_for_workers=False)


def client_of(store: dist.TCPStore) -> dist.Store:
    return dist.PrefixStore("inner", dist.TCPStore("127.0.0.1", store.port, is_master=False))


def host_of_another_process(store: dist.Store) -> StoreHost:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_listens_here", lambda port: False)
        return StoreHost(store)


def test_who_holds_the_store_is_known_once_it_has_said_so(held: dist.TCPStore) -> None:
    client = client_of(held)
    there, here = host_of_another_process(client), StoreHost(dist.PrefixStore("inner", held))
    assert (here.is_here, there.is_here) == (True, False)
    for who, rank in ((there, 1), (here, 2)):
        who.announce(client, rank)
        there.look_up(client)
        here.look_up(client)
    address = f"127.0.0.1:{held.port}"
    assert str(here) == str(there) == f"the store at {address}, which rank 2 holds,"


def test_a_store_that_no_rank_holds_has_an_address(held: dist.TCPStore) -> None:
    client = client_of(held)
    store_host = host_of_another_process(client)
    store_host.announce(client, 0)
    store_host.look_up(client)
    assert str(store_host) == f"the store at 127.0.0.1:{held.port}"


def test_a_store_of_another_kind_has_none() -> None:
    store_host = StoreHost(dist.HashStore())
    assert (str(store_host), store_host.is_here) == ("the store", False)


def test_silence_and_absence_are_told_apart(held: dist.TCPStore) -> None:
    store_host = StoreHost(held)
    store_client = StoreClient(held, store_host)
    with pytest.raises(
        SilentStoreError, match=rf"^the store at 127\.0\.0\.1:{held.port} has not answered for 0\.05 s$"
    ) as told:
        store_client.call(lambda store: time.sleep(0.5), 0.05)
    assert store_client.silence(told.value) == f"and {told.value}"
    assert store_client.silence(RuntimeError("Broken pipe")) == f"nor does {store_host} answer (Broken pipe)"
    store_client.close()


@pytest.fixture(params=["sockets", "gloo"])
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(3, {"TRITONDT_TIMEOUT": "2", "TRITONDT_TRANSPORT": request.param}) as found:
        yield found


def meet(rank: int) -> None:
    distribute(FULL, T.Mesh((3,)), "S0").full_tensor()


def wait_beside_a_stopped_store(rank: int, holder: int, told: Path) -> str:
    """Rank 1 waits for rank 2, which is late; the process of rank 0 has stopped, and with it the store."""
    text = ""
    if rank == 1:
        x = distribute(FULL, T.Mesh((3,)), "S0")
        with pytest.raises(T.PeerError) as caught:
            x.full_tensor()
        text = str(caught.value)
        told.touch()
        os.kill(holder, signal.SIGCONT)
    end = time.monotonic() + 40
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.05)
    T.abort()
    return text


@pytest.mark.extended
def test_who_waits_for_another_names_the_rank_that_has_stopped_with_the_store(ranks: GlooRanks, tmp_path: Path) -> None:
    ranks.run(meet)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    text = ranks.run(wait_beside_a_stopped_store, ranks.pids[0], tmp_path / "told")[1]
    assert re.search(
        r"rank 1 waited \d\.\d s for rank 2 in step 1 of 1 .* and got no answer; the timeout is 2 s "
        r"\(TRITONDT_TIMEOUT\); and the store at 127\.0\.0\.1:\d+, which rank 0 holds, has not answered for 1 s",
        text,
    ), text


def test_an_error_of_the_store_keeps_no_frame_that_it_went_through() -> None:
    """Reference counts alone free what a caller had: a world behind its store kept 8 descriptors until a collection."""
    store = dist.HashStore()
    client = StoreClient(store, StoreHost(store))

    def ask() -> weakref.ref[Any]:
        kept = torch.nn.Module()
        with pytest.raises(dist.DistError):
            client.call(lambda store: store.wait(["absent"], timedelta(milliseconds=1)))
        return weakref.ref(kept)

    gc.collect()
    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()
        client.close()
