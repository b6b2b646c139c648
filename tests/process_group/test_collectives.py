"""Every collective of torch.distributed on the backend: the same results as on Gloo, bit for bit."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from tests.harness.gloo_ranks import GlooRanks
from tests.process_group.collectives import CASES, own
from tests.process_group.conftest import groups

RanksOf = Callable[[str, int], GlooRanks]


KINDS = [("sockets", 2), ("sockets", 4), ("gloo", 2), ("shared-memory", 4), ("nccl", 2), ("nccl", 4)]


@pytest.fixture(params=KINDS, ids=lambda found: f"{found[0]}-{found[1]}")
def ranks(request: pytest.FixtureRequest, ranks_of: RanksOf) -> GlooRanks:
    return ranks_of(*request.param)


@pytest.fixture
def nccl_ranks(ranks_of: RanksOf) -> GlooRanks:
    return ranks_of("nccl", 4)


def run_case(rank: int, name: str) -> None:
    size = dist.get_world_size()
    expected = CASES[name](groups["gloo"], rank, size)
    found = CASES[name](dist.group.WORLD, rank, size)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_as_on_gloo(ranks: GlooRanks, name: str) -> None:
    ranks.run(run_case, name)


def gather_uneven(rank: int) -> None:
    size = dist.get_world_size()
    outputs = [torch.empty(place) for place in range(size)]
    dist.all_gather(outputs, own(rank, rank))
    torch.testing.assert_close(outputs, [own(place, place) for place in range(size)], rtol=0, atol=0)

    reduced = torch.empty(rank)
    dist.reduce_scatter(reduced, [own(rank, place) for place in range(size)])
    torch.testing.assert_close(reduced, sum(own(place, rank) for place in range(size)), rtol=0, atol=0)

    received = [torch.empty(source + 1) for source in range(size)]
    dist.all_to_all(received, [own(rank, rank + 1) + target for target in range(size)])
    expected = [own(source, source + 1) + rank for source in range(size)]
    torch.testing.assert_close(received, expected, rtol=0, atol=0)

    gathered = [torch.empty(place) for place in range(size)] if rank == 2 else None
    dist.gather(own(rank, rank), gathered, dst=2)
    if gathered is not None:
        torch.testing.assert_close(gathered, [own(place, place) for place in range(size)], rtol=0, atol=0)


def test_lists_of_different_lengths(nccl_ranks: GlooRanks) -> None:
    nccl_ranks.run(gather_uneven)


def lists_that_lie_otherwise_on_each_rank(rank: int) -> None:
    """Every second rank has the parts of its lists end to end, in one tensor; the others have them apart."""
    size = dist.get_world_size()
    whole = torch.empty(size, 2, 3)
    outputs = list(whole.unbind()) if rank % 2 else [torch.empty(2, 3) for _ in range(size)][::-1]
    given = [own(rank).view(2, 3) + place for place in range(size)]
    if rank % 2:
        given = list(torch.stack(given).unbind())
    for _ in range(2):
        dist.all_gather(outputs, given[0])
        torch.testing.assert_close(outputs, [own(place).view(2, 3) for place in range(size)], rtol=0, atol=0)
        reduced = torch.empty(2, 3)
        dist.reduce_scatter(reduced, given)
        expected = sum(own(place).view(2, 3) + rank for place in range(size))
        torch.testing.assert_close(reduced, expected, rtol=0, atol=0)
        for output in outputs:
            output.fill_(-1)
    group = dist.group.WORLD
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        group.reduce_scatter([reduced], [given])  # type: ignore[union-attr]
        group.allgather([outputs], [given[0]])  # type: ignore[union-attr]
    manager.wait()
    torch.testing.assert_close(reduced, expected, rtol=0, atol=0)
    torch.testing.assert_close(outputs, [own(place).view(2, 3) for place in range(size)], rtol=0, atol=0)


def test_what_ranks_call_does_not_follow_from_where_their_tensors_lie(nccl_ranks: GlooRanks) -> None:
    nccl_ranks.run(lists_that_lie_otherwise_on_each_rank)


def gather_lists_of_lists(rank: int) -> None:
    size = dist.get_world_size()
    outputs = [[torch.empty(3), torch.empty(2)] for _ in range(size)]
    dist.distributed_c10d.all_gather_coalesced(outputs, [own(rank, 3), own(rank, 2)])
    expected = [[own(place, 3), own(place, 2)] for place in range(size)]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_lists_of_lists(nccl_ranks: GlooRanks) -> None:
    nccl_ranks.run(gather_lists_of_lists)


def reduce_premultiplied(rank: int) -> None:
    terms = [own(place) for place in range(dist.get_world_size())]
    for factor in (0.5, torch.tensor(0.5)):
        x, part = own(rank), torch.empty(6)
        dist.all_reduce(x, op=_make_nccl_premul_sum(factor))
        whole = torch.cat(terms)
        dist.reduce_scatter_tensor(part, whole, op=_make_nccl_premul_sum(factor))
        torch.testing.assert_close(x, sum(terms) / 2, rtol=0, atol=0)
        torch.testing.assert_close(part, terms[rank] * len(terms) / 2, rtol=0, atol=0)


def test_premultiplied_sums(nccl_ranks: GlooRanks) -> None:
    nccl_ranks.run(reduce_premultiplied)


def reduce_bools(rank: int) -> list[list[bool]]:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        x = torch.tensor([False, rank == 1, True])
        dist.all_reduce(x, op=op)
        found.append(x.tolist())
    return found


def test_bools_are_added_as_by_or_and_multiplied_as_by_and(nccl_ranks: GlooRanks) -> None:
    expected = [[False, True, True], [False, False, True]] * 2
    assert nccl_ranks.run(reduce_bools) == [expected] * 4


def move_bytes(rank: int) -> None:
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex128):
        x = own(rank).to(dtype)
        found = torch.empty(4 * 6, dtype=dtype)
        dist.all_gather_into_tensor(found, x)
        expected = torch.cat([own(place).to(dtype) for place in range(4)])
        torch.testing.assert_close(found.view(torch.uint8), expected.view(torch.uint8), rtol=0, atol=0)


def test_any_dtype_is_moved(nccl_ranks: GlooRanks) -> None:
    nccl_ranks.run(move_bytes)


def use_groups(rank: int) -> list[float]:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own_group = pairs[rank % 2]
    x = own(rank)
    dist.all_reduce(x, group=own_group)
    torch.testing.assert_close(x, own(rank) + own((rank + 2) % 4), rtol=0, atol=0)
    if rank % 2 == 0:
        y = own(rank)
        dist.broadcast(y, src=2, group=own_group)
        torch.testing.assert_close(y, own(2), rtol=0, atol=0)
    dist.destroy_process_group(own_group)
    dist.all_reduce(x)
    return [float(x[0])]


def test_groups_of_some_ranks(nccl_ranks: GlooRanks) -> None:
    assert nccl_ranks.run(use_groups) == [[20.0]] * 4
