"""Messages packed into symmetric windows of NCCL (TRITONDT_SLOTS=windows), on its double, which reaches all hosts."""

import os
import warnings
from typing import Any

import pytest

pytest.importorskip("triton", reason="cuda.h, which the double of CUDA's driver is compiled against, is Triton's")

import torch

import tritondt as T
from tests.comm.transports.test_gloo_cases import check_on
from tests.doubles.fake_nccl.library import build, load
from tests.harness.nccl_on_host import use_fake_nccl
from tests.harness.placed_ranks import (
    communicator_of,
    left_to_nccl,
    placed_ranks,
    plans_of,
    use_two_hosts,
    whole_tensor,
)


def in_windows(size: int, prepare: Any = use_fake_nccl, **variables: str) -> Any:
    return placed_ranks(size, prepare, TRITONDT_SLOTS="windows", **variables)


def gather(rank: int, size: int) -> tuple[list[Any], tuple[int, ...], list[str]]:
    """Which messages were left to NCCL, who shares arenas, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = T.Mesh((size,))
        whole = whole_tensor()
        x = T.distribute_tensor(whole, mesh, [T.Shard(0)])
        x.redistribute(placements=[T.Replicate()])
    plans = plans_of(mesh)
    for _ in range(3):
        torch.testing.assert_close(x.redistribute(placements=[T.Replicate()]).to_local(), whole, rtol=0, atol=0)
    arenas = communicator_of(mesh)._arenas
    return left_to_nccl(plans), () if arenas is None else arenas.places, [str(each.message) for each in caught]


def ends_and_leaves(rank: int) -> tuple[int, int]:
    """NCCL's allocations before and after the end of the world."""
    before = load(build()).counts()[3]
    T.close()
    return before, load(build()).counts()[3]


def test_ranks_of_two_hosts_share_one_window_and_leave_nothing() -> None:
    with in_windows(4, use_two_hosts) as ranks:
        assert ranks.run(gather, 4) == [([0, 0, 0], (0, 1, 2, 3), [])] * 4
        assert ranks.run(ends_and_leaves) == [(1, 0)] * 4


@pytest.mark.parametrize("first_seed", [602_000, pytest.param(602_060, marks=pytest.mark.extended)])
def test_random_cases(first_seed: int) -> None:
    with in_windows(4) as ranks:
        check_on(ranks, first_seed)


def use_no_symmetric_memory() -> None:
    use_fake_nccl()
    load(build()).set(FAKE_NCCL_SYMMETRIC=0)


def test_without_symmetric_memory_all_go_through_nccl() -> None:
    with in_windows(2, use_no_symmetric_memory) as ranks:
        for rank, (left, places, warned) in enumerate(ranks.run(gather, 2)):
            assert (left, places) == (["all"] * 3, ())
            assert warned[0].startswith(
                f"rank {rank} has no window of NCCL for slots with ranks [0, 1] (ncclCommWindow"
            )
            assert warned[0].endswith("; its messages go through NCCL")


def ask_for_another_kind(rank: int, other: str) -> tuple[list[Any], tuple[int, ...], list[str]]:
    os.environ["TRITONDT_SLOTS"] = "windows" if rank != 1 else other
    return gather(rank, 3)


@pytest.mark.parametrize("other", ["0", pytest.param("1", marks=pytest.mark.extended)])
def test_where_one_rank_asks_for_another_kind_there_is_no_window(other: str) -> None:
    with in_windows(3) as ranks:
        assert ranks.run(ask_for_another_kind, other) == [(["all"] * 3, (), [])] * 3


def test_ranks_out_of_reach_get_messages_of_nccl() -> None:
    with in_windows(4, FAKE_NCCL_LSA_RANKS="2") as ranks:
        for rank, found in enumerate(ranks.run(gather, 4)):
            assert found == ([2, 2, 2], (0, 1) if rank < 2 else (2, 3), [])
        assert ranks.run(ends_and_leaves) == [(1, 0)] * 4


def test_where_one_rank_reaches_nobody_there_is_no_window() -> None:
    with in_windows(3, FAKE_NCCL_LSA_RANKS="2") as ranks:
        for left, places, warned in ranks.run(gather, 3):
            assert (left, places) == (["all"] * 3, ())
            assert "(some of them reach nobody else, or 16777216 bytes have no slots for all)" in warned[0]
        assert ranks.run(ends_and_leaves) == [(0, 0)] * 3


def give_up(rank: int) -> tuple[str, int]:
    """Rank 1 aborts beside an exchange; what rank 0 is told, and what stays allocated: peers may write to it."""
    mesh = T.Mesh((2,))
    x = T.distribute_tensor(whole_tensor(), mesh, [T.Shard(0)])
    x.redistribute(placements=[T.Replicate()]).to_local()
    told = ""
    if rank == 1:
        communicator_of(mesh).begin_abort()
    else:
        try:
            x.redistribute(placements=[T.Shard(1)]).to_local()
            x.redistribute(placements=[T.Replicate()]).full_tensor()
        except T.PeerError as error:
            told = type(error).__name__
    return told, load(build()).counts()[3]


@pytest.mark.extended
def test_after_an_abort_memory_stays() -> None:
    with in_windows(2, TRITONDT_TIMEOUT="10") as ranks:
        assert ranks.run(give_up) == [("PeerError", 1), ("", 1)]


def replay_beside(rank: int) -> None:
    """Captured exchanges run, and their words count on."""
    mesh = T.Mesh((2,))
    local = torch.zeros(3, 4)
    x = T.DTensor.from_local(local, mesh, [T.Shard(0)])
    x.redistribute(placements=[T.Replicate()])
    streams = communicator_of(mesh)._streams
    with streams.capturing():
        moved = x.redistribute(placements=[T.Replicate()])
    streams.synchronize()
    assert torch.equal(moved.to_local(), torch.zeros(6, 4))
    streams.destroy_graphs()


@pytest.mark.extended
def test_captured_exchanges_in_windows() -> None:
    with in_windows(2) as ranks:
        ranks.run(replay_beside)
