"""Rules of views: the decision about a call, and the cheapest move where the shards cannot stay.

A view aliases its argument on every rank: its layout follows from the argument's. Where it has none the argument moves
by the cheapest way to a layout that has one, and the result is a copied view; a view that merges or
splits dims is refused then, with that way, unless the fallback lets it move.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import lcm

import torch
from torch._ops import OpOverload

from tritondt.errors import LayoutError, PropagationError
from tritondt.ops.propagation.homomorphisms import Homomorphism, partials_of
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import LocalOp, OpSchema, OutputSharding, RuleFunction
from tritondt.ops.propagation.tensor_meta import propagate_tensor_meta
from tritondt.redistribution.compile import received_bytes
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard, placements_code
from tritondt.sharding.spec import DTensorSpec, TensorMeta

aten = torch.ops.aten

# The view that an operator does in place.
VIEW_OF: dict[OpOverload, OpOverload] = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.swapdims_.default: aten.transpose.int,
    aten.swapaxes_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
}

# The layout of the result from that of the argument; LayoutError, with the reason, where there is none.
ViewLayout = Callable[[Layout], Layout]
# Units in which a dim may be cut so that the view can be had, given the layout.
ViewUnits = Callable[[Layout, int], Sequence[int]]

# The most layouts that are tried for a suggestion.
MAX_TRIED = 256


class _NoLayoutError(Exception):
    """A call that has no layout unless its argument is moved to `source`, which `refusal`, if any, refuses."""

    def __init__(self, source: DTensorSpec, refusal: str) -> None:
        super().__init__(source)
        self.source, self.refusal = source, refusal


def rule_of(ops: Iterable[OpOverload]) -> Callable[[RuleFunction], RuleFunction]:
    """Decorates the rule of these operators; where a view has no layout, the rule runs again on a moved argument."""

    def register(rule: RuleFunction) -> RuleFunction:
        def decide(schema: OpSchema) -> OutputSharding:
            try:
                return rule(schema)
            except _NoLayoutError as missing:
                source, refusal = missing.source, missing.refusal
            try:
                decision = rule(schema.with_specs((source, *schema.args_spec[1:])))
            except _NoLayoutError:
                # One of several results has no layout there either, as of a split: all of them have one of the whole.
                source = source.with_placements([Replicate() if isinstance(p, Shard) else p for p in source.placements])
                decision = rule(schema.with_specs((source, *schema.args_spec[1:])))
            specs = (source, *schema.args_spec[1:])
            return replace(decision, input_specs=specs, copies_view=schema.is_view, refusal=refusal)

        for op in ops:
            propagator.set_rule(op, decide)
        return rule

    return register


def require_passing(schema: OpSchema, homomorphism: Homomorphism, result: torch.dtype) -> None:
    """Makes the rule run again on reduced terms where terms of its first argument do not pass as `homomorphism`."""
    spec = schema.args_spec[0]
    held = partials_of([spec])
    if all(homomorphism.passes(partial.reduce_op, [spec], [result]) for partial in held):
        return
    reduced = spec.with_placements([Replicate() if isinstance(p, Partial) else p for p in spec.placements])
    raise _NoLayoutError(reduced, "")


def dim_of(schema: OpSchema, position: int, name: str, default: int = 0, ndim: int | None = None) -> int:
    """An argument that is a dim, counted from the front; `ndim` where it is not one of the first tensor's dims."""
    count = max(schema.args_spec[0].ndim if ndim is None else ndim, 1)
    dim: int = schema.argument(position, name, default)
    return dim + count if dim < 0 else dim


def meta_of_view(schema: OpSchema) -> TensorMeta:
    """Shape, stride and dtype of the one result; raises as torch does where the arguments are wrong."""
    meta = propagate_tensor_meta(schema)
    assert isinstance(meta, TensorMeta), f"{schema.op} gives one tensor"
    return meta


