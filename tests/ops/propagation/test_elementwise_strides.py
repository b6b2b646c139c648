"""Strides of elementwise results against those that torch's kernels give, for operands of many shapes and orders."""

import random

import pytest
import torch

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops.propagation.elementwise_strides import elementwise_strides


def operand(draw, whole):
    """A tensor that broadcasts to `whole`, its dims in some order in memory, dense or with gaps or with steps of 0."""
    num_dims = draw.randint(max(0, len(whole) - 2), len(whole))
    lengths = [draw.choice([1, length, length, length]) for length in whole[len(whole) - num_dims :]]
    order = draw.sample(range(num_dims), num_dims)
    made = torch.zeros([lengths[dim] for dim in order]).permute([order.index(dim) for dim in range(num_dims)])
    kind = draw.random()
    if kind < 0.2 and num_dims:
        gaps = torch.zeros([2 * length for length in lengths])
        return gaps[(slice(None, None, 2),) * num_dims]
    return made.expand(whole[len(whole) - num_dims :]) if kind < 0.4 else made


@pytest.mark.parametrize("seed", range(4))
def test_strides_of_random_operands(seed):
    draw = random.Random(seed)
    for _ in range(1000):
        whole = [draw.choice([1, 1, 2, 3, 0] if draw.random() < 0.1 else [1, 2, 3]) for _ in range(draw.randint(0, 5))]
        operands = [operand(draw, whole) for _ in range(draw.randint(1, 3))]
        function = (torch.neg, torch.mul, torch.addcmul)[len(operands) - 1]
        expected = function(*operands)
        assert elementwise_strides(tuple(expected.shape), operands) == expected.stride(), [
            (tensor.shape, tensor.stride()) for tensor in operands
        ]


def test_the_spec_of_a_product_has_the_strides_of_one_device():
    full = torch.arange(2.0).view(2, 1, 1), torch.arange(2.0).view(2, 1)

    def body(rank):
        rows, column = (distribute(tensor, T.Mesh((2,)), "R") for tensor in full)
        assert (rows.swapaxes(-1, 0) * column).stride() == (full[0].swapaxes(-1, 0) * full[1]).stride() == (1, 1, 2)

    run_ranks(2, body)
