"""Tensors without elements, in any shapes of none, and groups of one rank: as any others, on every transport."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.gloo_ranks import GlooRanks

RanksOf = Callable[[str, int], GlooRanks]
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.bool, torch.complex64)


def all_calls(rank: int, group: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """The tensors that each collective wrote, of inputs of such a shape whose values are the rank's number plus one."""
    size, written = dist.get_world_size(group), list[tuple[torch.Tensor, ...]]()
    one = torch.full(shape, rank + 1, dtype=dtype)
    many = torch.cat([one] * size) if shape else one
    stacked = torch.stack([one] * size)
    lists = [one.clone() for _ in range(size)]

    def note(work: Any, *tensors: torch.Tensor) -> None:
        if work is not None:
            assert work.wait()
            assert work.is_success()
        written.append(tensors)

    x = one.clone()
    note(dist.all_reduce(x, group=group, async_op=True), x)
    note(dist.all_reduce(x := one.clone(), group=group), x)
    xs = [one.clone(), torch.full((3,), rank + 1, dtype=dtype)]
    note(group.allreduce_coalesced(xs), *xs)
    note(dist.broadcast(x := one.clone(), group=group, group_src=size - 1), x)
    note(dist.reduce(x := one.clone(), group=group, group_dst=0), *((x,) if rank == 0 else ()))
    note(dist.all_gather(lists, one, group=group), *lists)
    for like in (many, stacked):
        note(dist.all_gather_into_tensor(x := torch.zeros_like(like), one, group=group), x)
        note(dist.reduce_scatter_tensor(x := torch.zeros_like(one), like, group=group), x)
    gathered = [torch.zeros_like(many), torch.zeros(3 * size, dtype=dtype)]
    note(group.allgather_into_tensor_coalesced(gathered, xs), *gathered)
    parts = [torch.zeros_like(one), torch.zeros(1, dtype=dtype)]
    wholes = [many, torch.full((size,), rank + 1, dtype=dtype)]
    note(group.reduce_scatter_tensor_coalesced(parts, wholes), *parts)
    note(dist.reduce_scatter(x := torch.zeros_like(one), lists, group=group), x)
    lists = [torch.zeros_like(one) for _ in range(size)]
    note(dist.gather(one, lists if rank == 0 else None, group=group, group_dst=0), *(lists if rank == 0 else ()))
    given = [one] * size if rank == 0 else None
    note(dist.scatter(x := torch.zeros_like(one), given, group=group, group_src=0), x)
    lists = [torch.zeros_like(one) for _ in range(size)]
    note(dist.all_to_all(lists, [one] * size, group=group), *lists)
    note(dist.all_to_all_single(x := torch.zeros_like(many), many, group=group), x)
    note(dist.all_to_all_single(x := torch.zeros_like(many), many, [shape[0]] * size, [shape[0]] * size, group), x)
    dist.barrier(group)
    return written


def without_elements(rank: int, dtypes: tuple[torch.dtype, ...]) -> None:
    group = dist.group.WORLD
    for dtype in dtypes:
        for shape in ((0,), (0, 3), (2, 0)):
            found = all_calls(rank, group, shape, dtype)
            assert len(found) == 18
            for tensors in found:
                assert all(tensor.dtype is dtype for tensor in tensors)
        # What is not empty beside it has been reduced and gathered.
        total = torch.full((3,), 3, dtype=torch.int64).to(dtype)
        torch.testing.assert_close(found[2][1], total, rtol=0, atol=0)
        dist.all_reduce(last := torch.ones(1))
        assert float(last) == 2.0


@pytest.mark.in_core(3)
@pytest.mark.parametrize("over", ["shared-memory", "sockets", "nccl", "gloo"])
def test_tensors_without_elements(ranks_of: RanksOf, over: str) -> None:
    # Gloo has no int16 and NCCL reduces none, whatever the number of elements.
    dtypes = DTYPES if over == "shared-memory" else tuple(dtype for dtype in DTYPES if dtype is not torch.int16)
    ranks_of(over, 2).run(without_elements, dtypes)


def alone(rank: int, is_nccl: bool) -> None:
    """A rank in a group of its own writes its input."""
    group = [dist.new_group([each]) for each in range(2)][rank]
    for dtype in DTYPES:
        if is_nccl and dtype is torch.int16:
            continue
        for shape in ((2, 3), (0, 3), (1,)):
            for tensors in all_calls(0, group, shape, dtype):
                for found in tensors:
                    expected = torch.ones(found.shape, dtype=dtype)
                    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    x = torch.arange(6.0).view(2, 3)
    dist.all_gather_into_tensor(x[:1], x[1:], group=group)
    torch.testing.assert_close(x[0], x[1], rtol=0, atol=0)
    overlapping = torch.arange(5.0)
    dist.all_to_all_single(overlapping[1:], overlapping[:-1], group=group)
    torch.testing.assert_close(overlapping, torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0]), rtol=0, atol=0)
    if is_nccl:
        return
    dist.all_reduce(strided := torch.ones(4, 4)[:, ::2], op=dist.ReduceOp.AVG, group=group)
    assert float(strided.sum()) == 8.0
    for wrong in (
        lambda: dist.all_gather_into_tensor(torch.empty(3), torch.ones(2), group=group),
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND, group=group),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.AVG, group=group),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            wrong()


@pytest.mark.in_core(3)
@pytest.mark.parametrize("over", ["shared-memory", "sockets", "nccl", "gloo"])
def test_groups_of_one_rank(ranks_of: RanksOf, over: str) -> None:
    ranks_of(over, 2).run(alone, over == "nccl")
