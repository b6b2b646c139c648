"""Equations, the choice of the cheapest layout axis by axis, and what that choice costs on larger meshes."""

from functools import partial

import pytest
import torch

import tritondt as T
from tests.harness.work import num_calls
from tests.ops.sharded import Case, check
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import OpSchema, einop_rule, pointwise_rule, propagator, register_sharding_prop_rule
from tritondt.ops.propagation.schema import AxisStrategy
from tritondt.ops.propagation.selection import move_bytes, with_cuts
from tritondt.ops.rules.einop import einop_strategies
from tritondt.sharding.placement import Partial, Replicate, Shard, parse_placements

aten = torch.ops.aten


def spec(mesh, text, shape, order=None):
    return T.DTensorSpec(mesh, parse_placements(text), T.TensorMeta.contiguous(shape), order)


def decided(mesh_shape, op, specs, rule):
    """Wanted inputs and the output of a rule as text, as one rank decides them."""

    def body(rank):
        mesh = T.Mesh(mesh_shape)
        schema = OpSchema(op, tuple(spec(mesh, *found) for found in specs))
        decision = rule(schema)
        inputs = decision.input_specs or schema.args_spec
        return [str(found.layout) for found in inputs], str(decision.output_spec.layout)

    results = run_ranks(torch.Size(mesh_shape).numel(), body)
    assert all(result == results[0] for result in results), "ranks decide differently"
    return results[0]


@pytest.mark.parametrize(
    ("mesh", "left", "right", "expected"),
    [
        ((4,), "S0", "R", (["(S0)", "(R)"], "(S0)")),
        ((4,), "R", "S1", (["(R)", "(S1)"], "(S1)")),
        ((4,), "S1", "S0", (["(S1)", "(S0)"], "(P(sum))")),
        ((4,), "S1(unit=3)", "R", (["(S1(unit=3))", "(S0(unit=3))"], "(P(sum))")),
        ((4,), "S0", "S1", (["(S0)", "(R)"], "(S0)")),  # the smaller one is gathered
        ((4,), "R", "R", (["(R)", "(R)"], "(R)")),
        ((2, 2), "S0, S1", "R, S0", (["(S0, S1)", "(R, S0)"], "(S0, P(sum))")),
        ((2, 2), "S0, R", "R, S1", (["(S0, R)", "(R, S1)"], "(S0, S1)")),
        ((2, 2), "P, S0", "R, R", (["(R, S0)", "(R, R)"], "(R, S0)")),
    ],
)
def test_matmul_by_its_equation(mesh, left, right, expected):
    specs = [(left, (50, 12)), (right, (12, 8))]
    assert decided(mesh, aten.mm.default, specs, lambda schema: einop_rule("mk,kn->mn", schema)) == expected


def test_two_cuts_of_one_index_are_settled_by_bytes():
    """Cut in threes here and in fours there: the smaller tensor is cut again."""
    specs = [("S1(unit=3)", (50, 12)), ("S0(unit=4)", (12, 8))]
    found = decided((4,), aten.mm.default, specs, lambda schema: einop_rule("mk,kn->mn", schema))
    assert found == (["(S1(unit=3))", "(S0(unit=3))"], "(P(sum))")


def test_pending_sums_pass_where_the_rule_says_that_it_is_linear():
    specs = [("P", (6, 4)), ("P", (6, 4))]
    rule = decided((2,), aten.add.Tensor, specs, lambda schema: einop_rule("ij,ij->ij", schema, linearity=True))
    assert rule == (["(P(sum))", "(P(sum))"], "(P(sum))")
    rule = decided((2,), aten.add.Tensor, specs, lambda schema: einop_rule("ij,ij->ij", schema))
    assert rule == (["(R)", "(R)"], "(R)")
    assert decided((2,), aten.hypot.default, specs, pointwise_rule)[1] == "(R)"
    assert decided((2,), aten.hypot.default, specs, lambda s: pointwise_rule(s, linearity=True))[1] == "(P(sum))"


def test_enforced_letters_keep_what_is_written_to():
    specs = [("S1", (6, 4)), ("S0", (6, 4))]
    free = decided((2,), aten.add.Tensor, specs, lambda s: einop_rule("ij,ij->ij", s))
    assert free[1] == "(S0)"
    for letter, expected in (("i", "(S0)"), ("j", "(S1)")):
        rule = partial(einop_rule, "ij,ij->ij", enforce_sharding={letter: 0})
        found = decided((2,), aten.add.Tensor, specs, rule)
        assert found[1] == expected


def test_the_cut_order_of_one_argument_becomes_that_of_all():
    specs = [("S0, S0", (7, 3), (1, 0)), ("S0, S0", (7, 3))]
    found = decided((2, 2), aten.add.Tensor, specs, pointwise_rule)
    assert found == (["(S0, S0) in order (1, 0)"] * 2, "(S0, S0) in order (1, 0)")


