"""Machines of ranks that have announced themselves, and errors that name those who have not, or will not."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from tritondt.comm.processes import machine
from tritondt.comm.store import presence
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.errors import PeerError


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def client(store):
    made = StoreClient(store, StoreHost(store))
    yield made
    made.close()


def test_machines_are_those_of_the_ranks_that_are_asked_for(store, client):
    for rank in (3, 5):
        presence.announce(store, rank)
    assert presence.machines(client, 3, (3, 5), timedelta(seconds=60)) == [machine()] * 2


def test_a_rank_that_has_not_said_on_which_machine_it_is_is_named_when_the_time_is_over(store, client):
    presence.announce(store, 3)
    late = (
        r"^rank 3 waited 0\.2 s for ranks \[5, 6\] to say on which machines they are; they say it when they initialise"
    )
    with pytest.raises(PeerError, match=late):
        presence.machines(client, 3, (3, 5, 6), timedelta(seconds=0.2))


def test_a_rank_that_refuses_is_named_before_the_time_is_over(store, client):
    presence.announce(store, 3)
    presence.refuse(store, 5, ValueError("no secret"))
    refused = r"^rank 5 failed while rank 3 waited for its machine: ValueError: no secret$"
    with pytest.raises(PeerError, match=refused):
        presence.machines(client, 3, (3, 5), timedelta(seconds=600))
