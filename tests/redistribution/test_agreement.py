"""What from_local(run_check=True) finds out and makes alike, on threads and on processes."""

from functools import partial

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements


def checked(rank, give, placements, mesh_shape=(2, 2)):
    """What from_local says on this rank, or holds, as plain values."""
    local, options = give(rank)
    try:
        found = T.DTensor.from_local(local, T.Mesh(mesh_shape), parse_placements(placements), run_check=True, **options)
    except T.TritondtError as error:
        return type(error).__name__, str(error)
    return found.to_local().tolist()


def give_other_shape(rank):
    return torch.zeros(3, 4 + (rank == 3)), {}


def give_other_dtype(rank):
    return torch.zeros(3, 4, dtype=torch.float64 if rank == 2 else torch.float32), {}


def give_too_few_rows(rank):
    return torch.zeros(2 - (rank == 1), 4), {"shape": (4, 4)}


def give_numbers(rank):
    return torch.tensor([[rank, -0.0], [float("nan") if rank else 1.5, rank]]), {}


def give_bools(rank):
    return torch.tensor([rank % 2 == 0, rank > 1]), {}


def give_placements(rank):
    return torch.zeros(4, 4), {}


def mixed_placements(rank):
    return checked(rank, give_placements, "S0, R" if rank != 1 else "S1, R")


CHECKS = [
    (
        give_other_shape,
        "S0, R",
        "a part of (S0, R) of (6, 4) float32 on rank 0, but with a part of (S0, R) of (6, 5) float32 on rank 3",
    ),
    (
        give_other_dtype,
        "S1, R",
        "a part of (S1, R) of (3, 8) float32 on rank 0, but with a part of (S1, R) of (3, 8) float64 on rank 2",
    ),
]


@pytest.fixture(scope="module")
def processes():
    with GlooRanks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("on_processes", [False, True])
def test_parts_of_different_tensors_are_refused_on_all_ranks(on_processes, processes):
    def run(body, *arguments):
        return processes.run(body, *arguments) if on_processes else run_ranks(4, lambda rank: body(rank, *arguments))

    for give, placements, said in CHECKS:
        for found_kind, text in run(checked, give, placements):
            assert found_kind == "MismatchError"
            assert text.startswith("from_local was called with ")
            assert said in text
            assert text.endswith("all ranks must call it for the same tensor")
    for found_kind, text in run(mixed_placements):
        assert found_kind == "MismatchError"
        assert "(S0, R) of (8, 4) float32 on rank 0, but with a part of (S1, R) of (4, 8) float32 on rank 1" in text
    found = run(checked, give_too_few_rows, "S0, R")
    assert [kind for kind, _ in found] == ["MismatchError", "LocalTensorError", "MismatchError", "MismatchError"]
    assert "rank 1 at coordinate (0, 1) gave a local tensor of shape (1, 4)" in found[1][1]
    assert "but with what it refused (rank 1 at coordinate (0, 1) gave a local tensor of shape (1, 4)" in found[0][1]


@pytest.mark.parametrize("on_processes", [False, True])
@pytest.mark.parametrize(
    ("placements", "senders"),
    [
        ("R, R", (0, 0, 0, 0)),
        ("S0, R", (0, 0, 2, 2)),
        ("R, S1", (0, 1, 0, 1)),
        ("P, R", (0, 0, 2, 2)),
        ("R, P(max)", (0, 1, 0, 1)),
        ("S1, S0", (0, 1, 2, 3)),
    ],
)
def test_replicas_take_the_values_of_the_first_coordinate(placements, senders, on_processes, processes):
    # Bools are a vector, and no terms.
    for give in (give_numbers,) if "1" in placements or "P" in placements else (give_numbers, give_bools):
        if on_processes:
            found = processes.run(checked, give, placements)
        else:
            found = run_ranks(4, partial(checked, give=give, placements=placements))
        expected = [give(sender)[0].tolist() for sender in senders]
        assert repr(found) == repr(expected)  # nan and the sign of zero included


def test_a_checked_tensor_passes_gradients_on():
    def body(rank):
        mesh = T.Mesh((2,))
        local = torch.full((2,), float(rank), requires_grad=True)
        x = T.DTensor.from_local(local, mesh, [T.Replicate()], run_check=True)
        assert x.to_local().tolist() == [0.0, 0.0]
        (x * 3).backward(T.ones(2, device_mesh=mesh))
        assert local.grad is not None
        assert local.grad.tolist() == [3.0, 3.0]

    run_ranks(2, body)
