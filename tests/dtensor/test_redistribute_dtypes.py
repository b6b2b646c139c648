"""forward_dtype and backward_dtype: values and bytes; a redistribution to the same placements gives another tensor."""

from functools import partial
from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode

R, S0, S1, P = T.Replicate(), T.Shard(0), T.Shard(1), T.Partial()
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
MOVES = {"S -> R": (S0, R), "R -> R": (R, R), "S -> S": (S0, S0), "S1 -> R": (S1, R)}


def gradient_of_terms(
    rank: int, source: T.Placement, target: T.Placement, forward: Any, backward: Any, **options: Any
) -> tuple[torch.dtype, list[float]]:
    """The gradient where ranks' terms are 256 and 1: bfloat16 has no 257."""
    x: Any = T.distribute_tensor(torch.ones(4, 2), T.Mesh((2,)), [source]).requires_grad_()
    y = x.redistribute(placements=[target], forward_dtype=forward, backward_dtype=backward, **options)
    local = y.to_local(grad_placements=[P if target == R else target])
    (local * (1.0 if rank else 256.0)).sum().backward()
    assert isinstance(x.grad, T.DTensor)
    assert y.dtype is (forward or FP32)
    return x.grad.dtype, x.grad.full_tensor().unique().tolist()


@pytest.mark.in_core(4)
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    ("forward", "backward", "total"),
    [(BF16, None, 257), (BF16, FP32, 257), (FP64, None, 257), (None, None, 257), (None, BF16, 256), (FP64, BF16, 256)],
)
def test_gradients_are_added_up_in_the_dtype_of_the_input(
    name: str, async_op: bool, forward: Any, backward: Any, total: float
) -> None:
    wanted = [1.0, 256.0] if name == "S -> S" else [float(total)]
    for dtype, found in run_ranks(
        2, lambda rank: gradient_of_terms(rank, *MOVES[name], forward, backward, async_op=async_op)
    ):
        assert (dtype, found) == (FP32, wanted)


def test_second_derivatives_pass_dtypes() -> None:
    def body(rank: int) -> None:
        x: Any = T.distribute_tensor(torch.arange(1.0, 9).view(4, 2), T.Mesh((2,)), [S0]).requires_grad_()
        y = x.redistribute(placements=[R], forward_dtype=FP64)
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        assert isinstance(gradient, T.DTensor)
        assert isinstance(second, T.DTensor)
        assert gradient.dtype is second.dtype is FP32
        torch.testing.assert_close(second.full_tensor(), 6 * torch.arange(1.0, 9).view(4, 2), rtol=0, atol=0)

    run_ranks(2, body)


def test_terms_are_converted_before_they_are_added() -> None:
    """As torch does, and in messages of the shorter dtype; where nothing is added the shorter dtype travels too."""

    def sent(rank: int, source: T.Placement, target: T.Placement, forward: Any) -> Any:
        local = torch.full((64, 64) if source == P else (16, 64), 1 + 2.0**-10)
        x = T.DTensor.from_local(local, T.Mesh((4,)), [source])
        with CommDebugMode() as moved:
            y = x.redistribute(placements=[target], forward_dtype=forward)
        return moved.get_sent_bytes(), y.dtype, y.full_tensor().unique().tolist()

    term = 1 + 2.0**-10
    for source, target, forward, num_bytes, value in (
        (P, S0, BF16, 64 * 48 * 2, 4.0),  # each term rounds to 1
        (P, S0, None, 64 * 48 * 4, 4 * term),
        (P, R, BF16, 64 * 48 * 2 * 2, 4.0),
        (P, S0, FP64, 64 * 48 * 8, 4 * term),
        (S0, R, BF16, 3 * 16 * 64 * 2, 1.0),
        (S0, R, FP64, 3 * 16 * 64 * 4, term),
        (S0, S1, FP64, 3 * 16 * 16 * 4, term),
        (P, R, torch.int32, 64 * 48 * 2 * 4, 4),  # what would lose the fractions of terms is reduced first
    ):
        for found in run_ranks(4, partial(sent, source=source, target=target, forward=forward)):
            assert found == (num_bytes, forward or FP32, [value]), (source, target, forward)


@pytest.mark.parametrize("text", ["R", "S0", "P"])
def test_to_the_same_placements_is_another_tensor(text: str) -> None:
    def body(rank: int) -> None:
        x = distribute(torch.arange(8.0).view(4, 2), T.Mesh((2,)), text)
        y = x.redistribute(placements=x.placements)
        held = x.to_local()
        assert y is not x
        y.requires_grad_()
        assert not x.requires_grad
        x.mul_(2)  # as a view that torch does not know of: the memory is one
        torch.testing.assert_close(y.full_tensor(), 2 * torch.arange(8.0).view(4, 2), rtol=0, atol=0)
        assert held.data_ptr() == y.to_local().data_ptr()
        x.redistribute(placements=x.placements, async_op=True).requires_grad_()
        x.redistribute(placements=x.placements, forward_dtype=x.dtype).requires_grad_()
        assert not x.requires_grad
        x.full_tensor().requires_grad_()
        x.to_local().requires_grad_()
        assert not x.to_local().requires_grad

    run_ranks(2, body)
