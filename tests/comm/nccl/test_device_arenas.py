"""Messages packed into the memory of other ranks' devices: on the doubles of CUDA's driver and of NCCL.

What is shown is that memory is shared between processes, that signals keep packs and unpacks in order, and that faults
are told; nothing of a GPU. The kernels of the signals are in tests/kernels.
"""

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="cuda.h, which the double of CUDA's driver is compiled against, is Triton's")

import torch
import torch.distributed as dist

import tritondt as T
from tests.comm.transports.test_gloo_cases import check_on
from tests.doubles.fake_cuda.library import FakeCuda, build
from tests.doubles.fake_nccl.library import Gate
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import use_fake_nccl
from tests.harness.placed_ranks import (
    communicator_of,
    left_to_nccl,
    placed_ranks,
    plans_of,
    use_two_hosts,
    whole_tensor,
)
from tritondt.comm.packing.placed_transfer import PlacedTransfer
from tritondt.parallel import all_gather_matmul


def use_a_memory_that_cannot_be_mapped() -> None:
    """Rank 1 maps no memory of others."""
    if os.environ["RANK"] == "1":
        FakeCuda(build()).fail("cuMemMap", 2, 801)
    use_fake_nccl()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[GlooRanks]:
    with placed_ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[GlooRanks]:
    with placed_ranks(2, TRITONDT_ARENA_MB="1") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def explained_ranks() -> Iterator[GlooRanks]:
    costs = '{"device_arena_bytes": 1048576, "ranks_per_host": 4}'
    with placed_ranks(4, TRITONDT_ARENA_MB="1", TRITONDT_COSTS=costs) as ranks:
        yield ranks


@pytest.mark.parametrize("first_seed", [600_000, 600_060])
def test_random_cases(four_ranks: GlooRanks, first_seed: int) -> None:
    check_on(four_ranks, first_seed)


@pytest.mark.extended
@pytest.mark.parametrize("first_seed", [601_000, 601_060])
def test_random_cases_between_two_hosts(first_seed: int) -> None:
    with placed_ranks(4, use_two_hosts) as ranks:
        check_on(ranks, first_seed)


def move(rank: int, size: int, rows: int) -> tuple[list[Any], int]:
    """Rows to columns, on the way; what NCCL was asked to send, and how far the slots go."""
    mesh = T.Mesh((size,))
    whole = whole_tensor(rows, 512)
    x = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    x.redistribute(placements=[T.Shard(1)])  # the communicator is there
    plans = plans_of(mesh)
    moved = x.redistribute(placements=[T.Shard(1)])
    torch.testing.assert_close(moved.to_local(), whole.chunk(size, 1)[rank], rtol=0, atol=0)
    return left_to_nccl(plans), communicator_of(mesh)._arenas.slots.slot_bytes


def test_a_message_longer_than_a_slot_goes_through_nccl(two_ranks: GlooRanks) -> None:
    # A rank has rows / 2 of 512 columns, half of which go, 4 bytes each: 512 bytes a row.
    for rows, expected in ((64, 0), (510, 0), (1024, "all")):
        for kinds, slot_bytes in two_ranks.run(move, 2, rows):
            assert (rows * 512 <= slot_bytes) == (expected == 0)
            assert kinds == [expected]


def gather(rank: int) -> tuple[list[Any], tuple[int, ...]]:
    mesh = T.Mesh((4,))
    whole = whole_tensor()
    x = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    x.redistribute(placements=[T.Replicate()])
    plans = plans_of(mesh)
    for _ in range(3):
        torch.testing.assert_close(x.redistribute(placements=[T.Replicate()]).to_local(), whole, rtol=0, atol=0)
    return left_to_nccl(plans), communicator_of(mesh)._arenas.places


def test_ranks_of_other_hosts_get_messages_of_nccl() -> None:
    with placed_ranks(4, use_two_hosts) as ranks:
        for rank, (kinds, places) in enumerate(ranks.run(gather)):
            assert places == ((0, 1) if rank < 2 else (2, 3))
            assert kinds == [2, 2, 2]


