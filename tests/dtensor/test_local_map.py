"""Functions on local tensors beside distributed ones, and strategies that users register, wherever tensors stand."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.tensor.experimental as reference

import tritondt as T
import tritondt.experimental as experimental
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.experimental import local_map, register_sharding
from tritondt.ops import propagator

X = torch.arange(20.0, dtype=torch.float64).reshape(5, 4)


def test_names_and_parameters_are_those_of_torch():
    for name in set(reference.__all__) - {"context_parallel"}:
        found = inspect.signature(getattr(experimental, name)).parameters
        for parameter in inspect.signature(getattr(reference, name)).parameters.values():
            assert found[parameter.name].kind is parameter.kind, (name, parameter)
            assert found[parameter.name].default == parameter.default, (name, parameter)


def test_types_of_local_tensors_are_refused():
    with pytest.raises(T.LayoutError, match="was given spmd_types=True; types of local tensors are not checked"):
        local_map(spmd_types=True)


@pytest.mark.parametrize("text", ["S0", "S0(sizes=4/1)", "S0(sizes=0/5)", "S1", "R"])
def test_results_are_cut_as_the_ranks_hold_them(text):
    placements = T.parse_placements(text.split("(")[0])
    (placement,) = placements
    other = 1 - placement.dim if isinstance(placement, T.Shard) else 0

    @local_map(out_placements=(list(placements), None, list(placements)))
    def function(x, factor):
        return x * factor, "text", torch.cat([x, x], other)

    def body(rank):
        x = distribute(X, T.Mesh((2,)), text)
        doubled, said, joined = function(x, 2)
        assert said == "text"
        torch.testing.assert_close(whole(doubled), X * 2, rtol=0, atol=0)
        torch.testing.assert_close(whole(joined), torch.cat([X, X], other), rtol=0, atol=0)

    run_ranks(2, body)


def test_two_axes_cut_unevenly():
    function = local_map(torch.exp, [T.Shard(1), T.Shard(0)])

    def body(rank):
        x = distribute(X, T.Mesh((2, 3)), "S1, S0(sizes=1/0/4)")
        torch.testing.assert_close(whole(function(x)), X.exp())
        both = distribute(X, T.Mesh((2, 3)), "S0, S0")
        with pytest.raises(T.LocalTensorError, match="several axes cut one dim of a result"):
            local_map(torch.exp, [T.Shard(0), T.Shard(0)])(both)

    run_ranks(6, body)


def test_arguments_are_brought_where_they_are_needed_or_refused():
    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(X, mesh, "S1")
        needed = ([T.Shard(0)], None)
        moving = local_map(lambda x, n: x.sum(1) * n, [T.Shard(0)], needed, redistribute_inputs=True)
        torch.testing.assert_close(whole(moving(x, 3)), X.sum(1) * 3)
        staying = local_map(lambda x, n: x.sum(1) * n, [T.Shard(0)], needed)
        with pytest.raises(
            T.LayoutError, match=r"got \(S1\) of \(5, 4\) float64 where it needs \(S0\); give it x.redist"
        ):
            staying(x, 3)
        with pytest.raises(T.LayoutError, match="in_placements for 2 arguments, but is called with 1"):
            staying(x)
        with pytest.raises(T.LayoutError, match="out_placements for 1 results, got 2"):
            local_map(lambda x: (x, x), [T.Shard(1)])(x)
        with pytest.raises(T.LayoutError, match="a result is a int, and its out_placements are"):
            local_map(lambda x: 3, [T.Shard(1)])(x)
        with pytest.raises(T.MeshError, match="but works on Mesh"):
            local_map(lambda x: x, [T.Shard(1)], device_mesh=T.Mesh((1, 2)))(x)
        assert local_map(lambda x: x + 1, [T.Shard(1)])(1) == 2

    run_ranks(2, body)


def test_gradients_come_out_as_they_are_said_to():
    def body(rank):
        mesh = T.Mesh((2,))
        x: Any = distribute(X, mesh, "S0").requires_grad_()
        weight: Any = distribute(X[0], mesh, "R").requires_grad_()
        # Every rank uses all of the weight for its own rows.
        rows = local_map(lambda x, w: (x * w).sum(1), [T.Shard(0)], in_grad_placements=([T.Shard(0)], [T.Partial()]))
        rows(x, weight).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), X[0].expand(5, 4))
        torch.testing.assert_close(weight.grad.full_tensor(), X.sum(0))

    run_ranks(2, body)


@pytest.fixture
def custom():
    """Operators with a list of tensors, a tensor by keyword, no result, and results of several kinds."""
    library = torch.library.Library("tritondt_custom", "FRAGMENT")
    library.define("joined(Tensor[] parts, *, Tensor scale) -> Tensor")
    library.define("looked_at(Tensor x) -> ()")
    library.define("counted(Tensor x, int n) -> (Tensor, int)")
    seen: list[tuple[int, ...]] = []
    for kind in ("CPU", "Meta"):
        library.impl("joined", lambda parts, scale: torch.cat(parts) * scale, kind)
        library.impl("looked_at", lambda x: seen.append(tuple(x.shape)), kind)
        library.impl("counted", lambda x, n: (x * n, n), kind)
    operators = torch.ops.tritondt_custom
    yield operators, seen
    for name in ("joined", "looked_at", "counted"):
        propagator.forget(getattr(operators, name).default)
    library._destroy()


def test_strategies_with_lists_keywords_and_without_results(custom):
    operators, seen = custom

    @register_sharding(operators.joined.default)
    def columns(parts, *, scale):
        anywhere = [T.Shard(1), T.Replicate()]
        return [([placement], [[placement] * len(parts), T.Replicate()]) for placement in anywhere]

    @register_sharding([operators.looked_at.default])
    def rows(x):
        return [([], [T.Shard(0)])]

    @register_sharding(operators.counted.default)
    def elements(x, n):
        return [([T.Shard(dim), None], [T.Shard(dim), None]) for dim in range(x.ndim)]

    def body(rank):
        mesh = T.Mesh((2,))
        x, scale = distribute(X, mesh, "S1"), distribute(torch.tensor([2.0], dtype=torch.float64), mesh, "R")
        found = operators.joined([x, x], scale=scale)
        assert found.placements == (T.Shard(1),)
        torch.testing.assert_close(whole(found), torch.cat([X, X]) * 2)
        assert operators.looked_at(distribute(X, mesh, "S0")) is None
        tripled, n = operators.counted(x, 3)
        assert n == 3
        torch.testing.assert_close(whole(tripled), X * 3)

    run_ranks(2, body)
    assert {(3, 4), (2, 4)} <= set(seen)


def test_strategies_that_do_not_fit(custom):
    operators, _ = custom

    @register_sharding(operators.joined.default)
    def too_few(parts, *, scale):
        return [([T.Replicate()], [[T.Replicate()]])]

    with pytest.raises(
        T.PropagationError, match=r"was given .*too_few \(.*test_local_map.py:\d+\) already and is given"
    ):
        register_sharding(operators.joined.default)(lambda parts, *, scale: [])
    register_sharding(operators.counted.default)(lambda x, n: [])

    def body(rank):
        x = distribute(X, T.Mesh((2,)), "R")
        with pytest.raises(T.PropagationError, match=r"gives placements for 1 tensors, but .* has 3"):
            operators.joined([x, x], scale=x[0])
        with pytest.raises(T.PropagationError, match=r"counted\.default offers nothing for"):
            operators.counted(x, 2)

    run_ranks(2, body)


def test_an_argument_is_cut_as_the_only_strategy_asks(custom):
    operators, seen = custom
    register_sharding(operators.looked_at.default)(lambda x: [([], [T.Shard(0)])])

    def body(rank):
        for text in ("S1", "R", "P"):
            operators.looked_at(distribute(X, T.Mesh((2,)), text))

    run_ranks(2, body)
    assert sorted(shape for shape in seen if shape != X.shape) == [(2, 4)] * 3 + [(3, 4)] * 3
