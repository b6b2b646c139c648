"""Diagonals, triangles and windows; triangles of cut dims too, by the rows and columns that a rank holds."""

from collections.abc import Mapping, Sequence

import torch

from tritondt.errors import LayoutError
from tritondt.ops.propagation.homomorphisms import ADDITIVE, SELECTIVE, Homomorphism, term_strategies
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSharding, OutputSpecs
from tritondt.ops.rules.empty_shards import empty_shard_result
from tritondt.ops.rules.equations import with_local_sizes
from tritondt.ops.rules.view_layouts import cuts_of, real_cuts, with_cuts
from tritondt.ops.rules.views import dim_of, meta_of_view, rule_of, view_of
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten


@rule_of([aten.diagonal.default])
def diagonal(schema: OpSchema) -> OutputSharding:
    """The decision about diagonal: the two dims must be whole, and the diagonal is a new dim at the end."""
    meta = meta_of_view(schema)
    gone = (dim_of(schema, 2, "dim1", 0), dim_of(schema, 3, "dim2", 1))
    return view_of(schema, lambda layout: _without(layout, gone, meta.shape[-1]))


def _without(layout: Layout, gone: Sequence[int], length: int) -> Layout:
    """The layout without two dims, which must be whole, and with a whole one of `length` at the end."""
    cuts = cuts_of(layout)
    for dim in gone:
        for axis, shard in real_cuts(layout, cuts[dim]):
            raise LayoutError(f"axis {axis} cuts dim {dim} by {shard!r}, of which no rank holds a diagonal")
    kept = [dim for dim in range(len(layout.shape)) if dim not in gone]
    return with_cuts(layout, [*(layout.shape[dim] for dim in kept), length], [*(cuts[dim] for dim in kept), []])


def _places_beside(first: int, second: int, ndim: int) -> Mapping[int, int]:
    """For every dim of a tensor of `ndim` dims but two, its position among the dims that remain."""
    kept = [dim for dim in range(ndim) if dim not in (first, second)]
    return {dim: place for place, dim in enumerate(kept)}


def _uncut(schema: OpSchema, homomorphism: Homomorphism = SELECTIVE) -> list[AxisStrategy]:
    """Strategies with all tensors terms of one reduction, and with all whole."""
    count = len(schema.args_spec)
    whole = AxisStrategy((Replicate(),) * count, (Replicate(),))
    return [*term_strategies(schema, [homomorphism.at(*range(count))]), whole]