def spec_of_view(
    schema: OpSchema,
    meta: TensorMeta,
    view_layout: ViewLayout,
    units: ViewUnits | None = None,
    *,
    is_refused: bool = False,
) -> DTensorSpec:
    """The spec of a result; where there is none, the argument is moved the cheapest way to where there is one.

    With `is_refused` it is sent only where the fallback lets it. PropagationError where there is no such way.
    """
    spec = schema.args_spec[0]
    try:
        layout = view_layout(spec.layout)
    except LayoutError as error:
        found = cheapest_move(spec, view_layout, units)
        if found is None:
            raise PropagationError(f"{schema} has no layout: {error}") from None
        raise _NoLayoutError(found, _refusal(schema, error, found) if is_refused else "") from None
    return DTensorSpec(spec.mesh, layout.placements, meta, layout.order)


def view_of(
    schema: OpSchema,
    view_layout: ViewLayout,
    local: Callable[[DTensorSpec], LocalOp | None] | None = None,
    units: ViewUnits | None = None,
) -> OutputSharding:
    """The decision about a view with one result; `local` gives what runs on local tensors for the result's spec."""
    spec = spec_of_view(schema, meta_of_view(schema), view_layout, units)
    return OutputSharding(spec, None, None if local is None else local(spec))


def _refusal(schema: OpSchema, reason: LayoutError, target: DTensorSpec) -> str:
    spec = schema.args_spec[0]
    numbers = [str(argument) for argument in schema.args_schema[1:]]
    numbers += [f"{name}={value}" for name, value in schema.kwargs_schema.items()]
    return (
        f"{schema.op}({', '.join([str(spec), *numbers])}) would have to move data, which a view of another shape does "
        f"not do unasked: {reason}. Ask for it first: x.redistribute(placements={placements_code(target.placements)}), "
        f"which moves up to {received_bytes(spec, target):,} bytes to a rank; or let such views be copies: "
        "tritondt.ops.set_fallback('replicate')"
    )


def cheapest_move(spec: DTensorSpec, view_layout: ViewLayout, units: ViewUnits | None = None) -> DTensorSpec | None:
    """The spec under which the view is possible that takes the fewest bytes to any rank, the first among equals.

    As few axes as possible change: to Replicate, to another dim, or to another unit.
    """
    sharding = [axis for axis, placement in enumerate(spec.placements) if isinstance(placement, Shard)]
    for count in range(1, len(sharding) + 1):
        found: list[tuple[int, DTensorSpec]] = []
        for axes in combinations(sharding, count):
            for placements in _alternatives(spec.layout, axes, units):
                target = _fitting(spec, placements, view_layout)
                if target is not None:
                    found.append((received_bytes(spec, target), target))
                if len(found) == MAX_TRIED:
                    break
        if found:
            return min(found, key=lambda option: option[0])[1]
    return None


def _alternatives(layout: Layout, axes: Sequence[int], units: ViewUnits | None) -> Iterator[tuple[Placement, ...]]:
    """The placements with those of `axes` changed, all to Replicate first."""

    def options(axis: int) -> list[Placement]:
        shard = layout.placements[axis]
        assert isinstance(shard, Shard), f"axis {axis} shards"
        others = [Shard(dim) for dim in range(len(layout.shape)) if dim != shard.dim]
        wanted = () if units is None else units(layout, shard.dim)
        return [Replicate(), *others, *(Shard(shard.dim, lcm(shard.unit, unit)) for unit in wanted)]

    for chosen in product(*map(options, axes)):
        changed = dict(zip(axes, chosen, strict=True))
        yield tuple(changed.get(axis, placement) for axis, placement in enumerate(layout.placements))


def _fitting(spec: DTensorSpec, placements: tuple[Placement, ...], view_layout: ViewLayout) -> DTensorSpec | None:
    try:
        target = spec.with_placements(placements)
        view_layout(target.layout)
    except LayoutError:
        return None
    return target
