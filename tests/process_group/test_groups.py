"""Groups of some ranks, however torch makes them, on the double of NCCL."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.process_group.collectives import own
from tritondt.comm import world

RanksOf = Callable[[str, int], GlooRanks]
HALVES = [[0, 1], [2, 3]]


@pytest.fixture
def ranks(ranks_of: RanksOf) -> GlooRanks:
    return ranks_of("nccl", 4)


@contextmanager
def bound_to_a_device() -> Iterator[None]:
    """As after `init_process_group(..., device_id=torch.device("cuda", 0))` where there is a GPU."""
    group: Any = dist.group.WORLD
    there = mock.patch("torch.accelerator.is_available", return_value=True)
    which = mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda"))
    group.bound_device_id = torch.device("cuda", 0)
    try:
        with there, which:
            yield
    finally:
        group.bound_device_id = None


def sum_over(group: Any) -> float:
    x = own(dist.get_rank())[:1]
    dist.all_reduce(x, group=group)
    return float(x)


def sum_of(ranks: list[int]) -> float:
    return float(sum(own(rank)[:1] for rank in ranks))


def split(rank: int) -> tuple[list[float], list[Any]]:
    with bound_to_a_device():
        half: Any = dist.split_group(split_ranks=HALVES, group_desc="halves")
        first: Any = dist.split_group(split_ranks=[[1, 2]], timeout=timedelta(seconds=40))
    first = None if first == dist.GroupMember.NON_GROUP_MEMBER else first  # what 2.15 gives to those outside
    sums = [sum_over(half), *([] if first is None else [sum_over(first)]), sum_over(None)]
    again = dist.new_group([0, 3])
    if rank in (0, 3):
        sums.append(sum_over(again))
        dist.destroy_process_group(again)
    known = [half.group_desc, dist.get_process_group_ranks(half), half.rank(), dist.get_backend(half)]
    for group in (first, half):
        if group is not None:
            dist.destroy_process_group(group)
    return sums, known


def test_split_groups(ranks: GlooRanks) -> None:
    for rank, (sums, known) in enumerate(ranks.run(split)):
        half = HALVES[rank // 2]
        expected = [half, *([[1, 2]] if rank in (1, 2) else []), [0, 1, 2, 3], *([[0, 3]] if rank in (0, 3) else [])]
        assert sums == [sum_of(each) for each in expected]
        assert known == ["halves", half, rank % 2, "tritondt"]


def mesh_of_splits(rank: int) -> list[float]:
    with bound_to_a_device():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [sum_over(mesh.get_group(name)) for name in ("dp", "tp")]


def test_a_device_mesh_is_made_of_splits(ranks: GlooRanks) -> None:
    expected = [[sum_of([rank % 2, rank % 2 + 2]), sum_of(HALVES[rank // 2])] for rank in range(4)]
    assert ranks.run(mesh_of_splits) == expected


def make_again(rank: int) -> list[float]:
    """Groups that torch names by their ranks and the number of groups, so that the second has the name of the first."""
    sums = []
    for _ in range(2):
        group: Any = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
        sums.append(sum_over(group))
        dist.destroy_process_group(group)
    return sums


def test_a_group_is_made_again(ranks: GlooRanks) -> None:
    assert ranks.run(make_again) == [[sum_of([rank % 2, rank % 2 + 2])] * 2 for rank in range(4)]


def subgroups(rank: int) -> list[float]:
    half, _ = dist.new_subgroups(2)
    other, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    sums = [sum_over(half), sum_over(other)]
    # The others do not take part in making it; torch 2.15 counts it, and counts must stay alike for later groups.
    pair: Any = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    sums.append(sum_over(pair))
    dist.destroy_process_group(pair)
    return sums


def test_subgroups(ranks: GlooRanks) -> None:
    for rank, sums in enumerate(ranks.run(subgroups)):
        pair = [0, 3] if rank in (0, 3) else [1, 2]
        assert sums == [sum_of(each) for each in (HALVES[rank // 2], pair, [rank % 2, rank % 2 + 2])]


def give_options(rank: int) -> str:
    with pytest.raises(T.TransportError) as told:
        dist.new_group([0, 1, 2, 3], pg_options="fast")
    return str(told.value)


def test_options_are_refused(ranks: GlooRanks) -> None:
    sentence = (
        "a process group was given the options 'fast'; the backend 'tritondt' takes none: TRITONDT_NCCL_OPTIONS sets "
        "those of its communicators"
    )
    assert ranks.run(give_options) == [sentence] * 4


def end_in_another_order(rank: int) -> list[float]:
    """Rank 0 ends the first group first, the others the last one; between, each uses what it still has."""
    groups: list[Any] = [dist.new_group() for _ in range(3)]
    sums = [sum_over(group) for group in groups]
    for group in groups if rank == 0 else groups[::-1]:
        dist.destroy_process_group(group)
    return [*sums, sum_over(None)]


def end_again_and_again(rank: int) -> list[int]:
    """How many parts the world has before and after a group that has reduced and sent, twice."""
    found = []
    for _ in range(2):
        group: Any = dist.new_group()
        sum_over(group)
        x = own(rank, 3)
        dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group) if rank == 1 else None
        parts = world.current()._parts  # type: ignore[attr-defined]
        there = len(parts)
        dist.destroy_process_group(group)
        found.append(there - len(parts))
    return found


def test_a_world_keeps_nothing_of_an_ended_group(ranks: GlooRanks) -> None:
    assert ranks.run(end_again_and_again) == [[2, 2], [2, 2], [1, 1], [1, 1]]


def test_groups_are_ended_in_any_order(ranks: GlooRanks) -> None:
    assert ranks.run(end_in_another_order) == [[sum_of([0, 1, 2, 3])] * 4] * 4


def begin_unevenly(rank: int) -> None:
    """The first operation of a group, before its ranks are connected, has lengths that differ."""
    lists, parts, messages = (dist.new_group() for _ in range(3))
    gathered = [torch.empty(place) for place in range(4)]
    dist.all_gather(gathered, own(rank, rank), group=lists)
    torch.testing.assert_close(gathered, [own(place, place) for place in range(4)], rtol=0, atol=0)
    received = torch.empty(4 * rank)
    sent = torch.cat([own(rank, place) for place in range(4)])
    dist.all_to_all_single(received, sent, [rank] * 4, [0, 1, 2, 3], group=parts)
    torch.testing.assert_close(received, torch.cat([own(place, rank) for place in range(4)]), rtol=0, atol=0)
    x = own(rank, 5) if rank == 2 else torch.empty(5)
    if rank == 2:
        dist.send(x, 3, group=messages)
    elif rank == 3:
        dist.recv(x, 2, group=messages)
        torch.testing.assert_close(x, own(2, 5), rtol=0, atol=0)
    for group in (lists, parts, messages):
        dist.destroy_process_group(group)


def test_a_first_operation_with_uneven_counts(ranks: GlooRanks) -> None:
    ranks.run(begin_unevenly)
