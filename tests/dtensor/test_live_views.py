"""Gradients of views whose base is reshaped in place: refused, where torch would make them of other elements."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks

VIEWS = {
    "row": lambda x: x[1],
    "flat": lambda x: x.reshape(-1),
    "slice": lambda x: x[:2],
    "t": lambda x: x.t(),
    "list": lambda x: x.split(2)[0],
}
CHANGES = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
}


CASES = [*((view, "t_", False) for view in VIEWS), *(("row", change, True) for change in CHANGES)]


@pytest.mark.parametrize(("view", "change", "is_leaf"), CASES)
def test_a_tensor_whose_views_take_gradients_is_not_reshaped_in_place(view, change, is_leaf):
    def body(rank):
        x: Any = distribute(numbers(3, 3), T.Mesh((2,)), "S0").requires_grad_()
        base = x if is_leaf else x * 2
        kept = VIEWS[view](base)
        with (
            torch.set_grad_enabled(not is_leaf),
            pytest.raises(T.PropagationError, match=r"would give \(S0\) of \(3, 3\) float64 other dims, of which a"),
        ):
            CHANGES[change](base)
        assert base.shape == (3, 3)
        kept.sum().backward()
        expected = numbers(3, 3).requires_grad_()
        VIEWS[view](expected if is_leaf else expected * 2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), expected.grad, rtol=0, atol=0)

    run_ranks(2, body)


def test_other_tensors_are_reshaped_in_place():
    def reshaped(x):
        seen = [x * x, x.exp()]  # graphs that hold the tensor
        inner = x * 2
        detached = inner[1].detach()
        inner.t_()
        gone = inner[0]
        del gone
        inner.unsqueeze_(0)
        inner.squeeze_(1)  # of length 3: nothing changes, and the view stays right
        row = inner[0]
        inner.squeeze_(1)
        (row * row).sum().backward()
        with torch.no_grad():
            plain = (x * 1).detach()
            under = plain[1]
            plain.transpose_(0, 1).mul_(2)
        return [*seen, inner, detached, plain, under, x.grad]

    def body(rank):
        full = numbers(3, 3).requires_grad_()
        found = reshaped(distribute(numbers(3, 3), T.Mesh((2,)), "S1").requires_grad_())
        for tensor, expected in zip(found, reshaped(full), strict=True):
            torch.testing.assert_close(tensor.detach().full_tensor(), expected.detach(), rtol=0, atol=0)

    run_ranks(2, body)