def send_far_beside_a_late_peer(rank: int) -> bool:
    """Rank 1 of this host, which rank 0 gets rows of, is late; rank 2 of the other one gets rank 0's meanwhile."""
    mesh, lengths = T.Mesh((3,), ranks=(2, 0, 1)), (0, 4, 4)
    before, after = T.Shard(0, sizes=lengths), T.Shard(0, sizes=(4, 4, 0))
    whole = whole_tensor(8, 6)
    local = whole.split(list(lengths))[(1, 2, 0)[rank]].contiguous()
    x = T.DTensor.from_local(local, mesh, [before], shape=(8, 6), stride=(6, 1))
    x.redistribute(placements=[after]).to_local()  # the communicator is there
    gate = Gate(communicator_of(mesh)._queue.stream._stream) if rank == 1 else None
    moved = x.redistribute(placements=[after], async_op=True)
    if rank == 2:
        assert torch.equal(moved.to_local(), whole[:4])  # waits, and rank 1 does not come before
    dist.barrier()
    is_over = rank == 0 and bool(moved.work and moved.work.is_completed())
    dist.barrier()
    if gate is not None:
        gate.open()
    if rank == 0:
        assert torch.equal(moved.to_local(), whole[4:])
    moved.to_local()
    return is_over


def test_messages_to_other_hosts_do_not_wait_for_ranks_of_this_one() -> None:
    with placed_ranks(3, use_two_hosts, TRITONDT_TIMEOUT="90") as ranks:
        assert ranks.run(send_far_beside_a_late_peer) == [False] * 3


def sum_at_once(rank: int, count: int) -> int:
    """Sums, rows and columns, without a wait between them; then what the double's driver has."""
    mesh = T.Mesh((2,))
    whole = whole_tensor(7, 5)
    terms = T.DTensor.from_local(whole * (rank + 1), mesh, [T.Partial()])
    rows = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    for number in range(count):
        summed = terms.redistribute(placements=[T.Replicate()], async_op=True)
        columns = rows.redistribute(placements=[T.Shard(1)], async_op=True)
        back = columns.redistribute(placements=[T.Shard(0)], async_op=number % 3 == 0)
        torch.testing.assert_close(summed.to_local(), whole * 3, rtol=0, atol=0)
        torch.testing.assert_close(back.to_local(), rows.to_local(), rtol=0, atol=0)
    live = live_memory(rank)
    T.close()
    return live - live_memory(rank)


def test_many_exchanges_and_nothing_left(two_ranks: GlooRanks) -> None:
    assert two_ranks.run(sum_at_once, 60) == [6, 6]  # a handle, a reservation and a mapping for each arena
    assert two_ranks.run(live_memory) == [0, 0]


def live_memory(rank: int) -> int:
    return FakeCuda(build()).live()


def send_before_it_is_read(rank: int) -> list[bool]:
    """Rank 0, which has the only row, sends three times, and rank 1 comes late: two messages are packed meanwhile."""
    mesh = T.Mesh((2,))
    locals_ = [torch.full((1 - rank, 8), float(number)) for number in range(3)]
    rows = [T.DTensor.from_local(local, mesh, [T.Shard(0)], shape=(1, 8), stride=(8, 1)) for local in locals_]
    rows[0].redistribute(placements=[T.Replicate()])
    gate = Gate(communicator_of(mesh)._queue.stream._stream) if rank else None
    moved = [row.redistribute(placements=[T.Replicate()], async_op=True) for row in rows]
    works: list[Any] = [each.work for each in moved]
    ends_at = time.monotonic() + 60
    while rank == 0 and not works[1].is_completed() and time.monotonic() < ends_at:
        time.sleep(0.01)
    time.sleep(0.1)  # the third would be packed now
    are_over = [work.is_completed() for work in works]
    dist.barrier()
    if gate is not None:
        gate.open()
    for number, each in enumerate(moved):
        torch.testing.assert_close(each.to_local(), torch.full((1, 8), float(number)), rtol=0, atol=0)
    return are_over


