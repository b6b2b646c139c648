"""Reductions over sharded and whole dims: what stays pending, what ranks complete, what gathers."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.sharded import Case, check, distribute
from tritondt import events
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode

GENERATOR = torch.Generator().manual_seed(3)


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


def whole(x):
    return x.full_tensor()


X = randn(7, 6, 4)
LAYOUTS = [
    ((3,), "S0"),
    ((3,), "S2(sizes=4/0/0)"),
    ((4,), "S1(unit=3)"),
    ((2, 2), "S0, S1"),
    ((2, 2), "S1, S1"),
    ((2,), "S1(repeats=3)"),
    ((3,), "S0(sizes=0/5/2)"),
    ((2, 2, 2), "S0, S1, S0"),
    ((2, 2), "R, R"),
]


@pytest.mark.in_ci(61)
@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(),
        lambda x: x.sum(1),
        lambda x: x.sum((0, -1), keepdim=True),
        lambda x: x.mean(),
        lambda x: x.mean((-3, 1)),
        lambda x: x.mean(0, keepdim=True),
        lambda x: x.amax(1),
        lambda x: x.amin((0, 2), keepdim=True),
        lambda x: x.max(),
        lambda x: x.min(),
        lambda x: torch.linalg.vector_norm(x),
        lambda x: torch.linalg.vector_norm(x, 1, (0, 2)),
        lambda x: torch.linalg.vector_norm(x, 3, -2, keepdim=True),
        lambda x: torch.linalg.vector_norm(x, float("inf"), (0, 1)),
        lambda x: torch.linalg.vector_norm(x, float("-inf")),
        lambda x: torch.linalg.vector_norm(x, -1.5, 1),
        lambda x: x.norm(),
        lambda x: x.var(),
        lambda x: x.var((0, 2), correction=0),
        lambda x: x.std(1, keepdim=True),
        lambda x: torch.var_mean(x, 0),
        lambda x: torch.std_mean(x, (1, 2), keepdim=True),
        lambda x: x.logsumexp(-1),
        lambda x: x.logsumexp((0, 1), keepdim=True),
        lambda x: x.cumsum(1),
    ],
)
def test_values_and_gradients_are_those_of_one_device(function, mesh_shape, placements):
    check(function, Case(mesh_shape, (X,), (placements,)), gradients=True)


@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS[:5])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.prod(),
        lambda x: x.prod(1, keepdim=True),
        lambda x: torch.linalg.vector_norm(x, 0, (0, 1)),
        lambda x: (x > 0.5).any(),
        lambda x: (x > 1.5).any(1),
        lambda x: (x > 1).any((0, 2), keepdim=True),
        lambda x: (x > -3).all(),
        lambda x: (x > -1).all(-1),
        lambda x: (x > -1).all((0, 1)),
        lambda x: (x > -1).to(torch.uint8).all(0),
        lambda x: torch.any(x > 0, []),
        lambda x: torch.count_nonzero(x > 0),
        lambda x: torch.count_nonzero(x > 0, (0, 1)),
        lambda x: (x > 0).sum(0),
        lambda x: (10 * x).to(torch.int32).sum(),
        lambda x: (10 * x).to(torch.int8).amax(1),
        lambda x: (10 * x).to(torch.uint8).amin(1),
        lambda x: x.max(1),
        lambda x: x.min(-1, keepdim=True),
        lambda x: x.argmax(),
        lambda x: x.argmax(1),
        lambda x: x.argmin(-1, keepdim=True),
        lambda x: x.cumprod(0),
        lambda x: x.logcumsumexp(2),
        lambda x: x.sort(1, descending=True),
        lambda x: x.topk(2, 0),
        lambda x: x.sum(1, dtype=torch.float32),
        lambda x: x.mean((0, 1), dtype=torch.float32),
        lambda x: torch.linalg.vector_norm(x.float(), 2, 0, dtype=torch.float64),
    ],
)
def test_values_are_those_of_one_device(function, mesh_shape, placements):
    check(function, Case(mesh_shape, (X,), (placements,)))


@pytest.mark.parametrize("placements", ["S0", "S1(sizes=4/0/2)"])
@pytest.mark.parametrize(
    "function", [lambda z: torch.linalg.vector_norm(z, 2, (0, 1)), torch.mean, torch.var, torch.sum]
)
def test_complex_numbers(function, placements):
    check(
        function, Case((3,), (randn(7, 6, 2, dtype=torch.complex128),), (placements,)), gradients=function is torch.mean
    )


@pytest.mark.parametrize(
    ("function", "mesh_shape", "placements", "expect"),
    [
        (lambda x: x.sum(0), (3,), "S0", "P"),
        (lambda x: x.sum(0), (3,), "S1(sizes=1/5/0)", "S0(sizes=1/5/0)"),
        (lambda x: x.sum(0, keepdim=True), (3,), "S1(unit=2)", "S1(unit=2)"),
        (lambda x: x.sum((0, 2)), (2, 2), "S2, S1", "P, S0"),
        (lambda x: x.mean(-1), (2, 2), "S2, S2", "P, P"),
        (lambda x: x.mean(1), (3,), "P(avg)", "P(avg)"),
        (lambda x: x.sum(), (2, 2), "P, S0", "P, P"),
        (lambda x: x.cumsum(0), (2, 2), "P, S1", "P, S1"),
        (lambda x: x.cumsum(0), (2,), "S0", "R"),
        (lambda x: x.sum(dtype=torch.float32), (2,), "P", "R"),  # shorter numbers would lose what cancels
        (lambda x: x.sum(dtype=torch.complex128), (2,), "P", "P"),
        (lambda x: x.amax(0), (2,), "S0", "P(max)"),
        (lambda x: x.amin(0), (2,), "S0", "P(min)"),
        (lambda x: x.prod(0), (2,), "S0", "P(product)"),
        (lambda x: x.amax(0), (2,), "P", "R"),
        (lambda x: (x > 0).any(0), (2,), "S0", "P(max)"),
        (lambda x: (x > 0).all(0), (2,), "S0", "P(min)"),
        (lambda x: torch.count_nonzero(x > 0, 0), (2,), "S0", "P"),
        (lambda x: x.max(1), (2,), "S2", "S1"),
        (lambda x: x.max(1), (2,), "S1", "R"),
        (lambda x: x.argmax(0), (2, 2), "S1, S2", "S0, S1"),
        (lambda x: torch.linalg.vector_norm(x, 2, 0), (2, 2), "S0, S1", "R, S0"),
        (lambda x: torch.linalg.vector_norm(x), (2,), "P", "R"),
        (lambda x: x.std(1), (2, 2), "S1, S2", "R, S1"),
        (lambda x: x.logsumexp(2), (2, 2), "S1, S2", "S1, R"),
    ],
)
def test_layout_of_the_result(function, mesh_shape, placements, expect):
    check(function, Case(mesh_shape, (X,), (placements,)), expect=expect)


def test_dims_without_elements_and_tensors_without_dims():
    check(lambda x: x.sum(), Case((2,), (randn(0, 3),), ("S0",)))
    run_ranks(2, lambda rank: _is_nan(distribute(randn(0, 3), T.Mesh((2,)), "S0").mean()))
    check(lambda x: torch.linalg.vector_norm(x), Case((2,), (randn(0, 3),), ("S0",)))
    check(lambda x: x.sum() + x.mean(-1) + x.amax(0), Case((2,), (randn(),), ("R",)), gradients=True)
    with pytest.raises(IndexError, match="Dimension out of range"):
        run_ranks(1, lambda rank: distribute(randn(2), T.Mesh((1,)), "S0").sum(3))


def _is_nan(x):
    assert whole(x).isnan().item()


def test_an_extreme_of_pending_extremes_stays_pending():
    terms = randn(2, 5, 3)

    def body(rank):
        mesh = T.Mesh((2,))
        cases: list[tuple[Any, Any]] = [("max", terms.amax(0)), ("min", terms.amin(0))]
        for op, of_all in cases:
            x = T.DTensor.from_local(terms[rank], mesh, [T.Partial(op)])
            for name, dims in ((f"a{op}", (1,)), (op, ())):
                found, expected = getattr(x, name)(*dims), getattr(of_all, name)(*dims)
                assert found._spec.placements == (T.Partial(op),)
                torch.testing.assert_close(whole(found), expected, rtol=0, atol=0)
        product: Any = T.DTensor.from_local(terms[rank], mesh, [T.Partial("product")]).prod(0)
        assert product._spec.placements == (T.Partial("product"),)
        torch.testing.assert_close(whole(product), terms.prod(0).prod(0))

    run_ranks(2, body)


def test_any_of_pending_numbers_reduces_them_first():
    # -1 is not zero, but the largest of -1 and 0 is.
    def body(rank):
        x = T.DTensor.from_local(torch.tensor([-1.0 * rank]), T.Mesh((2,)), [T.Partial("max")])
        assert not whole(x.any()).item()
        truth: Any = T.DTensor.from_local(torch.tensor([rank == 1]), T.Mesh((2,)), [T.Partial("max")])
        assert truth.any()._spec.placements == (T.Partial("max"),)
        assert whole(truth.any()).item()

    run_ranks(2, body)


def test_terms_of_short_ints_are_added_before_they_are_widened():
    # 100 + 100 is -56 in int8: widening the terms would give 200.
    def body(rank):
        x = T.DTensor.from_local(torch.tensor([100], dtype=torch.int8), T.Mesh((2,)), [T.Partial()])
        assert whole(x.sum()).item() == -56

    run_ranks(2, body)


def test_nan_and_infinities_go_through():
    row = torch.tensor([[float("-inf")] * 4, [float("inf"), 1, 2, 3], [float("nan"), 1, 2, 3], [-1e30, 1e30, 0, 1]])
    for placements in ("S1", "S1(sizes=3/0/1)", "S1(sizes=0/4/0)"):
        case = Case((3 if "sizes" in placements else 4,), (row,), (placements,))
        for function in (
            lambda x: x.logsumexp(1),
            lambda x: x.amax(1),
            lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
            lambda x: x.var(1),
        ):
            expected = function(row)

            def body(rank, case=case, function=function, expected=expected):
                found = function(distribute(case.tensors[0], T.Mesh(case.mesh_shape), case.placements[0]))
                torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True)

            run_ranks(case.mesh_shape[0], body)


def test_a_mean_of_16_bit_floats_does_not_overflow():
    # 8 x 40000 is no float16.
    x = torch.full((8, 2), 40000, dtype=torch.float16)
    check(lambda x: x.mean(0), Case((2,), (x,), ("S0",)))
    check(lambda x: torch.linalg.vector_norm(x, 2, 1), Case((2,), (x / 100,), ("S1",)))


def test_a_norm_exchanges_numbers_and_not_the_tensor():
    received = []

    def body(rank):
        mesh = T.Mesh((4,))
        gradients = [distribute(randn(100, 8), mesh, text) for text in ("S0", "S1(unit=2)", "R")]
        for order in (2, 1, float("inf")):
            norms = [torch.linalg.vector_norm(gradient, order) for gradient in gradients]
            assert all(norm.placements == (T.Replicate(),) for norm in norms)
            torch.linalg.vector_norm(torch.stack([norm.to_local() for norm in norms]), order)

    unsubscribe = events.subscribe(lambda event: received.append(event.received_bytes))
    try:
        run_ranks(4, body)
    finally:
        unsubscribe()
    # 3 orders, 2 sharded gradients, 4 ranks, one float64: reduce on one and spread, or everyone sends to everyone.
    assert 0 < sum(received) <= 3 * 2 * 4 * 3 * 8


def test_numbers_and_truth_are_alike_on_every_rank():
    x = randn(5, 3)

    def body(rank):
        mesh = T.Mesh((2, 2))
        a = distribute(x, mesh, "S0, S1")
        assert a.sum().item() == pytest.approx(x.sum().item())
        assert float(a.amax()) == x.amax().item()
        assert bool((a == a).all())
        assert torch.equal(a, distribute(x, mesh, "R, S0"))
        assert torch.equal(distribute(x, mesh, "R, R"), a)
        assert torch.equal(distribute(x, mesh, "P, R"), distribute(x, mesh, "P, S1"))
        # One element of one rank differs, and every rank hears of it.
        changed = x.clone()
        changed[4, 2] += 1
        assert not torch.equal(a, distribute(changed, mesh, "S0, S1"))
        assert not torch.equal(a, distribute(x[:4], mesh, "S0, S1"))

    run_ranks(4, body)


@pytest.mark.parametrize("placements", ["S0", "S1(sizes=1/0/3)", "R"])
def test_gradcheck(placements):
    x = randn(3, 4)

    def body(rank):
        mesh = T.Mesh((3,))
        spec = distribute(x, mesh, placements)._spec

        def function(local):
            full = T.DTensor.from_local(local, mesh, [T.Replicate()])
            y = full.redistribute(placements=spec.placements)
            results = y.mean(0), y.var(1), y.logsumexp(1), torch.linalg.vector_norm(y, 3), y.cumsum(1)
            return tuple(whole(result) for result in results)

        assert torch.autograd.gradcheck(function, (x.clone().requires_grad_(),))

    run_ranks(3, body)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clipping_gradients_by_their_norm(order):
    grads = randn(7, 6), randn(6), randn(3, 4)
    plain = [torch.zeros_like(grad).requires_grad_() for grad in grads]
    for parameter, grad in zip(plain, grads, strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=False)

    def body(rank):
        mesh = T.Mesh((2, 2))
        layouts = "S0, S1", "S0(sizes=6/0), R", "R, P"
        parameters: Any = [distribute(torch.zeros_like(grad), mesh, "R, R").requires_grad_() for grad in grads]
        for parameter, grad, layout in zip(parameters, grads, layouts, strict=True):
            parameter.grad = distribute(grad, mesh, layout)
        found = torch.nn.utils.clip_grad_norm_(parameters, 0.5, order, foreach=False)
        torch.testing.assert_close(whole(found), expected)
        for parameter, of_one in zip(parameters, plain, strict=True):
            torch.testing.assert_close(whole(parameter.grad), of_one.grad)

    run_ranks(4, body)


EXTREMES = {
    "argmax": lambda x: x.argmax(1),
    "argmin, dims kept": lambda x: x.argmin(0, keepdim=True),
    "argmax of all": lambda x: x.argmax(),
    "argmin of all, dims kept": lambda x: x.argmin(keepdim=True),
    "max": lambda x: x.max(1),
    "min, dims kept": lambda x: x.min(0, keepdim=True),
}


def _with_nan(x: torch.Tensor) -> torch.Tensor:
    return x.index_fill(0, torch.tensor([2]), float("nan")).index_fill(1, torch.tensor([5]), float("inf"))


@pytest.mark.in_core(2)
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_over_cut_dims_and_where_they_are(name):
    """Ties go to the first of them, NaN is the extreme, and ranks may have nothing."""
    function, whole_numbers = EXTREMES[name], torch.arange(7 * 9).reshape(7, 9) * 5 % 11
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    given = [_with_nan(whole_numbers.double()), *map(whole_numbers.to, dtypes), torch.full((7, 9), float("-inf"))]

    def body(rank):
        mesh, found = T.Mesh((4,)), []
        for x in given:
            for placement in ("S0", "S1", "S1(sizes=0/4/0/5)", "S1(block=2)"):
                results = function(distribute(x, mesh, placement))
                found.append([whole(item) for item in ([results] if isinstance(results, T.DTensor) else results)])
        return found

    for found in run_ranks(4, body):
        for place, results in enumerate(found):
            expected = function(given[place // 4])
            expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
            torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


def test_places_of_extremes_take_two_numbers_a_row():
    def body(rank):
        x = distribute(torch.arange(4000.0).reshape(4, 1000), T.Mesh((2,)), "S1")
        with CommDebugMode() as counted:
            x.argmax(-1)
        return counted.get_sent_bytes()

    assert run_ranks(2, body) == [4 * (4 + 8)] * 2
