"""Keys of its own for each start of ranks on a store that outlives them, whoever comes first and whoever has died."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tritondt import _importing
from tritondt.comm.store import starts
from tritondt.errors import PeerError, WorldError

NUM_RANKS = 3


class Torchrun:
    """A store that outlives its ranks; each call starts them, as threads with a client each."""

    def __init__(self) -> None:
        self._held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client(self, timeout_s: float = 60) -> dist.TCPStore:
        """What a rank gets from torch's rendezvous."""
        # To connect may take long on a busy machine, whatever the rank's timeout is.
        found = dist.TCPStore("127.0.0.1", self._held.port, is_master=False, timeout=timedelta(seconds=60))
        found.set_timeout(timedelta(seconds=timeout_s))
        return found

    def start(self, body: Callable[[Any, int], Any], ranks: Any = range(NUM_RANKS), timeout_s: float = 60) -> list[Any]:
        """What `body(store, rank)` gives on each, in their order."""

        def run(rank: int) -> Any:
            return body(starts.own_keys(self.client(timeout_s), rank, NUM_RANKS), rank)

        with ThreadPoolExecutor(NUM_RANKS) as threads:
            return [found.result() for found in [threads.submit(run, rank) for rank in ranks]]


def _meet(store: Any, rank: int) -> list[bytes]:
    """What ranks read of each other, which is what they have written in this start, or nothing."""
    before = [store.check([f"{other}"]) for other in range(NUM_RANKS)] if rank == 0 else []
    store.set(f"{rank}", f"{threading.get_ident()}")
    found = [store.get(f"{other}") for other in range(NUM_RANKS)]
    assert rank != 0 or not before[0]
    return found


def test_each_start_has_keys_of_its_own():
    torchrun, seen = Torchrun(), []
    for _ in range(5):
        first, *others = torchrun.start(_meet)
        assert others == [first] * (NUM_RANKS - 1)
        seen.append(torchrun.start(lambda store, rank: store.check(["0"])))
    assert seen == [[False] * NUM_RANKS] * 5


def test_ranks_that_come_before_the_first_one_wait_for_its_new_name():
    """They answer to the name of a start that is over, in which dead ranks of theirs were heard."""
    torchrun = Torchrun()
    torchrun.start(_meet)
    old = torchrun.client().get("tritondt/start")
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        early = [threads.submit(torchrun.start, lambda store, rank: store.get("who"), [rank]) for rank in (1, 2)]
        # Both have answered to the old name when the first one comes.
        dead = {rank: torchrun.client().get(f"{old.decode()}/confirmed/{rank}") for rank in (1, 2)}
        while any(torchrun.client().get(f"{old.decode()}/answer/{rank}") == dead[rank] for rank in (1, 2)):
            assert not any(found.done() for found in early)
        torchrun.start(lambda store, rank: store.set("who", "new"), [0])
        assert [found.result() for found in early] == [[b"new"], [b"new"]]


@pytest.mark.extended
@pytest.mark.parametrize(("coming", "missing"), [((0, 2), "ranks [1]"), ((1,), "rank 0")])
def test_ranks_that_do_not_come_are_named(coming, missing):
    torchrun = Torchrun()
    torchrun.start(_meet)
    sentence = re.escape(f"waited 0.5 s in init_process_group for {missing}; under torchrun all ranks import tritondt")
    with pytest.raises(PeerError, match=sentence):
        torchrun.start(_meet, coming, timeout_s=0.5)


def test_ranks_that_lack_the_package_are_named_on_all_that_have_it():
    def told(store: dist.TCPStore, rank: int) -> str:
        with pytest.raises(PeerError) as caught:
            starts.own_keys(store, rank, NUM_RANKS)
        return str(caught.value).partition(";")[0]

    torchrun = Torchrun()
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        found = list(threads.map(lambda rank: told(torchrun.client(0.5), rank), (0, 2)))
    assert found == [
        "rank 0 waited 0.5 s in init_process_group for ranks [1]",
        "rank 2 waited 0.5 s in init_process_group for ranks [1], as rank 0 does",
    ]


def test_a_world_of_a_restart_without_keys_of_its_own_is_refused(monkeypatch):
    store = Torchrun().client()
    torchs, named = dist.PrefixStore("default_pg", store), starts.own_keys(store, 0, 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(_importing, "came_late", True)
    starts.check_keys(torchs)  # a first start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    starts.check_keys(dist.PrefixStore("default_pg", named))
    with pytest.raises(WorldError, match=r"started these ranks again \(1\).*import tritondt before init_process_group"):
        starts.check_keys(torchs)
    monkeypatch.setenv("MASTER_PORT", str(store.port + 1))  # a store of the program's own
    starts.check_keys(torchs)
