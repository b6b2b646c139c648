"""Layers under autograd, no_grad and inference_mode, with weights made outside of it: one result, whatever arrives.

Where gradients are recorded torch takes F.linear, matmul and einsum apart before they reach a distributed tensor;
under inference_mode they arrive whole.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.sharded import Case, check, check_derivatives, compare, distribute
from tritondt.comm.transports.threads import run_ranks

DOUBLE = torch.float64
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
X2, X3, X4 = (torch.randn(*batch, 6, dtype=DOUBLE) for batch in ((4,), (4, 3), (2, 4, 3)))
WEIGHT, BIAS = torch.randn(5, 6, dtype=DOUBLE), torch.randn(5, dtype=DOUBLE)
LAYOUTS = [
    # input, weight, bias: data parallel, column parallel, row parallel, all whole, terms in.
    ("S0", "R", "R", "S0"),
    ("R", "S0", "S0", "S{last}"),
    ("R", "S0(sizes=0/4/1)", "S0(sizes=0/4/1)", "S{last}(sizes=0/4/1)"),
    ("S{last}", "S1", "R", "P"),
    ("S{last}(unit=3)", "S1(unit=3)", "R", "P"),
    ("R", "R", "R", "R"),
    ("P", "R", "R", "P"),
]


def under(mode, function):
    def run(*tensors):
        with mode():
            return function(*tensors)

    return run


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("features", [X2, X3, X4], ids=["2-D", "3-D", "4-D"])
@pytest.mark.parametrize(("x", "weight", "bias", "expect"), LAYOUTS)
def test_linear(mode, features, x, weight, bias, expect):
    last = features.ndim - 1
    x, expect = x.format(last=last), expect.format(last=last)
    gradients = mode is torch.enable_grad
    case = Case((3,), (features, WEIGHT), (x, weight))
    check(under(mode, F.linear), case, gradients=gradients, expect=expect)
    case = Case((3,), (features, WEIGHT, BIAS), (x, weight, bias))
    check(under(mode, F.linear), case, gradients=gradients, expect=expect)


@pytest.mark.parametrize("mode", MODES)
def test_linear_on_two_axes(mode):
    gradients = mode is torch.enable_grad
    for placements, expect in [
        (("S0, R", "R, S0", "R, S0"), "S0, S2"),
        (("S0, S2", "R, S1", "R, R"), "S0, P"),
        (("S1, S2", "R, S1", "R, R"), "S1, P"),
        (("S1, R", "R, S0", "R, S0"), "S1, S2"),
    ]:
        case = Case((2, 2), (X3, WEIGHT, BIAS), placements)
        check(under(mode, F.linear), case, gradients=gradients, expect=expect)


@pytest.mark.parametrize("mode", MODES)
def test_linear_of_a_vector_and_of_one_output(mode):
    check(under(mode, F.linear), Case((3,), (X2[0], WEIGHT, BIAS), ("S0", "S1", "R")), expect="P")
    check(under(mode, F.linear), Case((3,), (X3, WEIGHT[0]), ("S0", "R")), expect="S0")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("left", "right"),
    [((3, 4, 6), (3, 6, 5)), ((3, 4, 6), (6, 5)), ((4, 6), (3, 6, 5)), ((4, 6), (6,)), ((6,), (6,))],
)
def test_matmul(mode, left, right):
    x, y = torch.randn(left, dtype=DOUBLE), torch.randn(right, dtype=DOUBLE)
    contracted = f"S{len(left) - 1}", f"S{max(len(right) - 2, 0)}"
    for placements in (contracted, ("S0", "R"), ("R", "S0"), ("P", "R")):
        check(under(mode, torch.matmul), Case((2,), (x, y), placements), gradients=mode is torch.enable_grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bjk->bik", ((3, 4, 6), (3, 6, 5))),
        ("bij,kj->bik", ((3, 4, 6), (5, 6))),
        ("bhqd,bhkd->bhqk", ((2, 3, 4, 6), (2, 3, 5, 6))),
        ("ij->ji", ((4, 6),)),
        ("i,j->ij", ((4,), (5,))),
    ],
)
def test_einsum(mode, equation, shapes):
    tensors = [torch.randn(shape, dtype=DOUBLE) for shape in shapes]

    def run(*tensors):
        with mode():
            return torch.einsum(equation, *tensors)

    for placement in ("S0", "R"):
        case = Case((2,), tensors, (placement, *["R"] * (len(tensors) - 1)))
        check(run, case, gradients=mode is torch.enable_grad, strides=False)


def test_a_column_and_a_row_parallel_layer_reduce_once():
    """Column, then row parallel: no communication in between, and terms at the end."""

    def block(x, up, up_bias, down, down_bias):
        return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)

    up, up_bias, down, down_bias = (torch.randn(shape, dtype=DOUBLE) for shape in ((10, 6), (10,), (6, 10), (6,)))
    case = Case((4,), (X3, up, up_bias, down, down_bias), ("R", "S0", "S0", "S1", "R"))

    def strict(*tensors):
        with T.explicit_redistribution():
            return block(*tensors)

    for mode in MODES:
        check(under(mode, strict), case, gradients=mode is torch.enable_grad, expect="P")


def test_derivatives():
    features, weight, bias = X3[:2, :2, :3], WEIGHT[:2, :3], BIAS[:2]
    for placements in (("S0", "R", "R"), ("R", "S0", "S0"), ("S2", "S1", "R")):
        check_derivatives(F.linear, Case((2,), (features, weight, bias), placements))
    check_derivatives(torch.bmm, Case((2,), (X3[:, :2, :2], X3[:, :2, 2:4]), ("S0(sizes=1/3)", "S0(sizes=1/3)")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    tensors = [tensor.to(dtype) for tensor in (X3, WEIGHT, BIAS)]
    for mode in MODES:
        check(under(mode, F.linear), Case((3,), tensors, ("R", "S0", "S0")), expect="S2")


def test_weights_serve_inference_and_training_in_turn():
    def body(rank):
        mesh = T.Mesh((2,))
        weight = torch.nn.Parameter(distribute(WEIGHT, mesh, "S0"))
        x = distribute(X3, mesh, "R")
        with torch.inference_mode():
            y = F.linear(x, weight)
            y.relu_()
            view = weight.t()
        assert not y.requires_grad
        assert weight._version == view._version == 0
        trained = F.linear(x, weight)
        compare(y, F.linear(X3, WEIGHT).relu_())
        trained.sum().backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight.sub_(weight.grad)
        assert weight._version == 1
        compare(weight, WEIGHT - X3.sum((0, 1)).expand(5, 6))

    run_ranks(2, body)


def test_copies_that_composites_make_of_a_moved_view_are_no_views_of_it():
    def body(rank):
        x: Any = distribute(torch.arange(6.0).view(2, 3), T.Mesh((2,)), "S1")
        column: Any = x[..., -1]
        with torch.inference_mode():
            copies = [column.half().float(), column.to(torch.float64), column.reshape(1, 2), column.contiguous() + 0]
            views = [column.to(torch.float32), column.view(2, 1), +column]
        column.add_(1)
        for copy in (copies[0], copies[1], copies[3]):
            torch.testing.assert_close(copy.full_tensor().flatten().float(), torch.tensor([2.0, 5.0]), rtol=0, atol=0)
        for view in (copies[2], *views):
            torch.testing.assert_close(view.full_tensor().flatten(), torch.tensor([3.0, 6.0]), rtol=0, atol=0)

    run_ranks(2, body)
