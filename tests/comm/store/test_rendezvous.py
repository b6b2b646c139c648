"""Rendezvous of ranks in a store that is slow, and one to which a rank does not come."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tritondt.comm.store.client import PATIENCE_S, StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.comm.store.rendezvous import Rendezvous
from tritondt.errors import PeerError, WorldError


class SlowStore:
    """A double of a store on a busy machine: the first `num_slow` looks for failures take longer than patience."""

    def __init__(self, store: dist.Store, num_slow: int) -> None:
        self._store, self.num_slow = store, num_slow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        """Whether the keys are there."""
        if "/failed/" in keys[0] and self.num_slow > 0:
            self.num_slow -= 1
            time.sleep(PATIENCE_S + 0.1)
        return self._store.check(keys)


def rendezvous_in(store: Any, timeout_s: float) -> Rendezvous:
    return Rendezvous(StoreClient(store, StoreHost(dist.HashStore())), "made", (0, 1), timeout_s)


def test_a_slow_store_is_waited_for_within_the_timeout_of_the_rendezvous() -> None:
    store = dist.HashStore()
    slow = SlowStore(store, num_slow=1)
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(rendezvous_in(slow, 60.0).gather, 0)
        while slow.num_slow:  # the first has come, and looks whether the other has failed
            time.sleep(0.001)
        rendezvous_in(store, 60.0).gather(1)
        waits.result()


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(PeerError, match=r"^rank 0 waited 0\.1 s for ranks \[1\] to connect$"):
        rendezvous_in(dist.HashStore(), 0.1).gather(0)


def test_of_ranks_that_have_refused_one_that_came_too_late_hears_once() -> None:
    store = dist.HashStore()
    before = rendezvous_in(store, 1.0)
    for rank in (1, 2):
        before.refuse(rank, WorldError(f"rank {rank} has another secret"))
    before.end()
    for rank in (1, 2):  # they know why, though one alone is named to others
        rendezvous_in(store, 1.0).raise_missed(rank)
    with pytest.raises(PeerError, match=r"^rank 1 had refused to connect when rank 0 came: .*another secret$"):
        rendezvous_in(store, 1.0).raise_missed(0)
    rendezvous_in(store, 1.0).raise_missed(0)