def test_a_slot_is_packed_again_when_it_has_been_read(two_ranks: GlooRanks) -> None:
    assert two_ranks.run(send_before_it_is_read) == [[True, True, False], [False] * 3]


def count_launches(rank: int) -> list[list[tuple[int, int]]]:
    """Launches of each exchange through slots, and messages that NCCL carried beside; of two repeats."""
    mesh = T.Mesh((4,))
    communicator, found = communicator_of(mesh), list[list[tuple[int, int]]]()
    for source, target in PAIRS[:4]:
        placed, wanted = T.parse_placements(source), T.parse_placements(target)
        local = whole_tensor(8, 8) if source == "P" else whole_tensor(8, 8).chunk(4)[rank]
        x = T.DTensor.from_local(local, mesh, placed, shape=(8, 8), stride=(8, 1))
        x.redistribute(placements=wanted)
        counts, launch, run = list[tuple[int, int]](), communicator._launch, communicator._run_plan

        def counted(plan: Any, *arguments: Any, run: Any = run, launch: Any = launch, counts: Any = counts) -> None:
            launched = list[Any]()

            def note(*given: Any) -> None:
                launched.append(given)
                launch(*given)

            communicator._launch = note
            run(plan, *arguments)
            communicator._launch = launch
            counts.append((len(launched), len(plan.far_sends) + len(plan.far_receives)))

        communicator._run_plan = counted
        x.redistribute(placements=wanted)
        x.redistribute(placements=wanted)
        del communicator._run_plan
        found.append(counts)
    return found


def test_an_exchange_is_two_launches(four_ranks: GlooRanks) -> None:
    """S0 -> R, S0 -> S1 and sums of terms: one that packs and publishes, and one that awaits and unpacks, or adds."""
    for of_pairs in four_ranks.run(count_launches):
        for counts in of_pairs:
            assert counts
            assert set(counts) == {(2, 0)}


@pytest.mark.extended
def test_messages_to_other_hosts_add_no_launch() -> None:
    with placed_ranks(4, use_two_hosts) as ranks:
        for of_pairs in ranks.run(count_launches):
            for counts in of_pairs[:2]:
                assert set(counts) == {(2, 4)}


PAIRS = (("S0", "R"), ("S0", "S1"), ("P", "R"), ("P", "S1"), ("R", "S0"))


def explain_and_compile(rank: int, side: int) -> list[tuple[int, int]]:
    """What explain says is packed into slots, and what is."""
    mesh = T.Mesh((4,))
    found = []
    for source, target in PAIRS:
        placed, wanted = T.parse_placements(source), T.parse_placements(target)
        local = whole_tensor(side, side) if source in "PR" else whole_tensor(side, side).chunk(4)[rank]
        x = T.DTensor.from_local(local, mesh, placed, shape=(side, side), stride=(side, 1))
        told = T.explain(x, wanted)
        plans = plans_of(mesh)
        x.redistribute(placements=wanted)
        del communicator_of(mesh)._run_plan
        in_slots = sum(
            sum(each.num_bytes for each in plan.sends) - sum(each.num_bytes for each in plan.far_sends)
            for plan in plans
            if isinstance(plan, PlacedTransfer)
        )
        found.append((sum(step.placed_bytes for step in told.steps), in_slots))
    return found


@pytest.mark.parametrize("side", [64, 1024])
def test_explain_says_what_is_packed_into_slots(explained_ranks: GlooRanks, side: int) -> None:
    for found in explained_ranks.run(explain_and_compile, side):
        assert [said for said, _ in found] == [packed for _, packed in found]
        assert [said > 0 for said, _ in found] == [side == 64] * 4 + [False]


