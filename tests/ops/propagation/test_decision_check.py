"""Decisions of users are completed or refused before anything runs, whatever form they come in."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tritondt as T
from tritondt import ops
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import AxisStrategy, OpSchema, OpSpec, OpStrategy, OutputSharding, TupleStrategy

R, S0, S1, P = T.Replicate(), T.Shard(0), T.Shard(1), T.Partial()
FULL = torch.arange(24.0).view(6, 4)
LIBRARY = torch.library.Library("decisions", "DEF")
_KERNELS: dict[str, Callable[..., Any]] = {
    "twice(Tensor x) -> Tensor": lambda x: x * 2,
    "rows(Tensor x) -> Tensor": lambda x: x.sum(1).long(),
    "both(Tensor x, Tensor y) -> (Tensor, Tensor)": lambda x, y: (x + 1, y + 1),
    "each(Tensor[] xs) -> Tensor[]": lambda xs: [x * 2 for x in xs],
    "plus(Tensor[] xs, Tensor y) -> Tensor[]": lambda xs, y: [x + y for x in xs],
    "said(Tensor x) -> ()": lambda x: None,
}
for declared, kernel in _KERNELS.items():
    LIBRARY.define(declared)
    LIBRARY.impl(declared.partition("(")[0], kernel, "CompositeExplicitAutograd")
OPS = torch.ops.decisions


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers a strategy or a rule until the end of the test."""
    taken: list[Any] = []

    def one(op: Any, function: Any, how: Any = ops.register_op_strategy, **options: Any) -> None:
        for former in taken:
            ops.propagator.forget(former)
        taken.append(op)
        how(op, function, **options)

    yield one
    for op in taken:
        ops.propagator.forget(op)


def rows(full: torch.Tensor = FULL, placement: T.Placement = S0) -> T.DTensor:
    return T.distribute_tensor(full, T.Mesh((2,)), [placement])


def whole(results: Any) -> list[torch.Tensor]:
    return [result.full_tensor() for result in (results if isinstance(results, list | tuple) else [results])]


def test_an_output_spec_alone_holds_for_every_argument(register: Any) -> None:
    for target in (R, S1):
        register(
            OPS.twice.default,
            lambda schema, to=target: OpStrategy([OpSpec(schema.args_spec[0].with_placements([to]))]),
        )
        for found in run_ranks(2, lambda rank: OPS.twice(rows()).full_tensor()):
            torch.testing.assert_close(found, FULL * 2, rtol=0, atol=0)


def test_specs_get_shape_and_dtype_from_the_operator(register: Any) -> None:
    def by_strategy(schema: OpSchema) -> OpStrategy:
        """As torch's strategies are written: of OpStrategy in args_schema, with specs that say placements alone."""
        (x,) = schema.args_schema
        assert isinstance(x, OpStrategy)
        mesh, spec = schema.get_mesh_from_args(), x.strategies[0].output_spec
        assert (spec.shape, x.shape, x.mesh, schema.args_strategy[0].ndim) == ((6, 4), (6, 4), mesh, 2)
        found = []
        for placements in ([S0], [R]):
            target = T.DTensorSpec(mesh, placements)
            costs = [ops.generate_redistribute_costs(x, target)]
            found.append(OpSpec(T.DTensorSpec(mesh, placements), [target], costs))
        assert [strategy.redistribute_cost for strategy in found] == [[[0]], [[48]]]
        return OpStrategy(found)

    def by_rule(schema: OpSchema) -> OutputSharding:
        return OutputSharding(schema.args_spec[0])  # of the argument's shape and dtype

    for function, how in ((by_strategy, ops.register_op_strategy), (by_rule, ops.register_sharding_prop_rule)):
        register(OPS.rows.default, function, how)

        def body(rank: int) -> tuple[Any, torch.Tensor]:
            found = OPS.rows(rows())
            return (found.placements, found.shape, found.dtype), found.full_tensor()

        for told, found in run_ranks(2, body):
            assert told == ((S0,), (6,), torch.int64)
            torch.testing.assert_close(found, FULL.sum(1).long(), rtol=0, atol=0)


