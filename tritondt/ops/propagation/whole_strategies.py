"""Strategies over all axes of a mesh at once, as strategy functions of torch give them: chosen, and made of axes'."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import inf
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import LayoutError, PropagationError, ReductionError
from tritondt.ops.propagation.schema import OpSchema, OutputSharding
from tritondt.ops.propagation.strategies import OpStrategy, OutputSpecs, PlacementStrategy, TupleStrategy, specs_in
from tritondt.redistribution.compile import received_bytes
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement
from tritondt.sharding.spec import DTensorSpec, TensorMeta


def generate_redistribute_costs(src_strategy: OpStrategy, dst_spec: DTensorSpec) -> list[float]:
    """Bytes that a rank receives at most from each of an argument's strategies to `dst_spec`; inf for another mesh.

    A `dst_spec` without TensorMeta describes the argument's tensor. Pure: nothing is sent. LayoutError for placements
    that the tensor cannot have. Source: torch.distributed.tensor._ops.utils.generate_redistribute_costs.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def costs(rank):
    ...     rows = T.ones(4, 6, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])._spec
    ...     argument = OpStrategy([PlacementStrategy(rows)])
    ...     targets = [rows.with_placements([placement]) for placement in (T.Shard(0), T.Shard(1))]
    ...     return [generate_redistribute_costs(argument, target) for target in targets]
    >>> run_ranks(2, costs)[0]
    [[0], [24]]
    """
    return [_cost(strategy.output_spec, dst_spec) for strategy in src_strategy.strategies]


def _cost(source: DTensorSpec, target: DTensorSpec) -> float:
    if source.mesh is not target.mesh:
        return inf
    if target.tensor_meta is None:
        target = target.shallow_copy_with_tensor_meta(source.tensor_meta)
    return received_bytes(source, target)


def expand_to_full_mesh_op_strategy(
    mesh: "Mesh | DeviceMesh",
    op_schema: OpSchema,
    single_mesh_dim_strategies: Sequence[Sequence[Placement | None]],
    *,
    output_tensor_meta: TensorMeta | Sequence[TensorMeta | None] | None = None,
    input_index: int = 1,
    inplace_op: bool = False,
    is_valid_strategy_cb: Callable[[list[DTensorSpec], OutputSpecs], bool] | None = None,
) -> OpStrategy:
    """Combines strategies for one axis over all axes of `mesh`, with the bytes that each combination moves.

    A strategy for one axis lists the placements of the operator's results, `input_index` of them (None for results that
    are not tensors), and then those of all its tensor arguments. Combinations that the arguments cannot have are
    dropped. With `inplace_op` so are those that move the first argument or place the result elsewhere; with
    `is_valid_strategy_cb` so are those for whose argument and result specs it returns False. `output_tensor_meta` is
    optional, because propagation knows the results. The number of combinations grows as a power of the axes; a list of
    AxisStrategy avoids that.

    Pure: nothing is sent. Raises PropagationError where the numbers of placements and arguments differ, and where no
    combination is left. Source: torch.distributed.tensor._ops.utils.expand_to_full_mesh_op_strategy.

    >>> import torch, tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def number(rank):
    ...     x = T.ones(4, 6, device_mesh=T.Mesh((2, 1)), placements=[T.Shard(0), T.Replicate()])
    ...     schema, anywhere = OpSchema(torch.ops.aten.exp.default, (x._spec,)), (T.Shard(0), T.Shard(1), T.Replicate())
    ...     offered = expand_to_full_mesh_op_strategy(x.device_mesh, schema, [[p, p] for p in anywhere])
    ...     return [(str(s.output_spec.placements), s.total_cost) for s in offered.strategies][:3]
    >>> run_ranks(2, number)[0]
    [('(S0, S0)', 0), ('(S0, S1)', 0), ('(S0, R)', 0)]
    """
    canonical = canonical_mesh(mesh)
    arguments = op_schema.args_spec
    for listed in single_mesh_dim_strategies:
        if len(listed) != input_index + len(arguments):
            raise PropagationError(
                f"a strategy of {op_schema.op} lists {len(listed)} placements; allowed are {input_index} for results "
                f"(input_index) and {len(arguments)} for the tensors of {op_schema}"
            )
    found = []
    for combination in product(single_mesh_dim_strategies, repeat=canonical.ndim):
        of_tensors = [*zip(*combination, strict=True)]
        try:
            outputs = [*_output_specs(canonical, of_tensors[:input_index], output_tensor_meta)]
            inputs = [
                DTensorSpec(canonical, _placements(placed, op_schema), spec.tensor_meta, spec.order)
                for placed, spec in zip(of_tensors[input_index:], arguments, strict=True)
            ]
        except (LayoutError, ReductionError):
            continue
        written = [spec for spec in (*outputs[:1], inputs[0]) if spec is not None] if inplace_op else []
        if any(spec.placements != arguments[0].placements for spec in written):
            continue
        specs: OutputSpecs = None if not outputs else outputs[0] if input_index == 1 else tuple(outputs)
        if is_valid_strategy_cb is None or is_valid_strategy_cb(inputs, specs):
            costs = [[_cost(before, after)] for before, after in zip(arguments, inputs, strict=True)]
            found.append(PlacementStrategy(specs, inputs, costs))
    if not found:
        raise PropagationError(
            f"of the strategies of {op_schema.op} none fits {op_schema}{' in place' if inplace_op else ''}; offer one "
            "in which all tensors are Replicate"
        )
    return OpStrategy(found)


def _output_specs(
    mesh: Mesh, of_outputs: Sequence[tuple[Placement | None, ...]], metas: Any
) -> Iterator[DTensorSpec | None]:
    left = iter([metas] if metas is None or isinstance(metas, TensorMeta) else metas)
    for placed in of_outputs:
        yield None if None in placed else DTensorSpec(mesh, [p for p in placed if p is not None], next(left, None))


def _placements(placed: tuple[Placement | None, ...], schema: OpSchema) -> list[Placement]:
    found = [placement for placement in placed if placement is not None]
    if len(found) < len(placed):
        raise PropagationError(f"a strategy of {schema.op} has None for a tensor of {schema}; allowed is a placement")
    return found


def selected(offered: OpStrategy | TupleStrategy, schema: OpSchema) -> OutputSharding:
    """The decision by the cheapest strategy over all axes, or by the cheapest for each element of a list.

    Of equals that which moves fewest arguments, then the first.
    """
    if isinstance(offered, TupleStrategy):
        return _selected_by_element(offered, schema)
    best = _cheapest(offered, schema, schema.args_spec)
    outputs, num_results = best.output_specs, len(schema.op._schema.returns)
    if isinstance(outputs, DTensorSpec) and num_results > 1:
        outputs = [outputs] * num_results
    return OutputSharding(outputs, tuple(_inputs(best, schema, schema.args_spec)))


def _selected_by_element(offered: TupleStrategy, schema: OpSchema) -> OutputSharding:
    arguments = [*_tensors(schema.with_specs_alone())]
    lengths = {len(argument) for argument in arguments if isinstance(argument, list)}
    if lengths != {len(offered.childs)}:
        raise PropagationError(
            f"the strategy function of {schema.op} gives a TupleStrategy of {len(offered.childs)} elements; allowed is "
            f"one for each element of its lists, of which {schema} has {', '.join(map(str, sorted(lengths))) or 'none'}"
        )
    wanted: list[list[DTensorSpec]] = []
    outputs = []
    for place, child in enumerate(offered.childs):
        beside = [argument[place] if isinstance(argument, list) else argument for argument in arguments]
        best = _cheapest(child, schema, beside)
        wanted.append(_inputs(best, schema, beside))
        outputs.append(best.output_spec)
    inputs: list[DTensorSpec] = []
    for argument, specs in zip(arguments, zip(*wanted, strict=True), strict=True):
        if not isinstance(argument, list) and any(spec.placements != specs[0].placements for spec in specs):
            raise PropagationError(
                f"the strategies of {schema.op} for the elements of a list want {argument} under several placements"
            )
        inputs.extend(specs if isinstance(argument, list) else specs[:1])
    return OutputSharding(outputs, tuple(inputs))


def _tensors(schema: OpSchema) -> Iterator[Any]:
    """The specs of tensor arguments, in lists for lists of tensors."""
    for argument in (*schema.args_schema, *schema.kwargs_schema.values()):
        if isinstance(argument, DTensorSpec):
            yield argument
        elif isinstance(argument, list | tuple) and (specs := [*specs_in(argument)]):
            yield specs


def _cheapest(offered: OpStrategy, schema: OpSchema, arguments: Sequence[DTensorSpec]) -> PlacementStrategy:
    strategies = getattr(offered, "strategies", ())
    if not strategies:
        raise PropagationError(f"the strategy function of {schema.op} offers nothing for {schema}")
    if len(strategies) == 1:
        return strategies[0]  # type: ignore[no-any-return]

    def effort(strategy: PlacementStrategy) -> tuple[float, int]:
        wanted = _inputs(strategy, schema, arguments)
        pairs = [*zip(arguments, wanted, strict=True)]
        changed = sum(before.placements != after.placements for before, after in pairs)
        if strategy.redistribute_cost is not None:
            return strategy.total_cost, changed
        return sum(_cost(before, after) for before, after in pairs), changed

    return min(strategies, key=effort)  # type: ignore[no-any-return]


def _inputs(strategy: PlacementStrategy, schema: OpSchema, arguments: Sequence[DTensorSpec]) -> list[DTensorSpec]:
    """The specs that arguments must have: the result's where the strategy has none for them."""
    if strategy.input_specs is None:
        if not isinstance(strategy.output_specs, DTensorSpec):
            raise PropagationError(
                f"a strategy of {schema.op} has no input_specs and {_count(strategy.output_specs)}; without "
                "input_specs allowed is the spec of one result, which then holds for every argument"
            )
        found = [strategy.output_specs] * len(arguments)
    else:
        found = [*strategy.input_specs]
    if len(found) != len(arguments):
        raise PropagationError(
            f"a strategy of {schema.op} has {len(found)} input_specs; allowed are {len(arguments)}, one for each "
            f"tensor of {schema}"
        )
    return [_of_tensor(spec, argument) for spec, argument in zip(found, arguments, strict=True)]


def _of_tensor(spec: DTensorSpec, argument: DTensorSpec) -> DTensorSpec:
    """The placements of a strategy, of an argument's tensor."""
    if not isinstance(spec, DTensorSpec) or spec.tensor_meta == argument.tensor_meta:
        return spec
    order = argument.order if spec.tensor_meta is None and spec.order == tuple(range(spec.mesh.ndim)) else spec.order
    return DTensorSpec(spec.mesh, spec.placements, argument.tensor_meta, order)


def _count(outputs: OutputSpecs) -> str:
    return "no output" if outputs is None else f"{len([*specs_in((outputs,))])} outputs"
