"""What tells calls apart, what is kept of them, what users may register, and what is refused."""

from typing import Any, cast

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import tritondt as T
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.dtensor import dispatch
from tritondt.dtensor.wiring import dispatcher
from tritondt.experimental import ExplicitRedistributionContext
from tritondt.ops import (
    AxisStrategy,
    OpStrategy,
    OutputSharding,
    PlacementStrategy,
    RuntimeSchemaInfo,
    einop_rule,
    pointwise_rule,
    propagator,
    register_op_strategy,
    register_sharding_prop_rule,
)

aten = torch.ops.aten


def alone(body):
    """Runs a body that sends nothing on the first of two ranks' views."""
    run_ranks(2, lambda rank: body(T.Mesh((2,))))


def sharded(mesh, shape=(4, 6), text="S0", dtype=torch.float32):
    return distribute(torch.arange(24).reshape(shape).to(dtype), mesh, text)


def test_an_int_a_float_and_a_bool_are_different_arguments():
    def body(mesh):
        x = sharded(mesh, dtype=torch.int64)
        assert (x + 1).dtype is torch.int64
        assert (x + 1.0).dtype is torch.float32
        assert (x + True).dtype is torch.int64
        assert torch.sub(x, 1, alpha=2).dtype is torch.int64
        torch.testing.assert_close(whole(x + 2), whole(x) + 2, rtol=0, atol=0)

    alone(body)


def test_a_number_that_changes_at_every_call_fills_no_cache():
    def body(mesh):
        x = sharded(mesh)
        x.mul_(1.5)
        before = dispatcher.num_signatures(aten.mul_.Tensor)
        for number in range(50):
            x.mul_(1 + number / 100)
        assert dispatcher.num_signatures(aten.mul_.Tensor) == before

    alone(body)


def test_signatures_are_bounded_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_SIGNATURES", 8)

    def body(mesh):
        for length in range(1, 30):
            x = T.DTensor.from_local(torch.ones(2, length), mesh, [T.Shard(0)])
            assert torch.hypot(x, x).shape == (4, length)
        assert dispatcher.num_signatures(aten.hypot.default) == 8

    alone(body)


@pytest.fixture
def taking_a_dict():
    """An operator that takes what has no hash."""
    library = torch.library.Library("tritondt_dict", "FRAGMENT")
    library.define("scaled(Tensor x, Dict(str, int) by) -> Tensor")
    for kind in ("CPU", "Meta"):
        library.impl("scaled", lambda x, by: x * by["factor"], kind)
    yield torch.ops.tritondt_dict.scaled.default
    propagator.forget(torch.ops.tritondt_dict.scaled.default)
    library._destroy()


def test_an_argument_without_a_hash_is_decided_at_every_call(taking_a_dict):
    register_sharding_prop_rule(taking_a_dict, pointwise_rule)

    def body(mesh):
        x = sharded(mesh)
        for factor in (2, 3, 2):
            found = taking_a_dict(x, {"factor": factor})
            torch.testing.assert_close(whole(found), whole(x) * factor, rtol=0, atol=0)
            assert found.placements == (T.Shard(0),)
        assert dispatcher.num_signatures(taking_a_dict) == 0

    alone(body)


def test_a_number_that_a_graph_leaves_open_counts_by_its_value():
    def body(mesh):
        environment, source = ShapeEnv(), ConstantSource("n")
        symbol = environment.create_symbol(3, source, dynamic_dim=DimDynamic.DYNAMIC)
        three: Any = environment.create_symintnode(symbol, hint=3, source=source)
        with pytest.raises(TypeError, match="unhashable"):
            hash(three)
        x = sharded(mesh)
        torch.testing.assert_close(whole(torch.roll(x, three, 1)), whole(x).roll(3, 1), rtol=0, atol=0)
        torch.testing.assert_close(whole(x.narrow(1, 0, three)), whole(x)[:, :3], rtol=0, atol=0)
        torch.testing.assert_close(whole(torch.roll(x, [three], [1])), whole(x).roll(3, 1), rtol=0, atol=0)

    alone(body)


def test_keyword_arguments_in_any_order_are_one_call():
    def body(mesh):
        x, low, high = (sharded(mesh) for _ in range(3))
        first = torch.clamp(x, min=low, max=high + 1)
        second = torch.clamp(x, max=high + 1, min=low)
        torch.testing.assert_close(whole(first), whole(second), rtol=0, atol=0)
        moved = distribute(torch.full((4, 6), 3.0), mesh, "S1")
        for options in ({"min": x, "max": moved}, {"max": moved, "min": x}):
            found = whole(torch.clamp(x, **options))
            torch.testing.assert_close(found, torch.clamp(torch.arange(24.0).reshape(4, 6), max=3.0), rtol=0, atol=0)

    alone(body)


