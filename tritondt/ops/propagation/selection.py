"""Selection of strategies: for one axis after the other, the one whose arguments take the fewest bytes to move.

The work is proportional to the number of axes: strategies are data for one axis, and what another axis does to
the tensors enters only through the size of what would move.
"""

from collections.abc import Iterator, Sequence

from tritondt.errors import LayoutError, PropagationError
from tritondt.ops.propagation.schema import AxisStrategy, OpSchema, OutputSharding, OutputSpecs, specs_in
from tritondt.ops.propagation.tensor_meta import TensorMetas, propagate_tensor_meta
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta, has_reduction

Placements = tuple[Placement, ...]


def move_bytes(current: Placement, wanted: Placement, axis_size: int, local_bytes: int) -> float:
    """Bytes that a rank holding `local_bytes` receives when one axis changes from `current` to `wanted`.

    A shard that becomes terms moves nothing, but counts as if terms as large were added up: every rank then holds a
    tensor of the whole length, and what cannot use terms reduces it. `x + terms` would cost the next relu twice what
    x's shards cost here, and an index_add into shards twice what gathering them does.

    >>> move_bytes(Shard(0), Replicate(), 4, 100), move_bytes(Shard(0), Shard(1), 4, 100)
    (300, 75.0)
    """
    if current == wanted or isinstance(current, Replicate):
        return 0
    scattered = local_bytes * (axis_size - 1) / axis_size
    if isinstance(current, Partial):
        if isinstance(wanted, Partial):
            return 0 if {current.reduce_op, wanted.reduce_op} == {"sum", "avg"} else 2 * scattered
        return scattered if isinstance(wanted, Shard) else 2 * scattered
    gathered = local_bytes * (axis_size - 1)
    if isinstance(wanted, Partial):
        return 2 * gathered
    return scattered if isinstance(wanted, Shard) else gathered


def with_cuts(strategy: AxisStrategy, current: Placements) -> Iterator[AxisStrategy]:
    """Variants of a strategy with the cuts that its arguments have already; itself where nothing is left open.

    Yields nothing where it shards an index that no argument is sharded on: that is never cheaper, and it would
    surprise.
    """
    open_dims = [isinstance(placement, Shard) for placement in (*strategy.inputs, *strategy.outputs)]
    if strategy.exact or not any(open_dims):
        yield strategy
        return
    cuts: dict[Shard, None] = {}
    for template, placement in zip(strategy.inputs, current, strict=True):
        if isinstance(template, Shard) and isinstance(placement, Shard) and template.dim == placement.dim:
            cuts[placement] = None
    for cut in cuts:
        inputs = tuple(_cut_like(placement, cut) for placement in strategy.inputs)
        outputs = tuple(None if p is None else _cut_like(p, cut) for p in strategy.outputs)
        yield AxisStrategy(inputs, outputs, exact=True)


def _cut_like(placement: Placement, cut: Shard) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    return cut.on(placement.dim)


def select_for_axis(
    strategies: Sequence[AxisStrategy],
    specs: Sequence[DTensorSpec],
    axis: int,
    fixed: Sequence[int] = (),
) -> AxisStrategy | None:
    """The cheapest strategy for one axis, the first among equals; None where there is none.

    Arguments whose positions are in `fixed` must stay as they are.
    """
    current = tuple(spec.placements[axis] for spec in specs)
    size = specs[0].mesh.shape[axis] if specs else 1
    local_bytes = [spec.layout.max_local_numel * spec.dtype.itemsize for spec in specs]
    best: tuple[tuple[float, int], AxisStrategy] | None = None
    for strategy in (variant for template in strategies for variant in with_cuts(template, current)):
        pairs = list(zip(current, strategy.inputs, strict=True))
        if any(pairs[place][0] != pairs[place][1] for place in fixed):
            continue
        changed = sum(before != after for before, after in pairs)
        moved = sum(
            move_bytes(before, after, size, num_bytes)
            for (before, after), num_bytes in zip(pairs, local_bytes, strict=True)
        )
        if best is None or (moved, changed) < best[0]:
            best = (moved, changed), strategy
        if changed == 0:
            break
    return None if best is None else best[1]


def common_order(specs: Sequence[DTensorSpec]) -> tuple[int, ...] | None:
    """The cut order of the first argument in which several axes cut one dim."""
    for spec in specs:
        if any(len(axes) > 1 for axes in spec.layout.axes_of_dim):
            return spec.order
    return None


