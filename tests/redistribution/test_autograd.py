"""Gradients through `redistribute`: against finite differences, twice, and where there are none."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.oracle.arithmetic import coordinates, local_tensors
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.mesh import Mesh

SHAPE = (2, 3)


def specs(mesh_shape: tuple[int, ...], source: str, target: str) -> tuple[T.DTensorSpec, T.DTensorSpec]:
    mesh, meta = Mesh(mesh_shape), T.TensorMeta.contiguous(SHAPE, torch.float64)
    return T.DTensorSpec(mesh, T.parse_placements(source), meta), T.DTensorSpec(mesh, T.parse_placements(target), meta)


def independent(target: str) -> tuple[T.Placement, ...]:
    """Gradient placements for results that every rank uses differently: what they get adds up."""
    return tuple(T.Partial() if item.is_replicate() else item for item in T.parse_placements(target))


class Everywhere(torch.autograd.Function):
    """One function from the local tensors of all ranks to the results of all ranks, run on rank threads."""

    @staticmethod
    def forward(ctx: Any, case: tuple[Any, ...], *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.case = case
        ctx.save_for_backward(*local)
        return tuple(run_ranks(len(local), lambda rank: _run(case, local[rank].detach())))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *EverywhereBackward.apply(ctx.case, *ctx.saved_tensors, *grads)


class EverywhereBackward(torch.autograd.Function):
    """The backward of all ranks, itself differentiable."""

    @staticmethod
    def forward(ctx: Any, case: tuple[Any, ...], *both: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.case = case
        ctx.save_for_backward(*both)
        size = len(both) // 2

        def body(rank: int) -> torch.Tensor:
            local = both[rank].detach().requires_grad_()
            (grad,) = torch.autograd.grad(_run(case, local), local, both[size + rank].detach())
            assert isinstance(grad, torch.Tensor)
            return grad

        return tuple(run_ranks(size, body))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        both, size = ctx.saved_tensors, len(cotangents)

        def body(rank: int) -> torch.Tensor:
            local = both[rank].detach().requires_grad_()
            arriving = both[size + rank].detach().requires_grad_()
            (grad,) = torch.autograd.grad(_run(ctx.case, local), local, arriving, create_graph=True)
            (twice,) = torch.autograd.grad(grad, arriving, cotangents[rank])
            assert isinstance(twice, torch.Tensor)
            return twice

        # The map is linear: its gradient does not depend on where it is taken.
        return None, *(torch.zeros_like(local) for local in both[:size]), *run_ranks(size, body)


def _run(case: tuple[Any, ...], local: torch.Tensor) -> torch.Tensor:
    mesh_shape, source, target = case
    return T.redistribute(local, *specs(mesh_shape, source, target), grad_placements=independent(target))


def random_locals(mesh_shape: tuple[int, ...], placements: str) -> list[torch.Tensor]:
    """Random local tensors of the shapes that the placements give."""
    whole = torch.zeros(SHAPE, dtype=torch.float64)
    given = local_tensors(whole, mesh_shape, T.parse_placements(placements))
    return [torch.randn_like(given[coordinate]).requires_grad_() for coordinate in coordinates(mesh_shape)]


# Every source here is one that ranks may fill independently, so that finite differences make sense.
GRADCHECK_CASES = [
    ((2,), "S0", "S1"),
    ((3,), "S1", "R"),
    ((2,), "P", "R"),
    ((2,), "P(avg)", "S0"),
    ((2, 2), "S0, S0", "S1, R"),
    ((2, 2), "P, S0", "S1, R"),
    ((2, 2), "P(sum), P(avg)", "R, S1"),
    ((2, 2), "S0(unit=2), S1(repeats=3)", "S1, S0"),
]


@pytest.mark.parametrize(("mesh_shape", "source", "target"), GRADCHECK_CASES)
def test_gradients_of_all_ranks_together(mesh_shape: tuple[int, ...], source: str, target: str) -> None:
    given = random_locals(mesh_shape, source)

    def function(*local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = Everywhere.apply((mesh_shape, source, target), *local)
        return found

    assert torch.autograd.gradcheck(function, given, fast_mode=len(mesh_shape) > 1)
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


def gradient(
    mesh_shape: tuple[int, ...], source: str, target: str, arriving: list[list[float]], grad: str | None = None
) -> list[list[float]]:
    """The gradients by rank of a tensor of 4 elements, for given gradients of the result."""

    def body(rank: int) -> list[float]:
        mesh, meta = Mesh(mesh_shape), T.TensorMeta.contiguous((4,))
        before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
        local = torch.ones(before.local_shape, requires_grad=True)
        placements = None if grad is None else T.parse_placements(grad)
        result = T.redistribute(local, before, after, grad_placements=placements)
        result.backward(torch.tensor(arriving[rank]))
        assert local.grad is not None
        found: list[float] = local.grad.tolist()
        return found

    return run_ranks(len(arriving), body)


def test_every_term_of_a_sum_has_the_gradient_of_the_sum() -> None:
    whole = [1.0, 2.0, 3.0, 4.0]
    assert gradient((2,), "P", "R", [whole, whole]) == [whole, whole]
    assert gradient((2,), "P", "S0", [[1.0, 2.0], [3.0, 4.0]]) == [whole, whole]


def test_every_term_of_a_mean_has_its_share() -> None:
    assert gradient((2,), "P(avg)", "R", [[2.0, 4.0, 6.0, 8.0]] * 2) == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_gradients_that_arrive_as_terms_are_added() -> None:
    """In front of a column-parallel matmul: backward is a reduce-scatter."""
    arriving = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]
    assert gradient((2,), "S0", "R", arriving, "P") == [[11.0, 22.0], [33.0, 44.0]]
    assert gradient((2,), "R", "R", arriving, "P") == [[11.0, 22.0, 33.0, 44.0]] * 2


def test_gradients_that_arrive_replicated_are_cut() -> None:
    arriving = [[1.0, 2.0, 3.0, 4.0]] * 2
    assert gradient((2,), "S0", "R", arriving) == [[1.0, 2.0], [3.0, 4.0]]


def test_a_shard_gets_its_gradient_back_from_its_term() -> None:
    assert gradient((2,), "S0", "P", [[1.0, 2.0, 3.0, 4.0]] * 2) == [[1.0, 2.0], [3.0, 4.0]]
    assert gradient((2,), "R", "P(avg)", [[1.0, 2.0, 3.0, 4.0]] * 2) == [[2.0, 4.0, 6.0, 8.0]] * 2


def test_expanded_gradients_are_read_right() -> None:
    """`sum()` hands back one element with strides of 0."""

    def body(rank: int) -> torch.Tensor:
        source, target = specs((2,), "S0", "S1")
        local = torch.ones(source.local_shape, dtype=torch.float64, requires_grad=True)
        T.redistribute(local, source, target).sum().backward()
        assert local.grad is not None
        return local.grad

    assert torch.cat(run_ranks(2, body)).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("op", ["max", "min", "product"])
@pytest.mark.parametrize(("source", "target"), [("P({})", "R"), ("R", "P({})"), ("P({})", "P({})")])
def test_other_reductions_refuse_in_backward(op: str, source: str, target: str) -> None:
    def body(rank: int) -> None:
        before, after = specs((2, 1), source.format(op) + ", R", target.format(op) + ", S0")
        local = torch.ones(before.local_shape, dtype=torch.float64, requires_grad=True)
        result = T.redistribute(local, before, after)
        with pytest.raises(T.ReductionError, match=rf"reduction by {op}.*no gradient.*allowed are sum and avg"):
            result.sum().backward()

    run_ranks(2, body)


def test_without_gradients_there_is_no_graph() -> None:
    def body(rank: int) -> None:
        source, target = specs((2,), "P(max)", "R")
        local = torch.ones(source.local_shape, dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            assert not T.redistribute(local, source, target).requires_grad
        assert not T.redistribute(local.detach(), source, target).requires_grad

    run_ranks(2, body)


def test_inference_mode_moves_alike() -> None:
    def body(rank: int) -> list[list[float]]:
        source, target = specs((2,), "S0", "R")
        with torch.inference_mode():
            return T.redistribute(torch.full(source.local_shape, float(rank)).double(), source, target).tolist()

    assert run_ranks(2, body) == [[[0.0] * 3, [1.0] * 3]] * 2


def test_a_spec_to_itself_keeps_the_graph() -> None:
    def body(rank: int) -> None:
        source, _ = specs((2,), "S0", "S0")
        local = torch.ones(source.local_shape, dtype=torch.float64, requires_grad=True)
        found = T.redistribute(local, source, source)
        assert found.data_ptr() == local.data_ptr()
        assert torch.autograd.grad(found.sum(), local)[0].tolist() == [[1.0] * 3]

    run_ranks(2, body)
