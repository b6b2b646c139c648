"""Random collectives and messages on the CPU, on every transport, against what one process computes."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.harness.gloo_ranks import GlooRanks
from tests.process_group import random_collectives

RanksOf = Callable[[str, int], GlooRanks]


def run_seed(rank: int, seed: int, count: int) -> None:
    random_collectives.run(dist.group.WORLD, seed, count)


@pytest.mark.in_core(4)
@pytest.mark.parametrize(("over", "size"), [("sockets", 4), ("sockets", 3), ("shared-memory", 4), ("shared-memory", 2)])
def test_as_on_one_process(ranks_of: RanksOf, over: str, size: int) -> None:
    ranks_of(over, size).run(run_seed, size, 36, timeout_s=250)


@pytest.mark.soak
@pytest.mark.parametrize("over", ["sockets", "shared-memory"])
@pytest.mark.parametrize("seed", range(100, 110))
def test_more_seeds(ranks_of: RanksOf, over: str, seed: int) -> None:
    ranks_of(over, 4).run(run_seed, seed, 240, timeout_s=500)