def test_strategies_of_an_axis_over_all(register: Any) -> None:
    def both(schema: OpSchema) -> OpStrategy:
        offered: list[list[T.Placement]] = [[S0, S0, S0, S0], [R, R, R, R]]
        return ops.expand_to_full_mesh_op_strategy(schema.mesh, schema, offered, input_index=2)

    register(OPS.both.default, both)

    def body(rank: int) -> Any:
        mesh = T.Mesh((2, 2))
        x, y = T.distribute_tensor(FULL, mesh, [S0, S0]), T.distribute_tensor(FULL[:5], mesh, [S1, S0])
        results = OPS.both(x, y)
        return [result.placements for result in results], whole(results)

    for placements, found in run_ranks(4, body):
        assert placements == [(S0, S0), (S0, S0)]
        torch.testing.assert_close(found, [FULL + 1, FULL[:5] + 1], rtol=0, atol=0)


def test_lists_have_a_strategy_for_each_element(register: Any) -> None:
    def each(schema: OpSchema) -> TupleStrategy:
        xs = schema.args_schema[0]
        assert isinstance(xs, TupleStrategy)
        found = []
        for place, child in enumerate(xs.children):
            columns = child.strategies[0].output_spec.with_placements([S1] if place else [S0])
            beside = [T.DTensorSpec(columns.mesh, [R])] * (len(schema.args_schema) - 1)
            found.append(OpStrategy([OpSpec(columns, [columns, *beside])]))
        return TupleStrategy(found)

    def body(rank: int) -> Any:
        results = [OPS.each([rows(), rows(FULL + 1)]), OPS.plus([rows(), rows(FULL + 1)], rows(FULL[:1, 1:2], S1))]
        return [[item.placements for item in result] for result in results], [*map(whole, results)]

    ops.register_op_strategy(OPS.each.default, each)
    register(OPS.plus.default, each)
    try:
        for placements, found in run_ranks(2, body):
            assert placements == [[(S0,), (S1,)]] * 2
            wanted = [[FULL * 2, (FULL + 1) * 2], [FULL + 1, FULL + 2]]
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    finally:
        ops.propagator.forget(OPS.each.default)


def test_a_decision_says_the_call_it_needs(register: Any) -> None:
    def body(rank: int) -> None:
        spec = rows()._spec
        schema = OpSchema(OPS.twice.default, (spec,))
        decision = ops.propagator.propagate(schema)
        assert decision.needs_redistribute
        assert decision.redistribute_schema is not None
        assert decision.redistribute_schema.args_spec == (spec.with_placements([R]),)
        product = OpSchema(torch.ops.aten.mm.default, (rows()._spec, rows(FULL.t(), S1)._spec))
        for own in (ops.propagator.propagate(product), ops.einop_rule("mk,kn->mn", product)):
            assert own.redistribute_schema is not None
            assert own.redistribute_schema.args_spec == own.input_specs

    register(OPS.twice.default, lambda schema: OpStrategy([OpSpec(schema.args_spec[0].with_placements([R]))]))
    run_ranks(2, body)


def _spec(schema: OpSchema, *placements: T.Placement) -> T.DTensorSpec:
    return T.DTensorSpec(schema.mesh, placements)


def _elsewhere(schema: OpSchema) -> T.DTensorSpec:
    return T.DTensorSpec(T.Mesh((1, 2)), [R, S0])


