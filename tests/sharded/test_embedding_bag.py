"""embedding_bag with a sharded table: the bags of every rank, which may differ in number and length."""

import itertools
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tests.sharded.cuts import chunks, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import PeerError, PropagationError

# Bags of both ranks as lists of indices, of which the first rank has one more, and one without indices.
BAGS = ([[0, 8, 3], [], [2, 2]], [[5, 5, 1, 7], [6]])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean", "padding_idx": -7},
        {"mode": "max"},
        {"mode": "sum", "per_sample_weights": True},
        {"mode": "sum", "include_last_offset": True},
    ],
    ids=str,
)
def test_embedding_bag_of_uneven_bags(dim: int, options: dict[str, Any]) -> None:
    table = whole((9, 4))

    def run(rank: int, weight: Any) -> torch.Tensor:
        offsets = [0, *itertools.accumulate(map(len, BAGS[rank]))]
        indices = torch.tensor([row for bag in BAGS[rank] for row in bag])
        found = dict(options)
        if options.get("per_sample_weights"):
            found["per_sample_weights"] = torch.arange(1.0, 1 + len(indices))
        stop = None if options.get("include_last_offset") else -1
        return F.embedding_bag(indices, weight, torch.tensor(offsets[:stop]), **found)

    def body(rank: int) -> torch.Tensor:
        weight = chunks(dim, 1, 0).shard(table.clone().requires_grad_())
        found = run(rank, weight)
        assert_close(found, run(rank, table), rtol=0, atol=0)
        grid = torch.tensor([[1, 2, 2], [8, 0, 8]])[: rank + 1]  # a bag on the first rank, two on the second
        assert_close(F.embedding_bag(grid, weight), F.embedding_bag(grid, table), rtol=0, atol=0)
        (found * (rank + 1)).sum().backward()
        return cast(torch.Tensor, weight.local_tensor().grad)

    whole_table = table.clone().requires_grad_()
    for rank in (0, 1):
        (run(rank, whole_table) * (rank + 1)).sum().backward()
    first, second = run_ranks(2, body)
    assert_close(torch.cat([second, first], dim), whole_table.grad)


def test_what_embedding_bag_refuses_everywhere() -> None:
    def body(rank: int) -> None:
        weight, indices = chunks(0, 0, 1).shard(whole((4, 2))), torch.tensor([[1, 2]])
        with pytest.raises(PropagationError, match=r"embedding_bag with a sharded table takes no max_norm, got 1\.0"):
            F.embedding_bag(indices, weight, max_norm=1.0)
        # One rank is at fault, and all are told.
        offsets = torch.tensor([0]) if rank == 1 else None
        with pytest.raises(
            (PropagationError, PeerError), match=r"got input \(1, 2\) with offsets \(1,\); allowed are plain i"
        ):
            F.embedding_bag(indices, weight, offsets)

    run_ranks(2, body)
