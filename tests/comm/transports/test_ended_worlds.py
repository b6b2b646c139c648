"""What is left of communicators when their world has ended, whatever was exchanged: nothing."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.descriptors import beyond, kinds
from tests.harness.gloo_ranks import GlooRanks
from tests.ops.sharded import distribute
from tritondt.comm.transports.base import PackedCommunicator
from tritondt.redistribution.rows import RowCounts, exchange_rows


def exchange_all_kinds() -> None:
    """Every kind of transfer that is compiled and kept, and one that is not."""
    mesh = T.Mesh((4,))
    whole = T.distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [T.Shard(0)])
    whole.redistribute(placements=[T.Replicate()])
    whole.redistribute(placements=[T.Shard(1)], async_op=True).wait()
    T.redistribute_many([(whole, [T.Shard(1)]), (whole, [T.Replicate()])])
    other: Any = distribute(torch.ones(4, 3), mesh, "P")
    (other.redistribute(placements=[T.Shard(0)]) + 1).full_tensor()
    rank = torch.distributed.get_rank()
    counts = RowCounts(tuple((1, 0, 2, 1) for _ in range(4)))
    exchange_rows(torch.full((4, 2), float(rank)), counts, mesh)


def left_behind(rank: int) -> tuple[list[int], list[str]]:
    """Communicators that are alive after each of three worlds, and descriptors that have come since the first."""
    alive, before = [], Counter[str]()
    for _ in range(3):
        exchange_all_kinds()
        T.close()
        gc.collect()
        alive.append(sum(issubclass(type(found), PackedCommunicator) for found in gc.get_objects()))
        before = before or kinds()
    return alive, beyond(before)


@pytest.mark.parametrize("transport", ["sockets", "shared-memory"])
def test_nothing_is_left_of_worlds_that_were_closed(
    four_ranks: GlooRanks, four_shared_memory_ranks: GlooRanks, transport: str
) -> None:
    ranks = four_shared_memory_ranks if transport == "shared-memory" else four_ranks
    for alive, descriptors in ranks.run(left_behind):
        assert alive == [0, 0, 0]
        assert descriptors == []