RULE, STRATEGY = ops.register_sharding_prop_rule, ops.register_op_strategy
TWICE, ROWS, BOTH, EACH, SAID = (getattr(OPS, name).default for name in ("twice", "rows", "both", "each", "said"))
WORD: Any = "S0"
REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "no spec": (TWICE, RULE, lambda s: OutputSharding(None), r"has no spec for the result, a tensor of \(6, 4\)"),
    "no decision": (TWICE, RULE, lambda s: None, "is a NoneType; allowed is an OutputSharding"),
    "no strategies": (TWICE, STRATEGY, lambda s: None, "gives None; allowed are a list of AxisStrategy"),
    "nothing": (TWICE, STRATEGY, lambda s: OpStrategy([]), "offers nothing"),
    "one of two": (EACH, RULE, lambda s: OutputSharding([s.args_spec[0]]), "has 1 specs, but the operator gives 2"),
    "alone for two": (BOTH, RULE, lambda s: OutputSharding(s.args_spec[0]), "has one spec, but the operator gives 2"),
    "two for one": (TWICE, RULE, lambda s: OutputSharding([s.args_spec[0]] * 2), "has 2 specs, but the .* one tensor"),
    "none of two": (BOTH, RULE, lambda s: OutputSharding([s.args_spec[0], None]), "has no spec for result 1"),
    "a spec of nothing": (SAID, RULE, lambda s: OutputSharding(s.args_spec[0]), "one spec, but .* gives no tensor"),
    "few inputs": (
        BOTH,
        STRATEGY,
        lambda s: OpStrategy([OpSpec([s.args_spec[0]] * 2, [s.args_spec[0]])]),
        "has 1 input_specs; allowed are 2, one for each tensor",
    ),
    "few inputs of a rule": (
        BOTH,
        RULE,
        lambda s: OutputSharding([*s.args_spec], input_specs=s.args_spec[:1]),
        "has specs for 1 arguments; allowed are 2",
    ),
    "two outputs, no inputs": (
        BOTH,
        STRATEGY,
        lambda s: OpStrategy([OpSpec([*s.args_spec])]),
        "has no input_specs and 2 outputs; without input_specs allowed is the spec of one result",
    ),
    "no such dim": (ROWS, RULE, lambda s: OutputSharding(_spec(s, S1)), r"has \(S1\) for the result, of \(6,\)"),
    "no such reduction": (
        ROWS,
        RULE,
        lambda s: OutputSharding(_spec(s, T.Partial("avg"))),
        r"has \(P\(avg\)\) for the result.*int elements have",
    ),
    "another mesh": (TWICE, RULE, lambda s: OutputSharding(_elsewhere(s)), "has the result on .*; allowed is the mesh"),
    "input elsewhere": (
        TWICE,
        RULE,
        lambda s: OutputSharding(s.args_spec[0], input_specs=(_elsewhere(s),)),
        "has argument 0 on .*; allowed is the mesh",
    ),
    "a word": (TWICE, RULE, lambda s: OutputSharding(WORD), "has a str for the result; allowed is tritondt's"),
    "a part for the whole": (
        TWICE,
        RULE,
        lambda s: OutputSharding(_spec(s, R)),
        r"calls a result \(R\) of \(6, 4\).*holds \(6, 4\), but decisions.twice.default gives \(3, 4\)",
    ),
    "a part for terms": (TWICE, STRATEGY, lambda s: [AxisStrategy((S0,), (P,))], r"calls a result \(P\(sum\)\)"),
    "a placement of torch": (
        TWICE,
        STRATEGY,
        lambda s: [AxisStrategy((torch.distributed.tensor.Shard(0),), (R,))],  # type: ignore[arg-type]
        r"gives Shard\(dim=0\) for a placement; allowed are tritondt's",
    ),
    "elements that are missing": (
        EACH,
        STRATEGY,
        lambda s: TupleStrategy([OpStrategy([OpSpec(s.args_spec[0], [s.args_spec[0]])])]),
        "gives a TupleStrategy of 1 elements; allowed is one for each element of its lists, of which .* has 2",
    ),
    "too few placements": (
        TWICE,
        STRATEGY,
        lambda s: ops.expand_to_full_mesh_op_strategy(s.mesh, s, [[S0]]),
        "lists 1 placements; allowed are 1 for results",
    ),
    "nothing in place": (
        TWICE,
        STRATEGY,
        lambda s: ops.expand_to_full_mesh_op_strategy(s.mesh, s, [[R, R]], inplace_op=True),
        "none fits .* in place; offer one in which",
    ),
}


@pytest.mark.in_core(len(REFUSED))
@pytest.mark.parametrize("name", REFUSED)
def test_decisions_that_do_not_fit_are_refused(name: str, register: Any) -> None:
    op, how, function, message = REFUSED[name]

    def body(rank: int) -> None:
        arguments: Any = {BOTH: lambda: (rows(), rows()), EACH: lambda: ([rows(), rows()],)}
        made = arguments.get(op, lambda: (rows(),))()
        with pytest.raises(T.PropagationError, match=message):
            op(*made)
        torch.testing.assert_close(rows().full_tensor(), FULL, rtol=0, atol=0)  # the world goes on

    register(op, function, how)
    run_ranks(2, body)


def test_a_shape_that_nobody_has_said(register: Any) -> None:
    LIBRARY.define("unfaked(Tensor x) -> Tensor")
    LIBRARY.impl("unfaked", lambda x: x + 1, "CPU")
    op = OPS.unfaked.default

    def body(rank: int) -> Any:
        return OPS.unfaked(rows()).full_tensor()

    register(op, lambda schema: OutputSharding(schema.args_spec[0]), RULE)
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, FULL + 1, rtol=0, atol=0)
    ops.propagator.forget(op)
    ops.register_sharding_prop_rule(op, lambda schema: OutputSharding(_spec(schema, S0)))
    with pytest.raises(T.PropagationError, match=r"nobody has said which shape decisions.unfaked.default gives"):
        run_ranks(2, body)
