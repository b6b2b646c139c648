"""Groups that share memory under callbacks that wait, timeouts that change, forks, and when many are made."""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.descriptors import beyond, kinds
from tests.harness.gloo_ranks import GlooRanks
from tests.process_group.collectives import own
from tests.process_group.test_shared_memory import communicator_of


@pytest.fixture
def ranks(ranks_of: Callable[[str, int], GlooRanks]) -> GlooRanks:
    return ranks_of("shared-memory", 4)


def wait_in_a_callback(rank: int) -> list[float]:
    """A callback of the first of two that are under way waits for the second."""
    first, second = own(rank), own(rank) * 2
    held = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    works: list[Any] = [dist.all_reduce(first, async_op=True)]

    def wait_for_second(future: Any) -> float:
        works[1].wait()
        return float(second[0])

    done = works[0].get_future().then(wait_for_second)
    works.append(dist.all_reduce(second, async_op=True))
    held.wait()
    found = done.wait()
    dist.all_reduce(last := own(rank))
    return [found, float(last[0])]


def test_callbacks_may_wait_for_what_was_issued_later(ranks: GlooRanks) -> None:
    assert ranks.run(wait_in_a_callback) == [[20.0, 10.0]] * 4


def time_out_apart(rank: int) -> list[float]:
    """The limits of two collectives, in seconds: one that is under way, and one that is waited for at once."""
    group: Any = dist.new_group(backend="tritondt", timeout=timedelta(seconds=60))
    dist.all_reduce(own(rank), group=group)
    communicator, limits = communicator_of(group), []
    exchange = communicator._exchange

    def note(*arguments: Any) -> None:
        limits.append(communicator._timeout_s)
        exchange(*arguments)

    communicator._exchange = note
    if rank:
        time.sleep(0.3)  # so that the first one is still under way where the second is asked for
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = timedelta(seconds=45), True
    work = group.allreduce([own(rank)], options)
    dist.all_reduce(own(rank), group=group)
    work.wait()
    del communicator._exchange
    dist.destroy_process_group(group)
    return limits


def test_each_has_the_timeout_that_it_was_issued_with(ranks: GlooRanks) -> None:
    assert ranks.run(time_out_apart) == [[45.0, 60.0]] * 4


def write_where_elements_share_memory(rank: int) -> tuple[str, list[float]]:
    """On one rank alone the first tensor of two cannot be written to; the others meet both exchanges, and go on."""
    first = torch.ones(1).expand(4) if rank == 1 else torch.ones(4)
    second, told = own(rank), ""
    try:
        dist.all_reduce_coalesced([first, second])
    except RuntimeError as error:
        told = str(error)
    dist.all_reduce(last := own(rank))
    return told, [float(first[0]), float(second[0]), float(last[0])]


def test_a_target_that_cannot_be_written_ends_nothing_for_the_others(ranks: GlooRanks) -> None:
    for rank, (told, found) in enumerate(ranks.run(write_where_elements_share_memory)):
        assert ("more than one element of the written-to tensor refers to a single memory" in told) == (rank == 1), told
        assert found == [1.0 if rank == 1 else 4.0, 10.0, 10.0]


def make_groups_again(rank: int) -> list[str]:
    """Descriptors that have come since two groups were made and destroyed, when more were, some of them aborted."""
    before = Counter[str]()
    for number in range(6):
        group: Any = dist.new_group(backend="tritondt")
        dist.all_reduce(own(rank), group=group)
        if number % 2:
            group.abort()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        if number < 2:
            before |= kinds()
    return beyond(before)


def test_groups_that_have_ended_leave_no_descriptors(ranks: GlooRanks) -> None:
    assert ranks.run(make_groups_again, timeout_s=100) == [[]] * 4


def destroy_in_a_child(rank: int) -> tuple[int, float]:
    """The exit status of a forked child that ends its groups, and a sum afterwards."""
    group: Any = dist.new_group(backend="tritondt")
    dist.all_reduce(own(rank), group=group)
    child = os.fork()
    if child == 0:
        try:
            group.abort()
            group.shutdown()
            with pytest.raises(T.WorldError, match="by a process forked from the one that made it"):
                dist.all_reduce(own(rank), group=group)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    dist.all_reduce(x := own(rank), group=group)
    dist.destroy_process_group(group)
    return os.waitstatus_to_exitcode(status), float(x[0])


def test_a_forked_child_may_end_its_groups(ranks: GlooRanks) -> None:
    assert ranks.run(destroy_in_a_child) == [(0, 10.0)] * 4