def test_a_zero_dim_plain_tensor_is_a_number():
    def body(mesh):
        x = sharded(mesh)
        torch.testing.assert_close(whole(x * torch.tensor(2.0)), whole(x) * 2, rtol=0, atol=0)

    alone(body)


def test_mixed_tensors_are_refused_with_the_fix():
    def body(mesh):
        x = sharded(mesh)
        with pytest.raises(T.MixedTensorsError) as caught:
            x + torch.ones(4, 6)
        assert str(caught.value) == (
            "aten.add.Tensor got a distributed tensor (S0) of (4, 6) float32 and a plain one of shape (4, 6); make the "
            "plain one distributed with distribute_tensor(x, mesh, placements), or DTensor.from_local(x, mesh, "
            "[Replicate()]) where every rank holds the same, or use to_local() on the other; where all plain ones are "
            "alike on every rank, as labels and the cos and sin of rotary embeddings are, call it within "
            "tritondt.implicit_replication(), or lay the model out by parallelize_module(..., "
            "plain_tensors='replicated')"
        )

    alone(body)


def test_two_meshes_in_one_call_are_refused():
    def body(mesh):
        x, y = sharded(mesh), sharded(T.Mesh((2,), ("tp",)))
        with pytest.raises(T.MeshError) as caught:
            x + y
        assert str(caught.value) == (
            "aten.add.Tensor got tensors on Mesh(2 over ranks 0..1, cpu) and on Mesh(tp=2 over ranks 0..1, cpu); all "
            "must be on one mesh: redistribute to full tensors, or make them on one mesh"
        )

    alone(body)


