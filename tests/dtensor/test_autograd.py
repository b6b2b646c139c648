"""Gradients through from_local, to_local and redistribute, in fp64, on uneven shards, twice."""

from typing import Any, cast

import pytest
import torch

import tritondt as T
from tests.ops.sharded import Case, check, check_derivatives, distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements

FULL = torch.arange(1.0, 36.0, dtype=torch.float64).reshape(7, 5)
LAYOUTS = ["S0", "S1", "R", "S0(sizes=4/0/3)", "S1(unit=5)", "P", "P(avg)"]


def redistributed(x: torch.Tensor, text: str) -> T.DTensor:
    return cast(T.DTensor, x).redistribute(placements=parse_placements(text))


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_the_gradient_of_a_redistributed_tensor_is_that_of_the_whole(source, target):
    """x -> sum(w * x^3) with the cube taken under the target layout; reduced first where it is terms."""

    def body(rank):
        mesh = T.Mesh((3,))
        x = distribute(FULL, mesh, source).requires_grad_()
        weight = distribute(FULL + 1, mesh, "R")
        cubed = redistributed(x, target).pow(3)
        (cubed * weight).sum().backward()
        torch.testing.assert_close(whole(cast(torch.Tensor, x.grad)), 3 * FULL**2 * (FULL + 1))

    run_ranks(3, body)


def test_from_local_hands_each_rank_the_gradient_of_its_part():
    def body(rank):
        mesh = T.Mesh((3,))
        part = distribute(FULL, mesh, "S0").to_local().clone().requires_grad_()
        x = T.DTensor.from_local(part, mesh, [T.Shard(0)], shape=(7, 5))
        (x * x).sum().backward()
        assert part.grad is not None
        torch.testing.assert_close(part.grad, 2 * part.detach(), rtol=0, atol=0)

    run_ranks(3, body)


@pytest.mark.parametrize(("text", "divisor"), [("P", 1), ("P(avg)", 3), ("R", 1)])
def test_from_local_of_terms_and_replicas(text, divisor):
    """d/dterm of sum(x^2) is 2x for a sum of terms, and 2x/n for their mean."""

    def body(rank):
        mesh = T.Mesh((3,))
        term = distribute(FULL, mesh, text).to_local().clone().requires_grad_()
        x = T.DTensor.from_local(term, mesh, parse_placements(text))
        (redistributed(x, "R") ** 2).sum().backward()
        torch.testing.assert_close(term.grad, 2 * FULL / divisor)

    run_ranks(3, body)


@pytest.mark.parametrize("text", ["P", "P(avg)", "P, P(avg)", "P(avg), S0", "R", "S0"])
def test_to_local_and_back_is_the_identity_for_gradients_too(text):
    """d/dx of sum(x^3), twice, with x taken apart into terms or pieces and put together again."""
    mesh_shape = (2,) * (1 + text.count(","))

    def body(rank):
        mesh = T.Mesh(mesh_shape)
        x = distribute(FULL[:3], mesh, text)
        x.requires_grad_()
        back = T.DTensor.from_local(x.to_local(), mesh, x.placements, shape=x.shape)
        y = redistributed(back, ", ".join("R" for _ in mesh_shape))
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        torch.testing.assert_close(whole(first), 3 * FULL[:3] ** 2)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        torch.testing.assert_close(whole(second), 36 * FULL[:3] ** 3)

    run_ranks(2 ** len(mesh_shape), body)


def test_the_terms_of_a_maximum_have_no_gradient():
    def body(rank):
        mesh = T.Mesh((2,))
        term = torch.ones(3, requires_grad=True)
        x = T.DTensor.from_local(term, mesh, [T.Partial("max")])
        with pytest.raises(T.ReductionError, match="is a reduction by max, which has no gradient here"):
            redistributed(x, "R").sum().backward()
        highest = cast(T.DTensor, x.detach().requires_grad_())
        with pytest.raises(T.ReductionError, match="is a reduction by max, which has no gradient here"):
            highest.to_local().sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("R", [[2.0, 2.0, 4.0]] * 2), ("P", [[2.0, 2.0, 4.0], [0.0, 0.0, 0.0]]), ("S0", None)],
)
def test_grad_placements_of_from_local(wanted, expected):
    """Of a replicated tensor each rank gets the whole gradient, or terms of it; never a part of another shape."""

    def body(rank):
        local = torch.ones(3, requires_grad=True)
        mesh = T.Mesh((2,))
        if expected is None:
            message = (
                r"grad_placements=\(S0\) were given for a local tensor of \(R\) of \(3,\) float32, which has other"
            )
            with pytest.raises(T.LayoutError, match=message):
                T.DTensor.from_local(local, mesh, [T.Replicate()], grad_placements=parse_placements(wanted))
            replicated: Any = T.ones(3, device_mesh=mesh).requires_grad_()
            with pytest.raises(T.LayoutError, match=message):
                replicated.to_local(grad_placements=parse_placements(wanted))
            return
        x = T.DTensor.from_local(local, mesh, [T.Replicate()], grad_placements=parse_placements(wanted))
        # Rank 0 has two of the three elements, and rank 1 the last.
        part = x.redistribute(placements=[T.Shard(0)]).to_local()
        (part * (2.0 if rank == 0 else 4.0)).sum().backward()
        assert local.grad is not None
        assert local.grad.tolist() == expected[rank]

    run_ranks(2, body)


