"""Meshes of one world on real processes: tensors go from one to another, alone and in lists, and norms are of all."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.oracle.across_cases import (
    AcrossCase,
    Outcome,
    check_all_across,
    inputs_of,
    random_across_case,
    run_across,
)

FULL = torch.arange(77.0).view(7, 11)
CASES_PER_TEST = 25


def run_cases(rank: int, cases: list[AcrossCase]) -> list[Outcome]:
    return [run_across(case, inputs_of(case), rank) for case in cases]


def check_on(ranks: GlooRanks, first_seed: int, count: int = CASES_PER_TEST) -> None:
    cases = [random_across_case(seed, ranks.size) for seed in range(first_seed, first_seed + count)]
    check_all_across(cases, ranks.run(run_cases, cases, timeout_s=150.0))


@pytest.mark.in_core(1)
@pytest.mark.in_ci(2)
@pytest.mark.parametrize("first_seed", range(2_000_000, 2_000_000 + 10 * CASES_PER_TEST, CASES_PER_TEST))
def test_random_pairs_of_meshes_over_sockets(four_ranks: GlooRanks, first_seed: int) -> None:
    check_on(four_ranks, first_seed)


@pytest.mark.extended
def test_random_pairs_of_meshes_over_the_messages_of_gloo(four_gloo_ranks: GlooRanks) -> None:
    check_on(four_gloo_ranks, 2_001_000)


@pytest.mark.extended
def test_random_pairs_of_meshes_in_shared_memory(four_shared_memory_ranks: GlooRanks) -> None:
    check_on(four_shared_memory_ranks, 2_002_000)


@pytest.mark.soak
def test_random_pairs_of_meshes_on_eight_processes(eight_ranks: GlooRanks) -> None:
    check_on(eight_ranks, 2_003_000, 200)


def moved_in_a_list(rank: int) -> tuple[list[Any], torch.Tensor, list[Any]]:
    """Parts of a list on meshes that share ranks 1 and 2 or none, a norm of gradients on two of them, and these."""
    left, right, grid = T.Mesh((3,), ranks=(0, 1, 2)), T.Mesh((2,), ranks=(2, 1)), T.Mesh((2, 2), ranks=(3, 0, 2, 1))
    alone = T.Mesh((1,), ranks=(3,))
    x, y = (T.distribute_tensor(FULL + add, left, [T.Shard(add)]) for add in (0, 1))
    moves: list[Any] = [
        (x, right, [T.Shard(1)]),
        (x, grid, [T.Shard(1), T.Shard(0)]),
        (y, alone, [T.Replicate()]),
        (T.distribute_tensor(FULL, left, [T.Partial()]), right, [T.Replicate()]),
    ]
    found = [moved.to_local().tolist() for moved in T.redistribute_many(moves)]
    parameters = []
    for mesh, placement in ((left, T.Shard(0)), (grid, T.Shard(1))):
        placements = [placement] * len(mesh.shape)
        parameter: Any = torch.nn.Parameter(T.distribute_tensor(torch.zeros(7, 11), mesh, placements))
        parameter.grad = T.distribute_tensor(FULL, mesh, placements)
        parameters.append(parameter)
    norm = T.clip_grad_norm_(parameters, 1.0)
    kept = [x.grad.full_tensor().tolist() for x in parameters if x._spec.coordinate is not None]
    return found, norm, kept


def check_a_list(ranks: GlooRanks) -> None:
    outcomes = ranks.run(moved_in_a_list)
    left, right = (FULL[:, :6].tolist(), FULL[:, 6:].tolist())
    columns = {0: (0, 1), 1: (1, 1), 2: (1, 0), 3: (0, 0)}  # coordinates in the grid
    plain = [torch.nn.Parameter(torch.zeros(7, 11)) for _ in range(2)]
    for parameter in plain:
        parameter.grad = FULL.clone()
    norm = torch.nn.utils.clip_grad_norm_(plain, 1.0)
    for rank, (found, of_all, kept) in enumerate(outcomes):
        across, down = columns[rank]
        piece = FULL.chunk(2, 1)[across].chunk(2, 0)[down].tolist()
        halves = {1: right, 2: left}.get(rank, [])
        whole = (FULL + 1).tolist() if rank == 3 else []
        assert found == [halves, piece, whole, FULL.tolist() if rank in (1, 2) else []]
        torch.testing.assert_close(of_all, norm)
        for gradient, parameter in zip(kept, plain[-len(kept) :], strict=True):
            torch.testing.assert_close(torch.tensor(gradient), parameter.grad)
        assert len(kept) == (1 if rank == 3 else 2)


def test_a_list_and_a_norm_on_several_meshes_over_sockets(four_ranks: GlooRanks) -> None:
    check_a_list(four_ranks)


@pytest.mark.extended
def test_a_list_and_a_norm_on_several_meshes_in_shared_memory(four_shared_memory_ranks: GlooRanks) -> None:
    check_a_list(four_shared_memory_ranks)
