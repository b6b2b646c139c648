"""The differential checker: what it lets pass, and that it names the operator that is laid out wrongly, and where."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import check_against_single_device
from tritondt.errors import DifferenceError
from tritondt.ops import AxisStrategy, propagator, register_op_strategy, set_fallback

aten = torch.ops.aten
X = torch.arange(24.0, dtype=torch.float64).reshape(4, 6) / 10
W = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6)


def model(x: Any, weight: Any) -> Any:
    hidden = F.layer_norm(F.linear(x, weight).sigmoid(), (3,))
    hidden = F.dropout(hidden, 0.5).view(2, 2, 3)[:, 1].mul_(2)
    (hidden.tanh().softmax(-1) * hidden.cumprod(0)).sum().backward()
    return hidden


def test_what_is_right_passes_with_its_backward():
    def body(rank):
        mesh = T.Mesh((2,))
        for of_x, of_weight in (("S0", "R"), ("S1", "S1"), ("P", "S0"), ("S0(sizes=1/3)", "S0(sizes=0/3)")):
            x, weight = distribute(X, mesh, of_x), distribute(W, mesh, of_weight)
            found = check_against_single_device(model, x, weight.requires_grad_())
            assert isinstance(found, T.DTensor)
            assert weight.grad is not None

    with set_fallback("replicate"):  # the process's: rank threads would restore each other's
        run_ranks(2, body)


@pytest.fixture
def forgetful():
    """A strategy of tanh that forgets to say that its result is cut, and one of its gradient that loses a factor."""
    register_op_strategy(
        aten.tanh.default,
        lambda schema: [AxisStrategy((T.Partial(),), (T.Partial(),)), AxisStrategy((T.Shard(0),), (T.Shard(0),))],
    )
    register_op_strategy(
        aten.sigmoid_backward.default,
        lambda schema: [AxisStrategy((T.Shard(0), T.Shard(0)), (T.Partial(),), exact=True)],
        # A local function of its own is believed: without one the decision itself would be refused.
        localize=lambda schema, outputs: aten.sigmoid_backward.default,
    )
    yield
    propagator.forget(aten.tanh.default)
    propagator.forget(aten.sigmoid_backward.default)


def test_a_wrong_strategy_is_named_with_the_line_that_called(forgetful):
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "P")
        with pytest.raises(DifferenceError) as caught:
            check_against_single_device(lambda x: x.tanh().exp(), x)
        text = str(caught.value)
        assert text.startswith("aten.tanh.default((P(sum)) of (4, 6) float64), called at ")
        assert "test_single_device.py:" in text
        assert "differs from one device on ranks [0, 1]: (P(sum)) of (4, 6) float64: Tensor-likes are not close" in text
        # Cut rows are laid out as they should be.
        check_against_single_device(torch.tanh, distribute(X, T.Mesh((2,)), "S0"))

    run_ranks(2, body)


def test_a_wrong_gradient_is_named(forgetful):
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0").requires_grad_()
        sentence = r"aten.sigmoid_backward.default\(.* a local tensor of shape \(2, 6\) under"
        with pytest.raises(DifferenceError, match=sentence):
            check_against_single_device(lambda: x.sigmoid().sum().backward())

    run_ranks(2, body)


def test_numbers_are_compared():
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        assert check_against_single_device(lambda x: (x.sum().item(), torch.equal(x, x)), x) == (X.sum().item(), True)

    run_ranks(2, body)