@pytest.mark.parametrize(("text", "stride"), [("S0", (5, 1)), ("S1", (5, 1)), ("S1", (1, 7)), ("S0, S0", (1, 7))])
def test_from_local_of_uneven_shards_with_shape_and_stride(text, stride):
    """Global shape and stride are as given on every rank, those with an empty part too, and gradients come back."""
    mesh_shape = (2, 2) if "," in text else (4,)
    whole_tensor = torch.empty_strided((7, 5), stride, dtype=FULL.dtype).copy_(FULL)

    def body(rank):
        mesh = T.Mesh(mesh_shape)
        given = distribute(whole_tensor, mesh, text)
        local = given.to_local().detach().clone().requires_grad_()
        placements = parse_placements(text)
        x: Any = T.DTensor.from_local(local, mesh, placements, shape=torch.Size((7, 5)), stride=stride)
        assert x._spec is T.DTensorSpec(mesh, placements, T.TensorMeta((7, 5), stride, FULL.dtype))
        assert (x.shape, x.stride()) == ((7, 5), stride)
        torch.testing.assert_close(whole(x.detach()), FULL, rtol=0, atol=0)
        weight = T.distribute_tensor(FULL, mesh)
        (x.redistribute(placements=weight.placements) * weight).sum().backward()
        assert local.grad is not None
        torch.testing.assert_close(local.grad, local.detach(), rtol=0, atol=0)
        return local.numel()

    found = run_ranks(4, body)
    assert sum(found) == 35
    assert len(set(found)) > 1


def test_grad_placements_add_up_what_ranks_do_differently_with_one_tensor():
    def body(rank):
        mesh = T.Mesh((3,))
        x = distribute(FULL, mesh, "R")
        x.requires_grad_()
        local = x.to_local(grad_placements=[T.Partial()])
        (local * (rank + 1)).sum().backward()
        grad = cast(T.DTensor, x.grad)
        assert grad.placements == (T.Partial(),)
        torch.testing.assert_close(whole(grad), torch.full_like(FULL, 6.0), rtol=0, atol=0)

    run_ranks(3, body)


def test_the_gradient_of_a_mean_comes_and_goes_as_a_mean():
    def body(rank):
        mesh, mean = T.Mesh((2,)), [T.Partial("avg")]
        own = FULL.clone().requires_grad_()
        # Each of the two terms has half of the mean's gradient.
        of_means: Any = T.DTensor.from_local(own, mesh, mean, grad_placements=mean)
        (of_means.redistribute(placements=[T.Replicate()]) * 3).sum().backward()
        torch.testing.assert_close(own.grad, torch.full_like(FULL, 1.5), rtol=0, atol=0)
        x: Any = distribute(FULL, mesh, "R").requires_grad_()
        (x.redistribute(placements=mean).to_local(grad_placements=mean) * (rank + 1)).sum().backward()
        torch.testing.assert_close(whole(x.grad), torch.full_like(FULL, 3.0), rtol=0, atol=0)

    run_ranks(2, body)


@pytest.mark.parametrize("target", ["S1", "R", "S0(sizes=0/3)"])
@pytest.mark.parametrize("source", ["S0", "S1(sizes=2/0)", "R", "P", "P(avg)"])
def test_first_and_second_derivatives_against_finite_differences(source, target):
    case = Case((2,), (FULL[:3, :2] / 10,), (source,))
    check_derivatives(lambda x: redistributed(x, target).pow(3), case)


def test_derivatives_with_two_axes_in_one_dim():
    case = Case((2, 2), (FULL[:5, :2] / 10,), ("S0, S0",), order=(1, 0))
    check_derivatives(lambda x: redistributed(x, "S1, S0").pow(3), case)


def test_forward_and_backward_dtypes():
    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(FULL.float(), mesh, "S0")
        x.requires_grad_()
        y = x.redistribute(placements=[T.Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float16)
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(whole(y), FULL.bfloat16(), rtol=0, atol=0)
        kinds = []
        y.register_hook(lambda grad: kinds.append(grad.dtype))
        (y * 3).sum().backward()
        grad = cast(torch.Tensor, x.grad)
        assert (kinds, grad.dtype) == ([torch.bfloat16], torch.float32)
        torch.testing.assert_close(whole(grad), torch.full((7, 5), 3.0), rtol=0, atol=0)

    run_ranks(2, body)


def test_pieces_of_a_split_that_nobody_uses_have_zero_gradients():
    full = FULL[:6]
    check(lambda x: x.split([2, 2, 2])[1] * 2, Case((2,), (full,), ("S1",)), gradients=True)
    check(lambda x: x.unbind(1)[2] * 2, Case((2,), (full,), ("S0",)), gradients=True)


def test_zeros_that_autograd_makes_of_a_shape_are_distributed():
    def body(rank):
        mesh = T.Mesh((2,))
        x = T.distribute_tensor(torch.arange(5.0) - 2, mesh, [T.Shard(0)]).requires_grad_()
        x.sgn().sum().backward()
        assert isinstance(x.grad, T.DTensor)
        assert x.grad.placements == (T.Replicate(),)
        torch.testing.assert_close(x.grad.full_tensor(), torch.zeros(5), rtol=0, atol=0)
        torch.optim.SGD([x], lr=0.1).step()
        (x * 2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.full((5,), 2.0), rtol=0, atol=0)
        x.grad = None
        assert x.grad is None
        # What is not zero, nobody knows to be alike on all ranks.
        x.grad = torch.ones(5)
        assert type(x.grad) is torch.Tensor
        del x.grad

    run_ranks(2, body)


@pytest.mark.parametrize("text", ["R", "S0"])
def test_gradients_are_added_to_one_whose_elements_shared_memory(text):
    """A sum's gradient is one element that is expanded; where it comes to a local tensor, its strides do not tell."""

    def body(rank):
        x: Any = T.distribute_tensor(FULL, T.Mesh((2,)), T.parse_placements(text)).requires_grad_()
        y = T.DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape)
        y.sum().backward()
        (x * x).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 1 + 2 * FULL, rtol=0, atol=0)

    run_ranks(2, body)
