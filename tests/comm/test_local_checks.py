"""One rank of three refuses by a check of its own, before an exchange: the two others hear of it at once.

All go on then in the same world: over rank threads, and as processes through shared memory.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tritondt as T
from tests.comm.refused_calls import CALLS, OF_PROCESSES, SIZE, mesh
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.parallel import (
    context_parallel_flex_attention,
    context_parallel_shard,
    context_parallel_unshard,
    ulysses_attention,
)

WRONG = 1
# Only a hang reaches it: ranks hear within some 2 s, on a machine that does nothing else.
TIMEOUT_S = 100


def refuse(rank: int, name: str) -> str:
    T.ones(SIZE, device_mesh=mesh(), placements=[T.Shard(0)]).full_tensor()  # all are connected
    torch.manual_seed(rank)
    try:
        (CALLS | OF_PROCESSES)[name](rank, rank == WRONG)
        text = "no error"
    except Exception as error:  # noqa: BLE001  a user's own, too
        text = f"{type(error).__name__}: {error}"
    for seed in range(3):  # and the same world goes on
        found = T.DTensor.from_local(torch.full((1,), 1.0 * rank + seed), mesh(), [T.Shard(0)]).full_tensor()
        torch.testing.assert_close(found, torch.arange(3.0) + seed, rtol=0, atol=0)
    return text


def check(told: list[str]) -> None:
    assert told[WRONG] != "no error"
    for rank in (0, 2):
        assert "the timeout is" not in told[rank]
        assert "will never answer" not in told[rank]
        # The reason is that of the rank at fault; of what it gave all raise the same where all have seen it.
        assert f"rank {WRONG}" in told[rank] or told[rank] == told[WRONG], told


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(SIZE, {"TRITONDT_TIMEOUT": str(TIMEOUT_S)}) as found:
        yield found


@pytest.mark.parametrize("length", [0, 1, 7])
@pytest.mark.filterwarnings("ignore")  # torch's, for attention that is not compiled
def test_attention_exchanges_as_often_as_a_rank_refuses(length: int) -> None:
    def counts(rank: int) -> list[int]:
        part = context_parallel_shard(torch.ones(1, 3, length, 4), mesh(), 2)
        communicator: Any = world.current().communicator(mesh().ranks)
        found = [communicator.sequence]
        for attend in (ulysses_attention, context_parallel_flex_attention):
            attend(part, part, part, mesh(), length=length)
            found.append(communicator.sequence)
        context_parallel_unshard(part, mesh(), 2, length=length)
        return [*found, communicator.sequence]

    for before, *after in run_ranks(SIZE, counts):
        assert [each - before for each in after] == [2, 3, 4]


@pytest.mark.in_core(len(CALLS))
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_the_others_hear_of_it(name: str) -> None:
    check(run_ranks(SIZE, lambda rank: refuse(rank, name)))


@pytest.mark.in_core(4)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_ranks_of_two_hosts_hear_of_it(name: str) -> None:
    check(run_ranks(SIZE, lambda rank: refuse(rank, name), hosts=(0, 0, 1)))


@pytest.mark.in_core(4)
@pytest.mark.parametrize("name", CALLS | OF_PROCESSES)
def test_processes_hear_of_it(ranks: GlooRanks, name: str) -> None:
    check(ranks.run(refuse, name, timeout_s=2 * TIMEOUT_S))
