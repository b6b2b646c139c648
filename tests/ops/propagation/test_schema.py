"""Calls and decisions are asked as torch.distributed.tensor's rules and strategies ask theirs."""

from typing import Any

import pytest
import torch
import torch.distributed.tensor._op_schema as reference
from torch._subclasses.fake_tensor import FakeTensorMode

import tritondt as T
from tritondt import ops
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import OpSchema, OpSpec, OpStrategy, OutputSharding, TupleStrategy

aten = torch.ops.aten
R, S0, S1 = T.Replicate(), T.Shard(0), T.Shard(1)
OPS = (
    aten.mm.default,
    aten.add_.Tensor,
    aten.add.out,
    aten.view.default,
    aten.split.Tensor,
    aten.native_layer_norm.default,
    aten.equal.default,
    aten._foreach_add_.Scalar,
)


def spec_on(mesh: T.Mesh, text: str, shape: tuple[int, ...] = (6, 4)) -> T.DTensorSpec:
    return T.DTensorSpec(mesh, T.parse_placements(text), T.TensorMeta.contiguous(shape))


@pytest.mark.parametrize("name", ["OpSchema", "OutputSharding", "OpSpec", "OpStrategy", "TupleStrategy"])
def test_members_have_the_names_of_torch(name: str) -> None:
    expected, found = getattr(reference, name), getattr(ops, name)
    public = {member for member in dir(expected) if not member.startswith("_")}
    fields = {*getattr(expected, "__dataclass_fields__", ())} - {"_comparison_key"}
    assert (public | fields) - {*dir(found), *found.__dataclass_fields__} == set()


@pytest.mark.parametrize("op", OPS, ids=str)
def test_questions_about_an_operator_are_answered_as_by_torch(op: Any) -> None:
    ours, theirs = OpSchema(op, ()), reference.OpSchema(op, (), {})
    for name in (
        "is_inplace_op",
        "is_out_variant_op",
        "is_view_op",
        "return_type_tensor",
        "return_type_tuple_tensor_like",
        "return_type_list_tensor_like",
    ):
        assert getattr(ours, name)() is getattr(theirs, name)(), name


def test_arguments_of_a_call() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x, y, z = spec_on(mesh, "S0"), spec_on(mesh, "R"), spec_on(mesh, "S1", (3, 2))
        info = ops.RuntimeSchemaInfo(1)
        schema = OpSchema(aten.addmm.out, (x, [y, None], 2.0, [1, 2]), {"out": z, "beta": 1}, info)
        assert schema.schema_info is schema.with_specs((y, x, z)).schema_info is info
        assert [strategy.strategies[0].output_spec for strategy in schema.args_strategy] == [x]
        (named,) = schema.kwargs_strategy
        assert (named.mesh, named.mesh_shape, named.shape, named.ndim) == (mesh, (2,), (3, 2), 2)
        assert (named.tensor_meta, named.max_num_shards()) == (z.tensor_meta, 2)
        assert schema.args_meta == (x.tensor_meta, (y.tensor_meta, None), 2.0, [1, 2])
        assert schema.kwargs_meta == {"out": z.tensor_meta, "beta": 1}
        told = [schema.arg_type_tensor_or_tensor_list_like(item) for item in (x, [y, None], 2.0, [1, 2], None, [])]
        assert told == [True, True, False, False, False, True]
        with FakeTensorMode():
            first, (second, nothing), *others = schema.gen_fake_args()
            assert (first.shape, second.shape, nothing, others) == ((6, 4), (6, 4), None, [2.0, [1, 2]])
            assert schema.gen_fake_kwargs()["out"].stride() == (2, 1)
        assert schema.get_mesh_from_args() is mesh
        other = spec_on(T.Mesh((1,), ranks=(1,)), "R")
        assert OpSchema(aten.mm.default, (x, other)).get_mesh_from_args(validate=False) is mesh
        with pytest.raises(T.MixedTensorsError, match=r"aten.mm.default was called with tensors on .* and on "):
            OpSchema(aten.mm.default, (x, other)).get_mesh_from_args()
        with pytest.raises(T.MeshError, match=r"the mesh of aten.zeros.default's arguments was asked for; there is no"):
            OpSchema(aten.zeros.default, ([2],)).get_mesh_from_args()

    run_ranks(2, body)


