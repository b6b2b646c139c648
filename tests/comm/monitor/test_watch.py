"""Whom a wait that takes too long names: those who have not said that they wait as well."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tritondt.comm.monitor.flight import ExchangeRecord
from tritondt.comm.monitor.watch import GRACE_S, Wait, Watch
from tritondt.comm.packing.messages import Slice
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.comm.store.notices import Notices, Waiting

KEY, SEQUENCE, FINGERPRINT, TIMEOUT_S = "communicator", 3, 7, 0.5
RANK, RANKS = 2, (0, 1, 2, 3)


class Ranks:
    """One rank's watch, and notices of the others, by one store."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.clients = [StoreClient(store, StoreHost(store)) for _ in RANKS]
        self.watch = Watch(self.clients[RANK], RANK)

    def say_that_it_waits(self, rank: int) -> None:
        Notices(self.clients[rank], rank).publish(KEY, Waiting(SEQUENCE, FINGERPRINT, "an exchange"))

    def waited_for(self, *peers: int) -> Wait:
        """A wait that has come to its end."""
        ended = threading.Event()
        nowhere: Any = None  # a record without a site asks no recorder
        record = ExchangeRecord(FINGERPRINT, "an exchange", 0, nowhere)
        wait = Wait(KEY, SEQUENCE, record, RANKS, lambda _: ended.set(), TIMEOUT_S)
        wait.messages = ([Slice(peer, None, 0, 8) for peer in peers],)
        self.watch.begin(wait)
        assert ended.wait(20)
        self.watch.end(wait)
        return wait


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.watch.close()
    for client in made.clients:
        client.close()


def test_one_that_is_silent_is_named_at_the_timeout(ranks: Ranks) -> None:
    ranks.say_that_it_waits(0)
    wait = ranks.waited_for(0, 1)
    assert time.monotonic() - wait.started < TIMEOUT_S + GRACE_S
    assert "for rank 1 in an exchange" in str(wait.reason)


def test_one_that_begins_to_wait_later_is_not_named(ranks: Ranks) -> None:
    late = threading.Timer(TIMEOUT_S + GRACE_S / 2, ranks.say_that_it_waits, [0])
    late.start()
    wait = ranks.waited_for(0, 1)
    late.join()
    assert "for rank 1 in an exchange" in str(wait.reason)


def test_all_that_stay_silent_are_named(ranks: Ranks) -> None:
    ranks.say_that_it_waits(3)
    wait = ranks.waited_for(0, 1, 3)
    assert time.monotonic() - wait.started >= TIMEOUT_S + GRACE_S
    assert "for ranks 0, 1 in an exchange" in str(wait.reason)
