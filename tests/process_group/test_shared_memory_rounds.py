"""Collectives through shared memory in many rounds: every kind against Gloo, uneven, in place, overlapping, strided."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.gloo_ranks import GlooRanks
from tests.process_group.collectives import own
from tests.process_group.conftest import groups
from tritondt.planning import slots
from tritondt.process_group import shared_memory_programs as programs

RanksOf = Callable[[str, int], GlooRanks]
Case = Callable[[Any, int, int], list[torch.Tensor]]
# Whole numbers below, so that every order of adding gives the same; chunks are of 1,024 elements of them.
LENGTH = 10_007
CASES: dict[str, Case] = {}


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


@case
def all_reduce(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    dist.all_reduce(whole := own(rank, LENGTH), group=group)
    dist.all_reduce(short := own(rank, 5), group=group)
    dist.all_reduce(none := own(rank, 0), group=group)
    return [whole, short, none]


@case
def with_gaps(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    dist.all_reduce(reduced := own(rank, 2 * LENGTH)[::2], group=group)
    dist.broadcast(sent := own(rank, 2 * LENGTH)[1::2], group=group, group_src=1)
    rows = own(rank, size * 600).view(size, 600).t().contiguous().t()  # whose memory is in the order of columns
    dist.all_to_all_single(moved := torch.empty(600, size).t(), rows, group=group)
    columns = own(rank, 24).view(3, 8).t()  # 8 x 3, whose rows are columns in memory
    dist.reduce_scatter_tensor(part := torch.empty(2, 3), columns, group=group)
    dist.all_gather_into_tensor(gathered := torch.empty(3, 8).t(), part, group=group)
    with torch.device("meta"):  # where factories make tensors, and these are not
        dist.all_gather(lists := list(gathered.new_empty(size, 3).t().contiguous().t()), part[:, 0:3][0], group=group)
    return [reduced, sent, moved, gathered, *lists]


@case
def all_reduce_of_a_list(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    tensors = [own(rank, LENGTH), own(rank, 3), own(rank, 2048)]
    with dist._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


@case
def bits_and_truth_values(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    found = []
    numbers = torch.randint(0, 2**40, (LENGTH,), generator=torch.Generator().manual_seed(rank))
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool):
            values = numbers % 3 != 0 if dtype is torch.bool else numbers.to(dtype)
            dist.all_reduce(reduced := values.clone(), op=op, group=group)
            dist.reduce(to_one := values[:5].clone(), 1, op=op, group=group)
            dist.reduce_scatter_tensor(part := values.new_empty(301), values[: 301 * size], op=op, group=group)
            found += [reduced, part, *([to_one] if rank == 1 else [])]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        dist.all_reduce(truth := numbers % 3 != 0, op=op, group=group)
        found.append(truth.view(torch.uint8) != 0)  # Gloo writes how many are true
    return found


@case
def reduce_to_every_root(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    tensors = [own(rank, LENGTH) for _ in range(size)]
    for root, tensor in enumerate(tensors):
        dist.reduce(tensor, group=group, group_dst=root)
    return [tensors[rank]]


@case
def reduce_scatter(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    parts = [own(rank, 3001) * (number + 1) for number in range(size)]
    dist.reduce_scatter(output := torch.empty(3001), parts, group=group)
    dist.reduce_scatter_tensor(flat := torch.empty(3001), torch.cat(parts), group=group)
    return [output, flat]


@case
def reduce_scatter_into_what_is_read(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    own_part, other, across = (torch.cat([own(rank, 3001)] * size) for _ in range(3))
    found = [own_part.chunk(size)[rank], other.chunk(size)[(rank + 1) % size], across[7 : 7 + 3001]]
    for whole, output in zip((own_part, other, across), found, strict=True):
        dist.reduce_scatter_tensor(output, whole, group=group)
    return [each.clone() for each in found]


@case
def all_gather(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    into = torch.empty(size * 5003)
    dist.all_gather_into_tensor(into, own(rank, 5003), group=group)
    in_place = torch.zeros(size * 5003)
    mine = in_place.chunk(size)[rank].copy_(own(rank, 5003))
    dist.all_gather_into_tensor(in_place, mine, group=group)
    lists = list(torch.empty(size, 5003, 2).unbind(2)[1])
    dist.all_gather(lists, own(rank, 5003), group=group)
    return [into, in_place, *lists]


@case
def broadcast(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    tensors = [own(rank, LENGTH) for _ in range(size)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, group=group, group_src=root)
    return tensors


@case
def gather_and_scatter(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    found = []
    for root in range(size):
        lists = [torch.empty(5003) for _ in range(size)] if rank == root else None
        dist.gather(own(rank, 5003), lists, group=group, group_dst=root)
        dist.scatter(part := torch.empty(5003), lists, group=group, group_src=root)
        found += [part, *(lists or [])]
    return found


@case
def all_to_all(group: Any, rank: int, size: int) -> list[torch.Tensor]:
    lengths = [[(source * 1999 + target * 877) % 5000 for target in range(size)] for source in range(size)]
    inputs = [own(rank, length) for length in lengths[rank]]
    outputs = [torch.empty(lengths[source][rank]) for source in range(size)]
    dist.all_to_all_single(
        flat := torch.empty(sum(map(len, outputs))),
        torch.cat(inputs),
        list(map(len, outputs)),
        list(map(len, inputs)),
        group=group,
    )
    dist.all_to_all_single(even := torch.empty(size * 300, 7), own(rank, size * 2100).view(-1, 7), group=group)
    return [flat, even]


def run_case(rank: int, name: str) -> list[torch.Tensor]:
    """A case on a group of the backend with small chunks, compared with what Gloo gives."""
    size = dist.get_world_size()
    expected = CASES[name](groups["gloo"], rank, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "CHUNK_BYTES", 4096)
        patch.setattr(programs, "ONE_SHOT_BYTES", 1024)
        patch.setattr(slots, "_PAST_CACHE_BYTES", 16 << 10)  # so that some results are written past the cache
        group: Any = dist.new_group(backend="tritondt")
        found = CASES[name](group, rank, size)
    communicator = group._router._cpu_group._carrier.whole
    assert communicator is not None, "the ranks share no memory"
    assert communicator.traffic.num_sent + communicator.traffic.num_received > 0
    dist.destroy_process_group(group)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return found


# Gloo takes a tensor with gaps for one without, and writes over what it reads.
_ALONE = {"reduce_scatter_into_what_is_read", "with_gaps"}


@pytest.mark.parametrize("name", sorted(CASES.keys() - _ALONE))
def test_as_gloo_does(ranks_of: RanksOf, name: str) -> None:
    ranks_of("shared-memory", 4).run(run_case, name)


def run_in_place(rank: int) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "CHUNK_BYTES", 4096)
        return reduce_scatter_into_what_is_read(dist.group.WORLD, rank, dist.get_world_size())


def test_a_part_is_reduced_into_what_is_read(ranks_of: RanksOf) -> None:
    for found in ranks_of("shared-memory", 4).run(run_in_place):
        for each in found:
            torch.testing.assert_close(each, own(0, 3001) * 10, rtol=0, atol=0)


def reduce_lists(rank: int) -> list[str]:
    """The texts of operations, where a list of two begins as one tensor alone does."""
    group: Any = dist.group.WORLD
    dist.all_reduce(own(rank, 4))
    group.allreduce_coalesced([own(rank, 4), own(rank, 8)]).wait()
    made = [each.transfer for program in group._router._cpu_group._made.values() for each in program.parts]
    return [each.description for each in made if each.description.endswith((" of 4 float32", " of 4 + 8 float32"))]


def test_a_list_has_programs_of_its_own(ranks_of: RanksOf) -> None:
    one, of_both = "all_reduce (sum) of 4 float32", "all_reduce (sum) of 4 + 8 float32"
    for found in ranks_of("shared-memory", 4).run(reduce_lists):
        assert sorted(found) == [of_both, of_both, one]


def run_with_gaps(rank: int) -> list[torch.Tensor]:
    return with_gaps(dist.group.WORLD, rank, dist.get_world_size())


def test_tensors_with_gaps(ranks_of: RanksOf) -> None:
    whole = own(0, 2400).view(4, 600)
    columns = own(0, 24).view(3, 8).t() * 10
    for rank, (reduced, sent, moved, gathered, *lists) in enumerate(ranks_of("shared-memory", 4).run(run_with_gaps)):
        torch.testing.assert_close(gathered, columns, rtol=0, atol=0)
        torch.testing.assert_close(torch.stack(lists), columns[::2], rtol=0, atol=0)
        torch.testing.assert_close(moved, torch.stack([whole[rank] * (each + 1) for each in range(4)]), rtol=0, atol=0)
        torch.testing.assert_close(reduced, own(0, 2 * LENGTH)[::2] * 10, rtol=0, atol=0)
        torch.testing.assert_close(sent, own(1, 2 * LENGTH)[1::2], rtol=0, atol=0)


def exchange_other_dtypes(rank: int) -> list[torch.Tensor]:
    """Parts of as many bytes as before on some ranks, of another dtype."""
    found = []
    for dtype, extra in ((torch.float32, 0), (torch.int32, 3)):
        lengths = [[5 + (extra if source == 3 or target == 3 else 0) for target in range(4)] for source in range(4)]
        coming = [lengths[source][rank] for source in range(4)]
        output = torch.empty(sum(coming), dtype=dtype)
        dist.all_to_all_single(output, own(rank, sum(lengths[rank]), dtype), coming, lengths[rank])
        found.append(output)
    return found


def test_programs_are_kept_by_dtype(ranks_of: RanksOf) -> None:
    for rank, found in enumerate(ranks_of("shared-memory", 4).run(exchange_other_dtypes)):
        expected = torch.cat([own(source, 20)[rank * 5 : rank * 5 + 5] for source in range(4)])
        torch.testing.assert_close(found[0], expected, rtol=0, atol=0)
        assert found[1].dtype is torch.int32


def run_in_another_order(rank: int) -> list[torch.Tensor]:
    """A group whose ranks are not in ascending order: parts go by its own order."""
    order = [2, 0, 3, 1]
    parent: Any = dist.new_group(backend="tritondt")
    group: Any = parent.split_group(order)
    place = order.index(rank)
    gathered = torch.empty(12)
    group._allgather_base(gathered, own(rank, 3)).wait()
    part = torch.empty(3)
    group._reduce_scatter_base(part, torch.arange(12.0)).wait()
    torch.testing.assert_close(gathered, torch.cat([own(each, 3) for each in order]), rtol=0, atol=0)
    torch.testing.assert_close(part, torch.arange(12.0).chunk(4)[place] * 4, rtol=0, atol=0)
    group.shutdown()
    dist.destroy_process_group(parent)
    return [gathered]


def test_a_group_in_an_order_of_its_own(ranks_of: RanksOf) -> None:
    ranks_of("shared-memory", 4).run(run_in_another_order)