def test_what_strategies_and_decisions_say() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x, y = spec_on(mesh, "S0"), spec_on(mesh, "R")
        one, several, nothing = OpSpec(x, (y, x)), OpSpec((None, x)), OpSpec(None)
        assert (one.output_spec, one.mesh, one.input_spec(), one.input_spec(1)) == (x, mesh, y, x)
        assert (several.mesh, OpSpec(None, (y,)).mesh) == (mesh, mesh)
        assert TupleStrategy([OpStrategy([one])]).child_mesh(0) is mesh
        for ask, message in (
            (lambda: several.output_spec, r"output_spec was asked for of .*; allowed is an operator of one tensor"),
            (lambda: nothing.mesh, r"the mesh was asked for of .*, which has no tensor"),
            (lambda: one.input_spec(2), r"input 2 was asked for of .*; it has 2 inputs"),
            (lambda: several.input_spec(), r"input 0 was asked for of .*; it has 0 inputs"),
            (lambda: OutputSharding(None).mesh, "the mesh was asked for of a decision whose output is None"),
            (lambda: OutputSharding(x, needs_redistribute=True), "needs_redistribute was given; it needs a redist"),
            (lambda: OutputSharding(x, use_val_from_redistribute_schema=True), "it needs a redistribute_schema"),
        ):
            with pytest.raises(T.PropagationError, match=message):
                ask()
        suggested = OpSchema(aten.mm.default, (y, y))
        decision = OutputSharding(None, redistribute_schema=suggested, needs_redistribute=True)
        assert (decision.input_specs, decision.needs_redistribute) == ((y, y), True)
        assert OutputSharding((x, None)).mesh is mesh
        assert not OutputSharding(x).needs_redistribute

    run_ranks(2, body)


@torch.library.custom_op("tests::rows_minus", mutates_args=())
def rows_minus(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Rows less their last one, and a number that is a list's product."""
    return x - x[-1:] + torch.Size(lengths).numel()


@rows_minus.register_fake
def rows_minus_of(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.empty_like(x)


def columns_only(schema: OpSchema) -> OutputSharding:
    """Rows have to be whole: columns are suggested in their place."""
    (spec,) = schema.args_spec
    if spec.placements == (S0,):
        columns = spec.with_placements([S1])
        return OutputSharding(None, redistribute_schema=OpSchema(schema.op, (columns, *schema.args_schema[1:])))
    return OutputSharding(spec)


def with_other_lengths(schema: OpSchema) -> OutputSharding:
    """The operator runs with lengths of its own."""
    suggested = OpSchema(schema.op, (schema.args_spec[0].with_placements([R]), [5, 2]))
    return OutputSharding(
        suggested.args_spec[0],
        redistribute_schema=suggested,
        needs_redistribute=True,
        use_val_from_redistribute_schema=True,
    )


def strategy_with_costs(schema: OpSchema) -> OpStrategy:
    """Costs as lists of one number, as torch's strategies write them."""
    spec = schema.args_strategy[0].strategies[0].output_spec
    return OpStrategy(
        [
            OpSpec(wanted, [wanted], redistribute_cost=[[cost]])
            for wanted, cost in ((spec.with_placements([R]), 9.0), (spec.with_placements([S1]), 4.0))
        ]
    )


@pytest.mark.parametrize(
    ("register", "decide", "placements", "added"),
    [
        (ops.register_sharding_prop_rule, columns_only, (S1,), 6),
        (ops.register_sharding_prop_rule, with_other_lengths, (R,), 10),
        (ops.register_op_strategy, strategy_with_costs, (S1,), 6),
    ],
    ids=["suggestion", "values", "costs"],
)
def test_a_rule_in_the_style_of_torch(register: Any, decide: Any, placements: Any, added: int) -> None:
    op = torch.ops.tests.rows_minus.default
    full = torch.arange(24.0).view(6, 4)

    def body(rank: int) -> Any:
        y: Any = rows_minus(T.distribute_tensor(full, T.Mesh((2,)), [S0]), [2, 3])
        return y.placements, y.full_tensor()

    register(op, decide)
    try:
        found = run_ranks(2, body)
    finally:
        ops.propagator.forget(op)
    for placed, whole in found:
        assert placed == placements
        torch.testing.assert_close(whole, full - full[-1:] + added, rtol=0, atol=0)


def test_suggestions_that_do_not_fit() -> None:
    op = torch.ops.tests.rows_minus.default

    def another(schema: OpSchema) -> OutputSharding:
        return OutputSharding(None, redistribute_schema=OpSchema(aten.neg.default, schema.args_schema))

    def again(schema: OpSchema) -> OutputSharding:
        return OutputSharding(None, redistribute_schema=schema)

    for rule, message in (
        (another, r"suggests aten.neg.default.* allowed is a call of that operator with as many tensors and other"),
        (again, r"suggests tests.rows_minus.default.*, and then another call"),
    ):
        ops.register_sharding_prop_rule(op, rule)
        try:
            with pytest.raises(T.PropagationError, match=message):
                run_ranks(1, lambda rank: rows_minus(T.ones(6, 4, device_mesh=T.Mesh((1,)), placements=[S0]), [1]))
        finally:
            ops.propagator.forget(op)
