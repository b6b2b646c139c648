"""Operations are kept for when the same is asked for again, by all that tells them apart; on the double of NCCL."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from tests.harness.gloo_ranks import GlooRanks
from tritondt.process_group import operations

RanksOf = Callable[[str, int], GlooRanks]


@pytest.fixture
def ranks(ranks_of: RanksOf) -> GlooRanks:
    return ranks_of("nccl", 2)


def kept() -> dict[Any, Any]:
    """The operations that the default group has kept, of which there is one."""
    dist.all_reduce(torch.ones(1))
    group: Any = dist.group.WORLD
    found: dict[Any, Any] = group._router._nccl_groups["cpu"].operations._kept
    return found


def num_new(call: Callable[[], object]) -> int:
    """How many operations are kept by a call that were not before."""
    before = len(kept())
    call()
    return len(kept()) - before


def ask_again(rank: int) -> None:
    kept().clear()  # of what other tests asked for
    group: Any = dist.group.WORLD
    group._calls.forget()
    ops, one = dist.ReduceOp, torch.ones
    reductions: list[tuple[torch.Tensor, Any]] = [
        (one(5), ops.SUM),
        (one(7), ops.SUM),
        (one(5).double(), ops.SUM),
        (one(5), ops.MAX),
        (one(5), ops.AVG),
    ]
    for x, op in reductions:
        assert num_new(lambda: dist.all_reduce(x.clone(), op)) == 1  # noqa: B023  called at once
        assert num_new(lambda: dist.all_reduce(x.clone(), op)) == 0  # noqa: B023
    for root in (0, 1):
        told = torch.full((5,), float(rank))
        assert num_new(lambda: dist.broadcast(told, root)) == 1  # noqa: B023
        assert torch.equal(told, torch.full((5,), float(root)))
        assert num_new(lambda: dist.reduce(told, root, ops.MIN)) == 1  # noqa: B023
    parts = [torch.empty(2, 3), torch.empty(2, 3)]
    gathered = torch.empty(2, 6)
    mine = torch.full((2, 3), float(rank))
    assert num_new(lambda: dist.all_gather(parts, mine)) == 1
    assert num_new(lambda: dist.all_gather(list(gathered.view(2, 2, 3).unbind()), mine)) == 1  # they lie end to end
    assert num_new(lambda: dist.all_gather(parts, mine)) == 0
    assert torch.equal(torch.cat([part.flatten() for part in parts]), gathered.flatten())
    rows = torch.arange(6.0).view(6, 1) + 10 * rank
    for shape, sizes in (((6, 1), None), ((3, 2), [1, 2])):  # other rows of as many elements
        own = rows.view(shape)
        received = torch.empty((sum([rank + 1] * 2), 2) if sizes else shape)
        arriving = [rank + 1] * 2 if sizes else None
        assert num_new(lambda: dist.all_to_all_single(received, own, arriving, sizes)) == 1  # noqa: B023


def test_each_is_made_once(ranks: GlooRanks) -> None:
    ranks.run(ask_again)


def ask_for_what_is_looked_at_each_time(rank: int) -> None:
    for factor in (2.0, torch.tensor([3.0])):
        x = torch.full((4,), 1.0 + rank)
        assert num_new(lambda: dist.all_reduce(x, _make_nccl_premul_sum(factor))) == 0  # noqa: B023
        assert torch.equal(x, torch.full((4,), 3.0 * float(factor)))
    y = (torch.arange(6.0).view(2, 3) + rank).T  # dense, in another order
    assert num_new(lambda: dist.all_reduce(y)) == 0
    assert torch.equal(y, (2 * torch.arange(6.0) + 1).view(2, 3).T)


def test_factors_and_other_orders_are_not_kept(ranks: GlooRanks) -> None:
    ranks.run(ask_for_what_is_looked_at_each_time)


def ask_for_many(rank: int) -> None:
    before, operations.MAX_KEPT_CALLS = operations.MAX_KEPT_CALLS, 16
    try:
        for length in range(2, 30):
            x = torch.full((length,), 1.0 + rank)
            dist.all_reduce(x)
            assert torch.equal(x, torch.full((length,), 3.0))
            assert len(kept()) <= 8
    finally:
        operations.MAX_KEPT_CALLS = before


def test_no_more_calls_are_kept_than_a_number(ranks: GlooRanks) -> None:
    ranks.run(ask_for_many)