def decide(strategies: Sequence[Sequence[AxisStrategy]], schema: OpSchema) -> OutputSharding:
    """The decision by the strategies offered for each axis; PropagationError where none fits.

    An argument that is written to stays where it is, if any strategy lets it; otherwise it moves, and the code that
    runs the call brings it back. Strategies that leave terms of a reduction which their dtype does not have are left
    out; so are strategies that shard an argument where the cuts chosen on several axes do not nest in one dim, and
    strategies that take terms where reductions by different ops would meet in one tensor.
    """
    specs = schema.args_spec
    metas = propagate_tensor_meta(schema)
    strategies = [_reducible(offered, specs, metas) for offered in strategies]
    order = common_order(specs)
    fixed = written_positions(schema)
    chosen = [
        select_for_axis(offered, specs, axis, fixed)
        or select_for_axis(offered, specs, axis)
        # Where nothing runs on what is there, and nothing on whole tensors, an argument is cut as the strategy asks.
        or select_for_axis([strategy._replace(exact=True) for strategy in offered], specs, axis)
        for axis, offered in enumerate(strategies)
    ]
    found = [strategy for strategy in chosen if strategy is not None]
    if len(found) < len(chosen):
        raise PropagationError(f"{schema}: no strategy fits axis {chosen.index(None)}")
    try:
        wanted = _wanted(specs, found, order)
        placements = tuple(zip(*(strategy.outputs for strategy in found), strict=True))
        outputs = _output_specs(schema, metas, placements, order)
    except LayoutError:
        is_left_out = _takes_terms if _mixes_reductions(found) else _shards
        fewer = [[strategy for strategy in offered if not is_left_out(strategy)] for offered in strategies]
        if not all(fewer) or fewer == strategies:
            raise
        return decide(fewer, schema)
    moves = any(before is not after for before, after in zip(specs, wanted, strict=True))
    if not moves:
        return OutputSharding(outputs)
    return OutputSharding(outputs, wanted, redistribute_schema=schema.with_specs(wanted))


def _shards(strategy: AxisStrategy) -> bool:
    return any(isinstance(placement, Shard) for placement in strategy.inputs)


def _takes_terms(strategy: AxisStrategy) -> bool:
    return any(isinstance(placement, Partial) for placement in strategy.inputs)


def _mixes_reductions(chosen: Sequence[AxisStrategy]) -> bool:
    """Whether the strategies chosen for the axes make one tensor terms of reductions that do not commute."""
    tensors = (*zip(*(s.inputs for s in chosen), strict=True), *zip(*(s.outputs for s in chosen), strict=True))
    found = ({p.reduce_op for p in of_axes if isinstance(p, Partial)} for of_axes in tensors)
    return any(len(ops) > 1 and ops != {"sum", "avg"} for ops in found)


def _reducible(
    offered: Sequence[AxisStrategy], specs: Sequence[DTensorSpec], metas: TensorMetas
) -> Sequence[AxisStrategy]:
    """The strategies whose terms are of dtypes that have their reduction; a bool has no sum."""
    several = [metas] if isinstance(metas, TensorMeta) else metas or []
    dtypes = [*(spec.dtype for spec in specs), *(None if meta is None else meta.dtype for meta in several)]

    def fits(strategy: AxisStrategy) -> bool:
        placed = (*strategy.inputs, *strategy.outputs)
        return all(
            not isinstance(placement, Partial) or dtype is None or has_reduction(placement.reduce_op, dtype)
            for placement, dtype in zip(placed, dtypes, strict=False)
        )

    return [strategy for strategy in offered if fits(strategy)]


def _wanted(
    specs: Sequence[DTensorSpec], chosen: Sequence[AxisStrategy], order: tuple[int, ...] | None
) -> tuple[DTensorSpec, ...]:
    wanted = []
    for place, spec in enumerate(specs):
        placements = tuple(choice.inputs[place] for choice in chosen)
        # A lone cut needs no order; keeping the spec's own leaves a tensor that does not move the same object.
        wanted.append(spec.with_placements(placements, spec.order if order is None else order))
    return tuple(wanted)


def _output_specs(
    schema: OpSchema,
    metas: TensorMetas,
    placements: Sequence[tuple[Placement | None, ...]],
    order: tuple[int, ...] | None,
) -> OutputSpecs:
    """The outputs' specs under the placements of each; PropagationError where their number is not the operator's."""
    if metas is None:
        return None
    alone = isinstance(metas, TensorMeta)
    several: Sequence[TensorMeta | None] = [metas] if isinstance(metas, TensorMeta) else metas
    if len(placements) != len(several):
        raise PropagationError(
            f"the strategy of {schema.op} gives placements for {len(placements)} outputs, but the operator has "
            f"{len(several)}"
        )
    specs = [
        None if meta is None or None in of_axes else DTensorSpec(schema.mesh, _all(of_axes), meta, order)
        for of_axes, meta in zip(placements, several, strict=True)
    ]
    return specs[0] if alone else specs


def _all(placements: tuple[Placement | None, ...]) -> Placements:
    return tuple(placement for placement in placements if placement is not None)


def written_positions(schema: OpSchema) -> tuple[int, ...]:
    """Places in `schema.args_spec` of the tensors that the operator writes to."""
    return tuple(_written(schema))


def _written(schema: OpSchema) -> Iterator[int]:
    place = 0
    for number, declared in enumerate(schema.op._schema.arguments):
        if number < len(schema.args_schema):
            argument = schema.args_schema[number]
        else:
            argument = schema.kwargs_schema.get(declared.name)
        count = len(tuple(specs_in((argument,))))
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield from range(place, place + count)
        place += count
