"""Softmax with its dim sharded and not, layer norm and RMS norm, forward and backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.sharded import Case, check, distribute
from tritondt import events
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops.families.normalization import rms_norm, rms_norm_backward
from tritondt.ops.propagation.schema import OpSchema
from tritondt.sharding.placement import parse_placements

GENERATOR = torch.Generator().manual_seed(5)


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


X = 10 * randn(5, 3, 8)
WEIGHT, BIAS = randn(8), randn(8)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), "S0"),
        ((3,), "S1(sizes=0/1/2)"),
        ((3,), "S2"),
        ((3,), "S2(sizes=5/0/3)"),
        ((2,), "S2(unit=4)"),
        ((2,), "S2(repeats=2)"),
        ((2, 2), "S2, S2"),
        ((2, 2), "S2, S0"),
        ((2, 2, 2), "S0, S2, S2"),
        ((2, 2), "R, S1"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1),
        lambda x: F.log_softmax(x, 2),
        lambda x: F.log_softmax(x, 0),
        lambda x: F.softmax(x, 1, dtype=torch.float64),
    ],
)
def test_a_softmax_stays_as_it_is_sharded(function, mesh_shape, placements):
    check(function, Case(mesh_shape, (X,), (placements,)), gradients=True, expect=placements)


def test_axes_that_cut_the_softmax_dim_in_another_order():
    case = Case((2, 3), (X,), ("S2, S2",), (1, 0))
    check(lambda x: F.log_softmax(x, -1), case, gradients=True, expect="S2, S2")


def test_a_softmax_of_terms_reduces_them_and_its_gradient_passes_them():
    check(lambda x: F.softmax(x, -1), Case((2,), (X,), ("P",)), expect="R")
    output = F.softmax(X, -1)

    def backward(grad, output):
        return torch.ops.aten._softmax_backward_data(grad, output, 2, torch.float64)

    check(backward, Case((2,), (X, output), ("P", "R")), expect="P")
    check(backward, Case((2, 2), (X, output), ("P, S2", "R, S2")), expect="P, S2")


@pytest.mark.parametrize("placements", ["S1", "S1(sizes=3/0/1)", "S1(sizes=0/4/0)", "S0"])
@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_rows_of_infinities_and_nan(function, placements):
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[-inf] * 4, [inf, 1, 2, 3], [nan, 1, 2, 3], [-inf, -inf, 0, 1], [-1e30, 1e30, 0, 1]])
    expected = function(rows, 1)

    def body(rank):
        found: Any = function(distribute(rows, T.Mesh((3,)), placements), 1)
        torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True)

    run_ranks(3, body)


def test_large_values_lose_nothing():
    # log_softmax of the largest is about -0.7 here; x - logsumexp(x) in float32 would be off by up to 0.03.
    x = torch.tensor([[1e6, 1e6, 1e6 - 3.0, 0.0]])
    check(lambda x: F.log_softmax(x, 1), Case((2,), (x,), ("S1",)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_are_added_in_32(dtype):
    x, grad = (randn(4, 300, dtype=torch.float32).to(dtype) for _ in range(2))
    for name in ("_softmax", "_log_softmax"):
        forward, backward = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward_data")
        check(lambda x, forward=forward: forward(x, 1, False), Case((3,), (x,), ("S1",)))
        # The gradient of the same output: exp makes 0.8 % of one step in float16 at -8.
        case = Case((3,), (grad, forward(x, 1, False)), ("S1", "S1"))
        check(lambda grad, output, backward=backward: backward(grad, output, 1, dtype), case)


def test_a_sharded_softmax_moves_two_numbers_a_row_forward_and_one_backward():
    moved = []

    def body(rank):
        x = distribute(randn(10, 1000), T.Mesh((2,)), "S1")
        x.requires_grad_()
        F.log_softmax(x, 1).backward(distribute(randn(10, 1000), T.Mesh((2,)), "S1"))

    unsubscribe = events.subscribe(lambda event: moved.append(event.received_bytes))
    try:
        run_ranks(2, body)
    finally:
        unsubscribe()
    # Per rank 10 rows x 2 numbers of 8 bytes; backward 10 rows x 1 number, half of them reduced, half gathered.
    assert sum(moved) == 2 * (10 * 2 * 8 + 10 * 8)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), "S0"),
        ((2,), "S0(sizes=0/5)"),
        ((3,), "S1(sizes=3/0/0)"),
        ((2, 2), "S0, S1"),
        ((2, 2), "S0, S0"),
        ((2,), "S2"),
        ((2, 2), "P, S1"),
    ],
)
def test_layer_norm(mesh_shape, placements):
    whole = ", ".join("R" for _ in mesh_shape)
    # Rows stay where they are; the normalized dim is gathered, and terms are added.
    rows = placements.replace("S2", "R").replace("P", "R")
    case = Case(mesh_shape, (X, WEIGHT, BIAS), (placements, whole, whole))
    check(lambda x, w, b: F.layer_norm(x, (8,), w, b), case, gradients=True, expect=rows)
    check(lambda x, w: F.layer_norm(x, (8,), w), case._replace(**_first(case, 2)), gradients=True, expect=rows)
    check(lambda x: F.layer_norm(x, (8,)), case._replace(**_first(case, 1)), gradients=True, expect=rows)
    if "S1" not in placements:
        check(lambda x: F.layer_norm(x, (3, 8)), case._replace(**_first(case, 1)), gradients=True, expect=rows)


def _first(case, count):
    return {"tensors": case.tensors[:count], "placements": case.placements[:count]}


def test_parameters_of_a_layer_norm_have_terms_of_their_gradients():
    def body(rank):
        mesh = T.Mesh((2, 2))
        x = distribute(X, mesh, "S0, R")
        weight, bias = (distribute(tensor, mesh, "R, R").requires_grad_() for tensor in (WEIGHT, BIAS))
        out = F.layer_norm(x, (8,), weight, bias)
        out.backward(distribute(X, mesh, "S0, R"))
        grads: Any = weight.grad, bias.grad
        assert [grad.placements for grad in grads] == [parse_placements("P, R")] * 2

    run_ranks(4, body)


def test_layer_norm_backward_of_terms():
    out, mean, rstd = torch.native_layer_norm(X, (8,), WEIGHT, BIAS, 1e-5)
    check(
        lambda *tensors: torch.ops.aten.native_layer_norm_backward(
            tensors[0], tensors[1], (8,), *tensors[2:], [True, True, True]
        ),
        Case((2,), (out, X, mean, rstd, WEIGHT, BIAS), ("P", "R", "R", "R", "R", "R")),
        expect="P",
    )


@pytest.mark.parametrize(("mesh_shape", "placements"), [((3,), "S0"), ((2,), "S1(sizes=0/3)"), ((2, 2), "S0, S1")])
def test_rms_norm(mesh_shape, placements):
    whole = ", ".join("R" for _ in mesh_shape)
    case = Case(mesh_shape, (X, WEIGHT), (placements, whole))
    check(lambda x, w: F.rms_norm(x, (8,), w), case, gradients=True, expect=placements)
    check(lambda x, w: F.rms_norm(x, (8,)) * w, case, gradients=True, expect=placements)


@pytest.mark.parametrize("placements", ["S2", "S2(sizes=3/0/5)", "P"])
def test_rms_norm_over_a_sharded_dim(placements):
    # Without a fused kernel the mean is pending when epsilon is added, which must happen once.
    of_weight = placements.replace("S2", "S0").replace("P", "R")
    case = Case((3,), (X, WEIGHT), (placements, of_weight))
    check(lambda x, w: F.rms_norm(x, (8,), w, 0.5), case, gradients=True, expect=placements)


@pytest.mark.parametrize("placements", ["P", "P(avg)", "P(max)", "S1"])
def test_a_number_added_in_place_is_added_once(placements):
    def body(rank):
        x = T.DTensor.from_local(X * (1 + rank), T.Mesh((2,)), parse_placements(placements))
        before: Any = x.clone()
        expected = before.full_tensor() + 2
        torch.ops.aten.add_.Scalar(x, 2)
        assert x.placements == parse_placements(placements)
        torch.testing.assert_close(x.full_tensor(), expected)

    run_ranks(2, body)


def test_rms_norm_in_inference_mode():
    with torch.inference_mode():
        check(lambda x, w: F.rms_norm(x, (8,), w), Case((2,), (X, WEIGHT), ("S0", "R")), expect="S0")


def test_the_fused_rms_norm_is_laid_out_as_the_rows_are():
    # Only GPUs have the operator in one piece; what it would do is decided without one.
    op = getattr(torch.ops.aten, "_fused_rms_norm_backward", None)
    if op is None:
        pytest.skip("this torch has no fused RMS norm")

    def body(rank):
        mesh = T.Mesh((2,))
        x, weight, rstd = (distribute(tensor, mesh, "R")._spec for tensor in (X, WEIGHT, X.new_empty((5, 3, 1))))
        forward: Any = rms_norm(OpSchema(torch.ops.aten._fused_rms_norm.default, (x, [8], weight, 1e-5)))
        assert [strategy.inputs for strategy in forward] == [
            parse_placements(text) for text in ("S0, R", "S1, R", "R, R")
        ]
        assert forward[1].outputs == parse_placements("S1, S1")
        backward: Any = rms_norm_backward(OpSchema(op.default, (x, x, [8], rstd, weight, [True, True])))
        assert backward[0] == (parse_placements("S0, S0, S0, R"), parse_placements("S0, P"), False)

    run_ranks(2, body)


@pytest.mark.parametrize("placements", ["S0", "S1(sizes=1/0/3)"])
def test_gradcheck(placements):
    x, weight = randn(3, 4), randn(4)

    def body(rank):
        mesh = T.Mesh((3,))
        target = parse_placements(placements)

        def function(x, weight):
            x, weight = (T.DTensor.from_local(tensor, mesh, [T.Replicate()]) for tensor in (x, weight))
            y = x.redistribute(placements=target)
            results: Any = F.softmax(y, 1), F.log_softmax(y, 1), F.layer_norm(y, (4,), weight)
            return tuple(result.full_tensor() for result in results)

        assert torch.autograd.gradcheck(function, (x.clone().requires_grad_(), weight.clone().requires_grad_()))

    run_ranks(3, body)