@pytest.fixture
def cumulative():
    """An operator of a test's own, taken out of the tables afterwards."""
    library = torch.library.Library("tritondt_test", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CPU")
    library.impl("doubled", lambda x: torch.empty_like(x), "Meta")
    yield torch.ops.tritondt_test.doubled.default
    propagator.forget(torch.ops.tritondt_test.doubled.default)
    library._destroy()


def test_users_register_strategies_for_one_axis(cumulative):
    def strategy(schema):
        return [AxisStrategy((T.Shard(1),), (T.Shard(1),)), AxisStrategy((T.Replicate(),), (T.Replicate(),))]

    register_op_strategy(cumulative, strategy, RuntimeSchemaInfo())

    def body(mesh):
        assert cumulative(sharded(mesh, text="S1(unit=2)")).placements == (T.Shard(1, unit=2),)
        assert cumulative(sharded(mesh, text="S0")).placements == (T.Replicate(),)

    alone(body)


def test_users_register_strategies_for_all_axes(cumulative):
    def strategy(schema):
        (spec,) = schema.args_spec
        whole = spec.with_placements([T.Replicate()])
        return OpStrategy([
            PlacementStrategy(whole, (whole,), (100.0,)),
            PlacementStrategy(spec, None, (0.0,)),
        ])  # fmt: skip

    register_op_strategy(cumulative, strategy)
    found = []
    alone(lambda mesh: found.append(cumulative(sharded(mesh)).placements))
    assert found == [(T.Shard(0),)] * 2, "the cheaper was left"


def test_users_register_rules_and_a_registration_replaces_what_was_decided(cumulative):
    found = []
    register_sharding_prop_rule(cumulative, pointwise_rule)
    alone(lambda mesh: found.append(cumulative(sharded(mesh)).placements))
    with pytest.raises(
        T.PropagationError, match=r"was given pointwise_rule \(.*einop.py:\d+\) already and is given .*lambda"
    ):
        register_op_strategy(cumulative, lambda schema: [])
    propagator.forget(cumulative)
    register_sharding_prop_rule(cumulative, lambda schema: einop_rule("ij->ij", schema, enforce_sharding={"i": -1}))
    alone(lambda mesh: found.append(cumulative(sharded(mesh)).placements))
    assert found == [(T.Shard(0),)] * 2 + [(T.Replicate(),)] * 2


def test_a_strategy_with_the_wrong_number_of_outputs_is_named(cumulative):
    register_op_strategy(cumulative, lambda schema: [AxisStrategy((T.Shard(0),), (T.Shard(0), T.Shard(0)))])

    def body(mesh):
        with pytest.raises(T.PropagationError, match="gives placements for 2 outputs, but the operator has 1"):
            cumulative(sharded(mesh))

    alone(body)


def test_a_rule_may_ask_for_other_inputs(cumulative):
    def rule(schema):
        (spec,) = schema.args_spec
        whole = spec.with_placements([T.Replicate()])
        return OutputSharding(whole, None if spec is whole else (whole,))

    register_sharding_prop_rule(cumulative, rule)

    def body(mesh):
        found = cumulative(sharded(mesh))
        torch.testing.assert_close(whole(found), torch.arange(24.0).reshape(4, 6) * 2, rtol=0, atol=0)

    alone(body)


def test_explicit_redistribution_refuses_what_sends_bytes_and_says_what_to_write():
    def body(mesh):
        x, y = sharded(mesh), sharded(mesh, text="S1")
        with T.explicit_redistribution():
            assert (x + sharded(mesh, text="R")).placements == (T.Shard(0),)  # a local step sends nothing
            with pytest.raises(T.ImplicitRedistributionError) as caught:
                x + y
        assert str(caught.value) == (
            "aten.add.Tensor needs (S1) of (4, 6) float32 as (S0), which moves up to 24 bytes to a rank; ask for it: "
            "x.redistribute(placements=[Shard(0)])"
        )
        assert (x + y).placements == (T.Shard(0),)

    alone(body)


def test_explicit_redistribution_may_be_strict_warn_or_be_off():
    def body(mesh):
        x, y, copy = sharded(mesh), sharded(mesh, text="S1"), sharded(mesh, text="R")
        with ExplicitRedistributionContext(strict=True):
            assert (x + x).placements == (T.Shard(0),)
            with pytest.raises(
                T.ImplicitRedistributionError, match=r"needs \(R\) .* as \(S0\), which moves up to 0 bytes"
            ):
                x + copy
            with T.explicit_redistribution(enable=False):
                x + y
            with T.explicit_redistribution():
                x + copy
            with pytest.raises(RuntimeError, match="moves up to 24 bytes"):
                x + y
        with T.explicit_redistribution(mode="warn"):
            x + copy
            with pytest.warns(
                T.ImplicitRedistributionWarning, match=r"needs \(S1\) .* as \(S0\), which moves up to 24"
            ):
                found = x + y
        torch.testing.assert_close(whole(found), torch.arange(24.0).reshape(4, 6) * 2, rtol=0, atol=0)
        with (
            pytest.raises(T.PropagationError, match="got mode='log'; allowed are 'raise' and 'warn'"),
            T.explicit_redistribution(mode="log"),  # type: ignore[arg-type]
        ):
            pass

    alone(body)


def test_writing_keeps_the_layout_of_what_is_written():
    def body(mesh):
        x, terms = sharded(mesh), sharded(mesh, text="P")
        x.add_(terms)
        assert x.placements == (T.Shard(0),)
        torch.testing.assert_close(x.full_tensor(), torch.arange(24.0).reshape(4, 6) * 2, rtol=0, atol=1e-5)
        # Terms are reduced, written to, and are terms again.
        terms.sub_(sharded(mesh, text="S1") + 3)
        assert terms.relu_() is terms
        assert terms.placements == (T.Partial(),)
        expected = (torch.arange(24.0).reshape(4, 6) * 0 - 3).relu()
        torch.testing.assert_close(terms.full_tensor(), expected, rtol=0, atol=1e-5)

    alone(body)


def test_out_arguments_keep_their_layout_and_are_returned():
    def body(mesh):
        x, out = sharded(mesh, text="S1"), sharded(mesh, text="S0")
        found = torch.mul(x, x, out=out)
        assert found is out
        torch.testing.assert_close(whole(out), torch.arange(24.0).reshape(4, 6) ** 2, rtol=0, atol=0)

    alone(body)


def test_ranks_outside_the_mesh_take_part_with_nothing():
    def body(rank):
        mesh = T.Mesh((2,), ranks=(0, 2))
        full = torch.arange(24.0).reshape(4, 6)
        local = full[2 * mesh.coordinate[0] :][:2] if mesh.coordinate else torch.empty(0)
        spec = T.DTensorSpec(mesh, [T.Shard(0)], T.TensorMeta.contiguous((4, 6)))
        x = T.DTensor(local, spec)
        y = cast(T.DTensor, x * 2 + x).redistribute(placements=[T.Shard(1)])
        assert y.shape == (4, 6)
        x.mul_(2)
        assert y.to_local().shape == ((4, 3) if mesh.coordinate else (0,))

    run_ranks(3, body)