def test_an_equation_that_makes_no_sense_is_refused():
    for equation in ("mk,kn", "mk,kn->mx", "m?->m"):
        with pytest.raises(T.PropagationError, match="is not understood; allowed are terms like 'mk,kn->mn'"):
            einop_strategies(equation)


def test_strategies_take_the_cut_that_an_argument_has():
    template = AxisStrategy((Shard(1), Shard(0)), (Partial(),))
    found = list(with_cuts(template, (Shard(1, sizes=(2, 1)), Shard(0, unit=2))))
    assert found == [
        AxisStrategy((Shard(1, sizes=(2, 1)), Shard(0, sizes=(2, 1))), (Partial(),), exact=True),
        AxisStrategy((Shard(1, unit=2), Shard(0, unit=2)), (Partial(),), exact=True),
    ]
    assert list(with_cuts(template, (Replicate(), Shard(1)))) == []


@pytest.mark.parametrize(
    ("current", "wanted", "expected"),
    [
        (Shard(0), Shard(0), 0),
        (Replicate(), Shard(0), 0),
        (Replicate(), Partial(), 0),
        (Shard(0), Replicate(), 300),
        (Shard(0), Partial(), 600),
        (Shard(0), Shard(1), 75),
        (Shard(0), Shard(0, unit=2), 75),
        (Partial(), Shard(0), 75),
        (Partial(), Replicate(), 150),
        (Partial("avg"), Partial(), 0),
    ],
)
def test_bytes_of_a_change_on_an_axis_of_four(current, wanted, expected):
    assert move_bytes(current, wanted, 4, 100) == expected


def test_what_is_added_to_terms_stays_sharded_unless_it_is_small():
    large = torch.arange(32.0).reshape(8, 4)
    for terms in ("P", "P(avg)"):
        check(torch.add, Case((4,), (large, large), ("S0", terms)), expect="S0")
    check(lambda x, terms: (x + terms).relu(), Case((4,), (large, large), ("S0", "P")), expect="S0")
    # The terms of 32 elements stay rather than be scattered for the sake of 4.
    check(torch.add, Case((4,), (large, large[0]), ("P", "S0")), expect="P")


def test_a_third_axis_does_not_multiply_the_work():
    """Combinations of axes would cost 4 to 40 times as much per axis; composed axis by axis it is about one more."""

    def calls(num_axes):
        mesh = T.Mesh((2,) * num_axes)
        found = []
        for length in (20, 21):
            schema = OpSchema(
                aten.mm.default,
                (
                    spec(mesh, ", ".join(["S0", "S1", "R"][:num_axes]), (length, 16)),
                    spec(mesh, ", ".join(["R", "S0", "S1"][:num_axes]), (16, 8)),
                ),
            )
            found.append(num_calls(partial(einop_rule, "mk,kn->mn", schema)))
        return found[-1]  # what does not depend on lengths is cached by the first

    found = run_ranks(8, lambda rank: (calls(1), calls(3)) if rank == 0 else None)[0]
    assert found is not None
    one, three = found
    assert three < 4 * one, f"{three} calls on 3 axes, {one} on one"


def test_equations_of_several_results_and_of_diagonals():
    scaled = torch.library.Library("einop", "DEF")
    scaled.define("product(Tensor x, Tensor y) -> (Tensor, Tensor)")
    scaled.impl("product", lambda x, y: (x * y, (x * y).sum(1)), "CompositeExplicitAutograd")
    op = torch.ops.einop.product.default
    full = torch.arange(24.0).view(6, 4)

    def body(rank):
        mesh = T.Mesh((2,))
        found = {}
        for text in ("S0", "S1", "R"):
            x = T.distribute_tensor(full, mesh, parse_placements(text))
            results = torch.ops.einop.product(x, x)
            found[text] = [str(it.placements) for it in results], [it.full_tensor() for it in results]
        return found

    register_sharding_prop_rule(op, lambda schema: einop_rule("ij,ij->ij,i", schema))
    try:
        for found in run_ranks(2, body):
            assert {text: placed for text, (placed, _) in found.items()} == {
                "S0": ["(S0,)", "(S0,)"],
                "S1": ["(S1,)", "(P(sum),)"],
                "R": ["(R,)", "(R,)"],
            }
            for _, results in found.values():
                torch.testing.assert_close(results, [full * full, (full * full).sum(1)], rtol=0, atol=0)
    finally:
        propagator.forget(op)
    for cut in ("S0", "S1"):
        diagonal = decided((2,), aten.diagonal.default, [(cut, (4, 4))], lambda schema: einop_rule("ii->i", schema))
        assert diagonal == (["(R)"], "(R)")
    assert einop_strategies("bii->bi") == [
        AxisStrategy((Shard(0),), (Shard(0),)),
        AxisStrategy((Replicate(),), (Replicate(),)),
    ]
    with pytest.raises(T.PropagationError, match="its terms must be the tensors of the call, a letter or 1 for each"):
        decided((2,), aten.mm.default, [("R", (4, 4))], lambda schema: einop_rule("mk,kn->mn", schema))