def multiply_in_chunks(rank: int) -> tuple[int, int]:
    """A gathered product in chunks; how many exchanges it took, and how many of them went through slots."""
    mesh = T.Mesh((2,))
    whole, weight = whole_tensor(8, 6), torch.eye(6) * 2
    spec = T.DTensorSpec(mesh, (T.Shard(0),), T.TensorMeta.contiguous((8, 6), whole.dtype))
    rows = whole.chunk(2)[rank].contiguous()
    first = T.DTensor.from_local(rows, mesh, [T.Shard(0)])
    first.redistribute(placements=[T.Replicate()])
    plans = plans_of(mesh)
    product = all_gather_matmul(rows, weight, source=spec, chunks_per_peer=4)
    del communicator_of(mesh)._run_plan
    torch.testing.assert_close(product, whole * 2, rtol=0, atol=0)
    return len(plans), sum(isinstance(plan, PlacedTransfer) for plan in plans)


def test_chunks_beside_a_product_go_through_slots(two_ranks: GlooRanks) -> None:
    for count, placed in two_ranks.run(multiply_in_chunks):
        assert count == placed == 4


def record(rank: int) -> None:
    mesh = T.Mesh((2,))
    local = torch.zeros(3, 4)
    x = T.DTensor.from_local(local, mesh, [T.Shard(0)])
    x.redistribute(placements=[T.Replicate()])
    streams = communicator_of(mesh)._streams
    for value in range(3):
        local.fill_(value + rank)
        with streams.capturing():
            moved = x.redistribute(placements=[T.Replicate()])
        streams.synchronize()
        expected = torch.cat([torch.full((3, 4), float(value + each)) for each in range(2)])
        torch.testing.assert_close(moved.to_local(), expected, rtol=0, atol=0)
    streams.destroy_graphs()


def test_what_is_recorded_counts_on_the_device(two_ranks: GlooRanks) -> None:
    two_ranks.run(record)


def arenas_here(rank: int) -> tuple[list[str], Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = T.Mesh((3,))
        whole = T.distribute_tensor(whole_tensor(), mesh, [T.Shard(0)]).full_tensor()
    torch.testing.assert_close(whole, whole_tensor(), rtol=0, atol=0)
    arenas = communicator_of(mesh)._arenas
    return [str(each.message) for each in caught], None if arenas is None else arenas.places


@pytest.mark.extended
def test_where_one_rank_cannot_map_memory_all_go_through_nccl() -> None:
    with placed_ranks(3, use_a_memory_that_cannot_be_mapped) as ranks:
        found = ranks.run(arenas_here)
        assert ranks.run(live_memory) == [0, 0, 0]
    assert [places for _, places in found] == [None, None, None]
    assert [bool(texts) for texts, _ in found] == [False, True, False]
    text = found[1][0][0]
    assert text.startswith("rank 1 cannot share memory of its GPU with ranks [0, 1, 2] (")
    assert "cuMemMap" in text
    assert text.endswith("); its messages go through NCCL")


def use_devices_without_atomics() -> None:
    """A device for each rank; that of rank 1 has no atomics in rank 0's memory, and rank 0's has them in all."""
    os.environ["FAKE_CUDA_DEVICE"] = os.environ["RANK"]
    cuda = FakeCuda(build())
    cuda.set_devices(3)
    cuda.set_atomics(1, 0, False)
    use_fake_nccl()


def signal_by_stores(rank: int) -> tuple[tuple[list[str], Any], bool]:
    return arenas_here(rank), communicator_of(T.Mesh((3,)))._arenas._by_store


@pytest.mark.parametrize(
    ("prepare", "by_store"),
    [(use_devices_without_atomics, True), pytest.param(use_fake_nccl, False, marks=pytest.mark.extended)],
)
def test_without_atomics_between_some_all_signal_by_stores(prepare: Any, by_store: bool) -> None:
    with placed_ranks(3, prepare) as ranks:
        assert ranks.run(signal_by_stores) == [(([], (0, 1, 2)), by_store)] * 3


def ask_for_none(rank: int) -> tuple[list[str], Any]:
    os.environ["TRITONDT_SLOTS"] = str(int(rank != 1))
    return arenas_here(rank)


@pytest.mark.extended
def test_a_rank_that_asks_for_none_leaves_the_others_theirs() -> None:
    with placed_ranks(3) as ranks:
        assert ranks.run(ask_for_none) == [([], (0, 2)), ([], None), ([], (0, 2))]
