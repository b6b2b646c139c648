"""Messages of two ranks on the CPU: order, tags, whoever sends first, other sizes, and ranks that are lost or late."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import backend_ranks
from tests.process_group.collectives import own

RanksOf = Callable[[str, int], GlooRanks]
LARGE = 400_000  # float32 that no buffer of a socket takes


@pytest.fixture
def ranks(ranks_of: RanksOf) -> GlooRanks:
    return ranks_of("sockets", 3)


@pytest.fixture
def mortal_ranks() -> Iterator[GlooRanks]:
    with backend_ranks("sockets", 3, TRITONDT_TIMEOUT="60") as started:
        yield started


def cross_collectives(rank: int) -> None:
    """Long messages under way while all ranks are in a collective, received behind it in another order."""
    if rank == 0:
        works: list[Any] = [dist.isend(own(tag, LARGE), 1, tag=tag) for tag in (1, 2)]
        dist.all_reduce(torch.ones(1))
        for work in works:
            work.wait()
        assert works[0].is_success()
        return
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        for tag in (2, 1):
            found = torch.zeros(2 * LARGE)[::2]
            assert dist.recv(found, 0, tag=tag) == 0
            torch.testing.assert_close(found, own(tag, LARGE), rtol=0, atol=0)


def test_messages_pass_collectives(ranks: GlooRanks) -> None:
    ranks.run(cross_collectives)


def send_others(rank: int) -> str:
    """A message of another dtype, of another length, to itself; then right ones."""
    told = ""
    if rank == 0:
        for given in (torch.ones(4, dtype=torch.int32), torch.ones(5), torch.arange(4.0)):
            dist.send(given, 1)
    if rank == 1:
        found = torch.zeros(4)
        for _ in range(2):
            with pytest.raises(T.MismatchError) as error:
                dist.recv(found, 0)
            told += str(error.value) + "\n"
        dist.recv(found, 0)
        torch.testing.assert_close(found, torch.arange(4.0), rtol=0, atol=0)
    group: Any = dist.group.WORLD
    with pytest.raises(T.WorldError, match="is of a rank to itself; copy the tensor"):
        group.send([torch.ones(1)], rank, 0).wait()
    with pytest.raises(T.WorldError, match="names rank 7 of the process group; it has ranks 0 to 2"):
        group.send([torch.ones(1)], 7, 0)
    return told


def test_other_sizes_and_dtypes_are_told(ranks: GlooRanks) -> None:
    text = (
        "rank 0 sent {} to rank 1, which asked for 16 bytes of float32 in a message of 4 float32 from rank 0 to rank 1"
    )
    told = ranks.run(send_others)[1]
    assert text.format("16 bytes of int32") in told
    assert text.format("20 bytes of float32") in told


def receive_of_nobody(rank: int) -> list[str]:
    """A receive, one from any rank and a long send that nobody answers; then the group goes on."""
    group: Any = dist.new_group(backend="tritondt", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1), group=group)
    told = []
    if rank == 0:
        group.set_timeout(timedelta(seconds=2))
        works = [group.recv([torch.ones(1)], 2, 0), group.recv_anysource([torch.ones(1)], 3)]
        works.append(group.send([torch.ones(LARGE)], 1, 0))
        for work in works:
            with pytest.raises(T.PeerError) as error:
                work.wait()
            told.append(str(error.value))
        group.set_timeout(timedelta(seconds=60))
    dist.barrier(group)
    if rank == 0:
        dist.send(torch.ones(1), 2, group=group)
    if rank == 2:
        dist.recv(torch.ones(1), 0, group=group)
    dist.destroy_process_group(group)
    return told


def test_messages_that_do_not_come(ranks: GlooRanks) -> None:
    named, anybody, sent = ranks.run(receive_of_nobody)[0]
    assert named.startswith(
        "rank 0 waited 2 s for rank 2 in a message of 1 float32 from rank 2 to rank 0 and got no answer"
    )
    assert anybody.startswith(
        "rank 0 waited 2 s for one of ranks [1, 2] in a message of 1 float32 from any rank to rank 0"
    )
    assert sent.startswith(f"rank 0 waited 2 s for rank 1 in a message of {LARGE} float32 from rank 0 to rank 1")


def lose_one(rank: int, is_connected: bool) -> str:
    """Rank 2 is killed while rank 0 waits for its message, and rank 1 sends to it."""
    if is_connected:
        if rank == 2:
            dist.send(torch.ones(1), 0)
            dist.recv(torch.ones(1), 1)
        elif rank == 0:
            dist.recv(torch.ones(1), 2)
        else:
            dist.send(torch.ones(1), 2)
    dist.barrier()
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    work: Any = dist.irecv(torch.ones(1), 2) if rank == 0 else dist.isend(torch.ones(25 * LARGE), 2)
    with pytest.raises(T.PeerError) as error:
        work.wait()
    assert time.monotonic() - began < 50  # before the timeout
    return str(error.value)


@pytest.mark.parametrize("is_connected", [True, False])
def test_who_is_killed_is_named(mortal_ranks: GlooRanks, is_connected: bool) -> None:
    found = mortal_ranks.outcomes(lose_one, is_connected)
    assert all("rank 2 " in str(text) for text in found[:2]), found


def meet_under_watch(rank: int) -> list[str]:
    """Monitored barriers: all come; rank 2 does not, by the first name, and nobody but the first."""
    group: Any = dist.new_group(backend="tritondt")
    group.monitored_barrier()
    told = []
    for names_all in (False, True):
        if rank == 0 or (rank == 1 and not names_all):
            with pytest.raises(T.PeerError) as error:
                group.monitored_barrier(timedelta(seconds=2), names_all)
            told.append(str(error.value))
    dist.barrier()
    dist.destroy_process_group(group)
    return told


def test_a_monitored_barrier_names_who_does_not_come(ranks: GlooRanks) -> None:
    first, second, third = ranks.run(meet_under_watch)
    late = "rank 0 waited 2 s for rank 2 in a monitored barrier"
    assert first == [late, "rank 0 waited 2 s for ranks [1, 2] in a monitored barrier"]
    assert (second, third) == ([late], [])


def has_gloo(rank: int) -> list[Any]:
    group: Any = dist.group.WORLD
    threads = [open(f"/proc/self/task/{each}/comm").read().strip() for each in os.listdir("/proc/self/task")]  # noqa: PTH208, PTH123, SIM115
    return [type(group._router._cpu_group).__name__, [name for name in threads if "gloo" in name]]


def test_nothing_connects_by_gloo(mortal_ranks: GlooRanks) -> None:
    mortal_ranks.run(cross_collectives)
    assert mortal_ranks.run(has_gloo) == [["CpuGroup", []]] * 3
