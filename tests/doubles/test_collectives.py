"""Every collective on 2, 4 and 8 processes, bit for bit what torch computes; in place too, and with uneven pieces."""

import random
from pathlib import Path

import pytest
import torch

from tests.doubles.fake_nccl.abi import AVG, MAX, MIN, PROD, SUM
from tests.doubles.fake_nccl.library import load
from tests.doubles.fake_nccl.tensors import DTYPES, RankOfTensors, assert_same, joined, reduced, values
from tests.harness.gloo_ranks import GlooRanks

SIZES = (2, 4, 8)
# Rings of a few bytes, into which nothing fits whole, of a page, and as they are.
RING_BYTES = {2: 16, 4: 4096, 8: 1 << 16}
COUNTS = (0, 1, 7, 1000)


def run_on(ranks: GlooRanks, size: int, double: Path, body, *arguments) -> list:
    unique_id = load(double).unique_id()
    return ranks.run(join_and_run, size, double, unique_id, body.__name__, *arguments)[:size]


def join_and_run(rank: int, size: int, path: Path, unique_id: bytes, body: str, *arguments):
    """Runs a function of this module on a rank of a new communicator; ranks from `size` on have no part."""
    if rank >= size:
        return None
    load(path).set(FAKE_NCCL_RING_BYTES=RING_BYTES[size])
    with joined(path, unique_id, rank, size) as here:
        return globals()[body](here, *arguments)


def check_reductions(here: RankOfTensors, cases: list[tuple[torch.dtype, int, int]]) -> None:
    for dtype, op, count in cases:
        what = f"{dtype}, op {op}, {count} elements"
        terms = [values(rank, count * here.size, dtype) for rank in range(here.size)]
        mine = terms[here.rank]
        expected = reduced(op, terms)
        piece = slice(here.rank * count, (here.rank + 1) * count)
        whole, scattered, rooted = mine.clone(), torch.zeros(count, dtype=dtype), torch.zeros_like(mine)
        in_place = mine.clone()
        here("ncclAllReduce", whole, whole, mine.numel(), op)
        here("ncclReduceScatter", mine, scattered, count, op)
        here("ncclReduceScatter", in_place, in_place[piece], count, op)
        here("ncclReduce", mine, rooted, mine.numel(), op, here.size - 1)
        here.stream.synchronize()
        assert_same(whole, expected, f"all_reduce of {what}")
        assert_same(scattered, expected[piece], f"reduce_scatter of {what}")
        assert_same(in_place[piece], expected[piece], f"reduce_scatter in place of {what}")
        is_root = here.rank == here.size - 1
        assert_same(rooted, expected if is_root else torch.zeros_like(mine), f"reduce of {what}")


def check_moves(here: RankOfTensors, counts: list[int]) -> None:
    for count in counts:
        dtype = torch.int32
        pieces = [values(rank, count * here.size, dtype).view(here.size, count) for rank in range(here.size)]
        mine, root = pieces[here.rank], here.size // 2
        gathered, exchanged, rooted, in_place = (torch.zeros(here.size, count, dtype=dtype) for _ in range(4))
        told, scattered = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
        in_place[here.rank] = mine[0]
        here("ncclAllGather", mine[0], gathered, count)
        here("ncclAllGather", in_place[here.rank], in_place, count)
        here("ncclAlltoAll", mine, exchanged, count)
        here("ncclBroadcast", mine[1], told, count, root)
        here("ncclGather", mine[0], rooted, count, root)
        here("ncclScatter", mine, scattered, count, root)
        here.stream.synchronize()
        firsts = torch.stack([piece[0] for piece in pieces])
        assert_same(gathered, firsts, f"all_gather of {count}")
        assert_same(in_place, firsts, f"all_gather in place of {count}")
        assert_same(exchanged, torch.stack([piece[here.rank] for piece in pieces]), f"all_to_all of {count}")
        assert_same(told, pieces[root][1], f"broadcast of {count}")
        assert_same(rooted, firsts if here.rank == root else torch.zeros_like(firsts), f"gather of {count}")
        assert_same(scattered, pieces[root][here.rank], f"scatter of {count}")