def _sized(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    return empty_shard_result(schema, outputs) or with_local_sizes(schema.op, "input_sizes", outputs)


@strategy_of([aten.diagonal_backward.default], localize=_sized)
def diagonal_gradient(schema: OpSchema) -> list[AxisStrategy]:
    """The dims beside the diagonal are cut as the gradient's are."""
    ndim = schema.args_spec[0].ndim + 1
    places = _places_beside(dim_of(schema, 3, "dim1", ndim=ndim), dim_of(schema, 4, "dim2", ndim=ndim), ndim)
    return [*(AxisStrategy((Shard(place),), (Shard(dim),)) for dim, place in places.items()), *_uncut(schema)]


@strategy_of([aten.diag_embed.default])
def embedded_diagonal(schema: OpSchema) -> list[AxisStrategy]:
    """The dims beside the diagonal are cut as the argument's are."""
    ndim = schema.args_spec[0].ndim + 1
    places = _places_beside(dim_of(schema, 2, "dim1", -2, ndim), dim_of(schema, 3, "dim2", -1, ndim), ndim)
    return [*(AxisStrategy((Shard(place),), (Shard(dim),)) for dim, place in places.items()), *_uncut(schema)]


@strategy_of([aten.diagonal_scatter.default])
def written_diagonal(schema: OpSchema) -> list[AxisStrategy]:
    """The dims beside the diagonal are cut alike in both."""
    ndim = schema.args_spec[0].ndim
    places = _places_beside(dim_of(schema, 3, "dim1", 0), dim_of(schema, 4, "dim2", 1), ndim)
    cut = [AxisStrategy((Shard(dim), Shard(place)), (Shard(dim),)) for dim, place in places.items()]
    return [*cut, *_uncut(schema)]


def _matrix_dims(schema: OpSchema) -> list[int]:
    """The dims among the last two that may be cut: every rank holds one piece of them."""
    (spec,) = schema.args_spec
    last = range(max(spec.ndim - 2, 0), spec.ndim)
    repeated = {p.dim for p in spec.placements if isinstance(p, Shard) and not p.is_one_run}
    return [dim for dim in last if dim not in repeated]


def _shift(spec: DTensorSpec) -> int:
    """Offset of a diagonal in this rank's part of a matrix, further to the right."""
    starts = []
    for dim in (spec.ndim - 2, spec.ndim - 1):
        starts.append(0 if spec.coordinate is None else spec.layout.bounds(dim, spec.coordinate)[0])
    return starts[0] - starts[1]


def _shifted(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    shift, op = _shift(schema.args_spec[0]), schema.op._op
    return None if shift == 0 else lambda local, diagonal=0: op(local, diagonal + shift)


@strategy_of([aten.tril.default, aten.tril_.default, aten.triu.default, aten.triu_.default], localize=_shifted)
def triangles(schema: OpSchema) -> list[AxisStrategy]:
    """Every dim may be cut: a piece of a triangle is a triangle elsewhere."""
    leading = range(max(schema.args_spec[0].ndim - 2, 0))
    dims = [*leading, *_matrix_dims(schema)]
    return [*(AxisStrategy((Shard(dim),), (Shard(dim),)) for dim in dims), *_uncut(schema)]


def _local_trace(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The sum of this rank's part of the diagonal."""
    (spec,) = schema.args_spec
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    if spec.local_shape == spec.shape:
        return None
    shift, dtype = _shift(spec), outputs.dtype
    return lambda local: local.diagonal(shift).sum(dtype=dtype)


@strategy_of([aten.trace.default], localize=_local_trace)
def trace(schema: OpSchema) -> list[AxisStrategy]:
    """The trace is a sum, of which every rank has a term."""
    return [*(AxisStrategy((Shard(dim),), (Partial(),)) for dim in _matrix_dims(schema)), *_uncut(schema, ADDITIVE)]


def _local_select_scatter(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The write to a cut dim, by the rank that holds the index."""
    into, _ = schema.args_spec
    dim = dim_of(schema, 2, "dim")
    index = schema.argument(3, "index") % max(into.shape[dim], 1)
    if into.coordinate is None or into.local_shape[dim] == into.shape[dim]:
        return None
    passed = 0
    for start, stop in into.layout.intervals(dim, into.coordinate):
        if start <= index < stop:
            place = passed + index - start
            return lambda local, source, *_, **__: aten.select_scatter.default(local, source, dim, place)
        passed += stop - start
    return lambda local, *_, **__: local.clone()


@strategy_of([aten.select_scatter.default], localize=_local_select_scatter)
def written_index(schema: OpSchema) -> list[AxisStrategy]:
    """Other dims are cut alike in both; along the dim itself the written tensor must be whole."""
    dim, ndim = dim_of(schema, 2, "dim"), schema.args_spec[0].ndim
    found = [AxisStrategy((Shard(dim), Replicate()), (Shard(dim),))]
    for other in range(ndim):
        if other != dim:
            found.append(AxisStrategy((Shard(other), Shard(other - (other > dim))), (Shard(other),)))
    return [*found, *_uncut(schema)]


@strategy_of([aten.unfold_backward.default], localize=_sized)
def gradient_of_windows(schema: OpSchema) -> list[AxisStrategy]:
    """The gradient is cut along every dim but that of the windows, and the last, which lies within them."""
    ndim = schema.args_spec[0].ndim - 1
    dim = dim_of(schema, 2, "dim", ndim=ndim)
    cut = [AxisStrategy((Shard(other),), (Shard(other),)) for other in range(ndim) if other != dim]
    return [*cut, *_uncut(schema, ADDITIVE)]


@rule_of([aten.unfold.default])
def windows(schema: OpSchema) -> OutputSharding:
    """The decision about unfold: the dim must be whole, and a window's elements are a new dim at the end."""
    meta, dim = meta_of_view(schema), dim_of(schema, 1, "dimension")

    def view_layout(layout: Layout) -> Layout:
        cuts = cuts_of(layout)
        for axis, shard in real_cuts(layout, cuts[dim] if layout.shape else []):
            raise LayoutError(f"axis {axis} cuts dim {dim} by {shard!r}, and windows reach beyond a piece")
        kept = [[] if place == dim else of_dim for place, of_dim in enumerate(cuts)]
        return with_cuts(layout, meta.shape, [*kept, *[[]] * (len(meta.shape) - len(kept))])

    return view_of(schema, view_layout)
