"""squeeze_, unsqueeze_, t_ and transpose_: the same tensor under another shape, aliases and all."""

import copy

import pytest
import torch

import tritondt as T
from tests.ops.sharded import Case, check, distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements

FULL = torch.arange(30.0).reshape(5, 1, 6)


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (lambda x: x.squeeze_(), "S0", "S0"),
        (lambda x: x.squeeze_(1), "S2", "S1"),
        (lambda x: x.unsqueeze_(0), "S2(unit=2)", "S3(unit=2)"),
        (lambda x: x.transpose_(0, 2), "S0(sizes=1/0/4)", "S2(sizes=1/0/4)"),
        (lambda x: x.squeeze_().t_(), "S2", "S0"),
        (lambda x: x.squeeze_(), "S1", "S1(unit=6)"),  # one rank holds all
    ],
)
def test_the_tensor_itself_has_the_new_shape(change, before, after):
    def body(rank):
        mesh = T.Mesh((3,))
        x = distribute(FULL, mesh, before)
        same = x.detach()
        expected = change(FULL.clone())
        found = change(x)
        assert found is x
        assert x.shape == expected.shape
        assert x.stride() == expected.stride()
        assert x.placements == parse_placements(after)
        torch.testing.assert_close(whole(x), expected, rtol=0, atol=0)
        x.mul_(2)
        torch.testing.assert_close(whole(same), FULL * 2, rtol=0, atol=0)

    run_ranks(3, body)


@pytest.mark.parametrize("text", ["S0", "S1", "R"])
def test_a_vector_times_a_matrix(text):
    """Torch makes a matrix of the vector, and a vector of the result, in place."""
    matrix = torch.randn(6, 7)
    case = Case((3,), (torch.randn(6), matrix), ("S0" if text == "S0" else "R", text))
    check(lambda vector, matrix: vector @ matrix, case, gradients=True)


@pytest.mark.parametrize("text", ["S0", "S1", "R"])
def test_a_tensor_whose_views_take_gradients_keeps_its_dims(text):
    """Torch would take the view again of the other dims: of a square matrix, a column for a row."""

    def body(rank):
        x = distribute(torch.arange(16.0).view(4, 4), T.Mesh((2,)), text).requires_grad_()
        row = x[1]
        with torch.no_grad(), pytest.raises(T.PropagationError, match="which has views that take gradients"):
            x.t_()
        y = x * 2
        y.view(4, 2, 2)
        with pytest.raises(T.PropagationError, match=r"make a new tensor by aten\.unsqueeze\.default"):
            y.unsqueeze_(0)
        row.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(whole(x.grad), torch.eye(4)[1][:, None].expand(4, 4), rtol=0, atol=0)
        # Of no consequence are views that take none, and what has none.
        other = distribute(torch.arange(6.0).view(2, 3), T.Mesh((2,)), text).requires_grad_()
        with torch.no_grad():
            kept = other[0]
            other.t_()
        assert (other.shape, kept.shape) == ((3, 2), (3,))
        (other.detach().clone().requires_grad_() * 1).t_().sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize("text", ["S0", "R"])
def test_a_viewed_tensor_whose_dims_were_changed_takes_no_gradients(text):
    """Torch would take its views' gradients of the other dims; of `v = x.movedim(-1, -1)` with an error of its own."""

    def body(rank):
        x = distribute(torch.arange(16.0).view(4, 4), T.Mesh((2,)), text)
        row = x[1]
        x.t_()
        with pytest.raises(
            T.PropagationError, match=r"had views when aten\.t_\.default changed its dims.*x\.detach\(\)"
        ):
            x.requires_grad_()
        assert not x.requires_grad_(False).requires_grad
        torch.testing.assert_close(whole(row), torch.arange(4.0, 8.0), rtol=0, atol=0)
        for free in (x.detach(), copy.deepcopy(x), x.clone()):
            (free.requires_grad_()[1] * 2).sum().backward()
            assert free.grad is not None
            torch.testing.assert_close(whole(free.grad), 2 * torch.eye(4)[1][:, None].expand(4, 4), rtol=0, atol=0)

    run_ranks(2, body)
