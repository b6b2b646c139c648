"""Every operator that lets terms pass gives what it gives of the reduced tensor, in every dtype and reduction."""

import pytest
import torch

import tritondt as T
from tests.ops.term_calls import CALLS, CONVERSIONS, ELEMENTWISE
from tests.ops.terms import Comparison, ops_of
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import AxisStrategy, propagator, register_op_strategy
from tritondt.ops.propagation import homomorphisms
from tritondt.sharding.placement import REDUCE_OPS, Partial

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("dtype", "reduce_op"),
    [
        *((dtype, op) for dtype in (torch.float32, torch.int8, torch.complex64, torch.bool) for op in ops_of(dtype)),
        *((dtype, "sum") for dtype in (torch.bfloat16, torch.uint8, torch.int64)),
        *((torch.bfloat16, "max"), (torch.float16, "avg"), (torch.int64, "product")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Casting complex values to real", "ignore:ComplexHalf support is experimental")
def test_terms_pass_only_where_both_orders_give_the_same(dtype, reduce_op):
    found = Comparison(CALLS, dtype, [reduce_op])
    assert found.wrong == []
    # What must stay without communication, among others.
    for name in ("t", "cat", "clone", "gather", f"to {dtype}"):
        assert name in found.passed


@pytest.mark.parametrize(
    ("name", "dtype", "reduce_op"),
    [
        ("to torch.float32", torch.bfloat16, "sum"),
        ("to torch.float64", torch.float32, "avg"),
        ("to torch.complex64", torch.float32, "product"),
        ("to torch.bfloat16", torch.float32, "max"),
        ("to torch.int16", torch.int32, "sum"),
        ("mul by 3", torch.int8, "sum"),
        ("div by 2", torch.float32, "sum"),
        ("add torch.int16", torch.float32, "sum"),
        ("conj", torch.complex64, "product"),
        ("mm", torch.bfloat16, "sum"),
        ("masked_fill 2", torch.float32, "avg"),
        ("where", torch.float32, "min"),
        ("maximum", torch.float32, "max"),
        ("maximum of terms", torch.int64, "max"),
        ("minimum", torch.float32, "max"),
        ("minimum of terms", torch.bfloat16, "min"),
        ("clamp_min of a tensor", torch.float32, "min"),
        ("exp", torch.float32, "min"),
        ("relu", torch.int32, "max"),
        ("neg", torch.float32, "max"),
        ("sub", torch.float32, "avg"),
        ("logaddexp", torch.float32, "max"),
    ],
)
def test_what_passes_sends_nothing(name, dtype, reduce_op):
    assert name in Comparison({name: CALLS[name]}, dtype, [reduce_op]).passed


@pytest.mark.parametrize("name", ["relu", "maximum", "sign", "nan_to_num", "fmax", "erfc"])
def test_a_nan_among_terms_is_that_of_the_reduction(name):
    calls = {
        "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
        "fmax": lambda x: torch.fmax(x, torch.zeros_like(x)),
    }
    call = calls.get(name, lambda x: getattr(x, name)())
    terms = torch.tensor([[float("nan"), 3.0, -2.0], [5.0, float("nan"), -1.0]])

    def body(rank):
        x = T.DTensor.from_local(terms[rank], T.Mesh((2,)), [Partial("max")])
        return call(x).full_tensor()

    for found in run_ranks(2, body):
        torch.testing.assert_close(found, call(terms.amax(0)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.float32, ("to torch.bfloat16 of P(sum)", "to torch.float16 of P(avg)")),
        (torch.int8, ("to torch.int32 of P(sum)", "div by 2 of P(sum)", "to torch.bool of P(min)")),
    ],
)
def test_a_rule_without_its_condition_on_dtypes_is_found(dtype, names, monkeypatch):
    monkeypatch.setattr(homomorphisms, "converts", lambda *_: True)
    monkeypatch.setattr(homomorphisms.Homomorphism, "_passes_one", lambda *_: True)
    wrong = Comparison({**CONVERSIONS, "div by 2": ELEMENTWISE["div by 2"]}, dtype).wrong
    for name in names:
        assert any(text.startswith(name) for text in wrong), name


@pytest.mark.parametrize(("name", "op"), [("relu", aten.relu.default), ("abs", aten.abs.default)])
def test_a_rule_for_the_wrong_operator_is_found(name, op):
    def everything_passes(schema):
        return [AxisStrategy((Partial(reduce_op),), (Partial(reduce_op),)) for reduce_op in REDUCE_OPS]

    register_op_strategy(op, everything_passes)
    try:
        wrong = Comparison({name: ELEMENTWISE[name]}, torch.float32, ["sum"]).wrong
    finally:
        propagator.forget(op)
    assert any(text.startswith(f"{name} of P(sum)") for text in wrong)