def check_uneven(here: RankOfTensors, seeds: list[int]) -> None:
    """All-to-all with a length for every pair of ranks, its own included, cut into messages of every size."""
    for seed in seeds:
        draw = random.Random(seed)
        lengths = [[draw.choice((0, 1, 5, 300, 5000)) for _ in range(here.size)] for _ in range(here.size)]
        cuts = [[draw.randint(1, 3) for _ in range(here.size)] for _ in range(here.size)]

        def content(source: int, target: int, lengths: list[list[int]] = lengths) -> torch.Tensor:
            return values(100 * source + target, lengths[source][target], torch.int64)

        sends = [content(here.rank, peer) for peer in range(here.size)]
        receives = [torch.zeros_like(content(peer, here.rank)) for peer in range(here.size)]
        with here.group():
            for peer in draw.sample(range(here.size), here.size):  # in any order, on every rank another
                for part in sends[peer].tensor_split(cuts[here.rank][peer]):
                    here.send(part, peer)
                for part in receives[peer].tensor_split(cuts[peer][here.rank]):
                    here.receive(part, peer)
        here.stream.synchronize()
        for peer in range(here.size):
            assert_same(receives[peer], content(peer, here.rank), f"seed {seed}, from rank {peer}")


def check_groups(here: RankOfTensors) -> None:
    """Collectives and messages of one group, given in another order on every other rank."""
    size, rank = here.size, here.rank
    terms = [values(other, 500, torch.float32) for other in range(size)]
    summed, told = torch.zeros(500), torch.zeros(500)
    to_right, from_left = values(10 + rank, 3000, torch.float32), torch.zeros(3000)
    with here.group():
        if rank % 2 == 0:
            here.send(to_right, (rank + 1) % size)
            here.receive(from_left, (rank - 1) % size)
        here("ncclAllReduce", terms[rank], summed, 500, SUM)
        with here.group():
            here("ncclBroadcast", terms[rank], told, 500, 1)
        if rank % 2 == 1:
            here.receive(from_left, (rank - 1) % size)
            here.send(to_right, (rank + 1) % size)
    here.stream.synchronize()
    assert_same(summed, reduced(SUM, terms), "all_reduce")
    assert_same(told, terms[1], "broadcast")
    assert_same(from_left, values(10 + (rank - 1) % size, 3000, torch.float32), "message")


@pytest.mark.parametrize("size", SIZES)
def test_reductions_in_every_dtype_and_op(ranks: GlooRanks, double: Path, size: int) -> None:
    cases = [(dtype, op, 7) for dtype in DTYPES for op in (SUM, MAX, MIN)]
    cases += [
        (dtype, op, 3) for dtype in (torch.int8, torch.int64, torch.float32, torch.bfloat16) for op in (PROD, AVG)
    ]
    cases += [(torch.float32, SUM, count) for count in COUNTS]
    if size == 4:
        cases.append((torch.bfloat16, SUM, 50_000))  # many times what a ring holds
    run_on(ranks, size, double, check_reductions, cases)


def check_rounding(here: RankOfTensors, dtype: torch.dtype) -> None:
    terms = [torch.randn(2000, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(here.size)]
    found = torch.zeros_like(terms[0])
    for op in (SUM, PROD, AVG):
        here("ncclAllReduce", terms[here.rank], found, 2000, op)
        here.stream.synchronize()
        assert_same(found, reduced(op, terms), f"{dtype}, op {op}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_reductions_add_in_order_of_rank_and_round_once(ranks: GlooRanks, double: Path, dtype: torch.dtype) -> None:
    run_on(ranks, 4, double, check_rounding, dtype)


@pytest.mark.parametrize("size", SIZES)
def test_collectives_that_move_data(ranks: GlooRanks, double: Path, size: int) -> None:
    run_on(ranks, size, double, check_moves, [*COUNTS, 20_000])


@pytest.mark.parametrize("size", SIZES)
def test_uneven_exchanges(ranks: GlooRanks, double: Path, size: int) -> None:
    run_on(ranks, size, double, check_uneven, list(range(8)))


@pytest.mark.parametrize("size", SIZES)
def test_groups_of_collectives_and_messages(ranks: GlooRanks, double: Path, size: int) -> None:
    run_on(ranks, size, double, check_groups)
