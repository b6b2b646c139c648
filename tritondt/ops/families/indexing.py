"""Elements read, written and searched by tensors of indices or values: gather, x[index], scatter, masks, searchsorted.

The result may be sharded as the indices are, and along every dim that is not indexed. Lookups and distances, at the
end, follow from an equation each.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from tritondt.ops.propagation.fallback import replicate_all
from tritondt.ops.propagation.homomorphisms import ADDITIVE, LINEAR, SELECTIVE, filling, term_strategies
from tritondt.ops.propagation.pointwise import broadcast_placement, elementwise_strategies
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import (
    AxisStrategy,
    OpSchema,
    RuntimeSchemaInfo,
    Strategies,
)
from tritondt.ops.rules.equations import register_equation
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten


def _replicated(schema: OpSchema) -> AxisStrategy:
    return AxisStrategy((Replicate(),) * len(schema.args_spec), (Replicate(),))


@strategy_of(
    [aten.masked_fill.Scalar, aten.masked_fill_.Scalar],
    # The value decides which terms may stay terms.
    schema_info=RuntimeSchemaInfo(static_argnum=2),
)
def masked_fill(schema: OpSchema) -> list[AxisStrategy]:
    """Fills by zero keep all terms, and fills by any value those of a mean or an extreme."""
    spec, _ = schema.args_spec
    fills = filling(schema.argument(2, "value"), spec)
    return [*elementwise_strategies(schema.args_spec), *term_strategies(schema, [fills.at(0)])]


def _indexed_dim(schema: OpSchema) -> int:
    """The dim along which a gather, scatter, index_select or index_add works."""
    dim: int = schema.args_schema[1]
    return dim % max(schema.args_spec[0].ndim, 1)


@strategy_of([aten.gather.default])
def gather(schema: OpSchema) -> list[AxisStrategy]:
    """Source and indices are cut alike along dims of equal length; along the indexed dim the source is whole."""
    source, index = schema.args_spec
    along = _indexed_dim(schema)
    found = [
        AxisStrategy((Shard(dim), Shard(dim)), (Shard(dim),))
        for dim in range(min(index.ndim, source.ndim))
        if dim != along and source.shape[dim] == index.shape[dim]
    ]
    if index.ndim:
        found.append(AxisStrategy((Replicate(), Shard(along)), (Shard(along),)))
    found += term_strategies(schema, [SELECTIVE.at(0)])
    return [*found, _replicated(schema)]


@strategy_of([aten.index_select.default])
def index_select(schema: OpSchema) -> list[AxisStrategy]:
    """The result is cut as the indices along the selected dim, and as the source elsewhere."""
    source, index = schema.args_spec
    along = _indexed_dim(schema)
    found = [AxisStrategy((Shard(dim), Replicate()), (Shard(dim),)) for dim in range(source.ndim) if dim != along]
    if index.ndim and source.ndim:
        found.append(AxisStrategy((Replicate(), Shard(0)), (Shard(along),)))
    found += term_strategies(schema, [SELECTIVE.at(0)])
    return [*found, _replicated(schema)]


@strategy_of(
    [
        *(aten.scatter.src, aten.scatter_.src, aten.scatter.value, aten.scatter_.value),
        *(aten.scatter_add.default, aten.scatter_add_.default),
        *(aten.scatter_reduce.two, aten.scatter_reduce_.two),
        *(aten.scatter.reduce, aten.scatter_.reduce, aten.scatter.value_reduce, aten.scatter_.value_reduce),
    ]
)
def scatter(schema: OpSchema) -> list[AxisStrategy]:
    """All tensors are cut alike along dims of equal length; added values may be sharded along the indexed dim."""
    into, index, *_ = specs = schema.args_spec
    along = _indexed_dim(schema)
    found = [
        AxisStrategy((Shard(dim),) * len(specs), (Shard(dim),))
        for dim in range(into.ndim)
        if dim != along and all(spec.shape[dim] == into.shape[dim] for spec in specs)
    ]
    adds = schema.op in (aten.scatter_add.default, aten.scatter_add_.default)
    if adds and index.ndim and specs[2].shape[along] == index.shape[along]:
        found.append(AxisStrategy((Partial(), Shard(along), Shard(along)), (Partial(),)))
    if adds:
        found += term_strategies(schema, [ADDITIVE.at(0, 2)])
    return [*found, _replicated(schema)]


@strategy_of([aten.index_add.default, aten.index_add_.default])
def index_add(schema: OpSchema) -> list[AxisStrategy]:
    """All tensors are cut alike elsewhere than along the dim that is added to; along it every rank has a term."""
    into, index, source = schema.args_spec
    along = _indexed_dim(schema)
    found = [
        AxisStrategy((Shard(dim), Replicate(), Shard(dim)), (Shard(dim),)) for dim in range(into.ndim) if dim != along
    ]
    if index.ndim and source.ndim:
        found.append(AxisStrategy((Partial(), Shard(0), Shard(along)), (Partial(),)))
    found += term_strategies(schema, [ADDITIVE.at(0, 2)])
    return [*found, _replicated(schema)]


class _Advanced:
    """Origin of the dims of x[indices]: x itself, or the indices, which broadcast against each other."""

    def __init__(self, schema: OpSchema) -> None:
        source, indices = schema.args_spec[0], schema.args_schema[1]
        self.indices: list[DTensorSpec] = [index for index in indices if index is not None]
        indexed = [dim for dim, index in enumerate(indices) if index is not None]
        self.shape = tuple(torch.broadcast_shapes(*(index.shape for index in self.indices)))
        # Indexed dims that lie side by side are replaced where they are, others by dims in front.
        together = indexed == list(range(indexed[0], indexed[-1] + 1)) if indexed else True
        self.start = indexed[0] if indexed and together else 0
        kept = [dim for dim in range(source.ndim) if dim not in indexed]
        self.place = {dim: place + len(self.shape) * (place >= self.start) for place, dim in enumerate(kept)}

    def of_kept(
        self, make: Callable[[Placement, tuple[Placement, ...], Placement], AxisStrategy]
    ) -> list[AxisStrategy]:
        """Strategies that shard a dim of x that stays, in x and in what is picked."""
        whole = (Replicate(),) * len(self.indices)
        return [make(Shard(dim), whole, Shard(place)) for dim, place in self.place.items()]

    def of_indices(
        self, make: Callable[[Placement, tuple[Placement, ...], Placement], AxisStrategy], of_source: Placement
    ) -> list[AxisStrategy]:
        """Strategies that shard the indices, and with them what is picked."""
        found = []
        for dim, length in enumerate(self.shape):
            placed = tuple(broadcast_placement(index, dim - len(self.shape), length) for index in self.indices)
            if any(isinstance(placement, Shard) for placement in placed):
                found.append(make(of_source, placed, Shard(self.start + dim)))
        return found


def _has_mask(schema: OpSchema) -> bool:
    """Whether an index is a mask, whose number of picked elements depends on all of its values."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in schema.args_schema[1])


@strategy_of([aten.index.Tensor, aten._unsafe_index.Tensor])
def index(schema: OpSchema) -> Strategies:
    """The result is sharded along dims that are not indexed, or as the indices are; masks gather."""
    if _has_mask(schema):
        return replicate_all(schema)

    def reading(of_source: Placement, of_indices: Sequence[Placement], of_picked: Placement) -> AxisStrategy:
        return AxisStrategy((of_source, *of_indices), (of_picked,))

    advanced = _Advanced(schema)
    found = advanced.of_kept(reading) + advanced.of_indices(reading, Replicate())
    found += term_strategies(schema, [SELECTIVE.at(0)])
    return [*found, _replicated(schema)]


def _fills_by_mask(schema: OpSchema) -> bool:
    """Whether the call is x[mask] = number, for a mask of x's shape, which treats every element alike."""
    into, *indices, values = schema.args_spec
    alone = len(schema.args_schema[1]) == len(indices) == 1
    return alone and indices[0].dtype is torch.bool and indices[0].shape == into.shape and not values.ndim


@strategy_of([aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default])
def index_put(schema: OpSchema) -> list[AxisStrategy]:
    """All tensors are cut along dims that are not indexed; values that are added may come from all ranks."""

    def writing(of_target: Placement, of_indices: Sequence[Placement], of_values: Placement) -> AxisStrategy:
        if isinstance(of_values, Shard):  # a dim that is broadcast is whole on every rank
            of_values = broadcast_placement(values, of_values.dim - len(picked), picked[of_values.dim])
        return AxisStrategy((of_target, *of_indices, of_values), (of_target,))

    if _fills_by_mask(schema):
        return elementwise_strategies(schema.args_spec)
    if _has_mask(schema):
        return [_replicated(schema)]
    advanced = _Advanced(schema)
    values = schema.args_spec[-1]
    into = schema.args_spec[0]
    picked = list(advanced.shape)
    for dim, place in sorted(advanced.place.items(), key=lambda item: item[1]):
        picked.insert(place, into.shape[dim])
    found = advanced.of_kept(writing)
    if schema.argument(3, "accumulate", False) and tuple(picked) == values.shape:
        found += advanced.of_indices(writing, Partial())
        found += term_strategies(schema, [ADDITIVE.at(0, 1 + len(advanced.indices))])
    return [*found, _replicated(schema)]


def _whole(spec: DTensorSpec) -> str:
    return "." * spec.ndim


def _in_sorted(schema: OpSchema) -> str:
    """The equation of searchsorted: one sorted row for all, or one for each row of values."""
    table, *_ = schema.args_spec
    return ".,*,.->*" if table.ndim == 1 else "*.,*v,*.->*v"


def _in_turn(schema: OpSchema) -> str:
    """The equation of _trilinear: every dim of the products is an index, which expanded tensors and sums lack."""
    tensors, (expanded, summed) = schema.args_spec, (schema.args_schema[3:6], schema.args_schema[6])
    ndim = tensors[0].ndim + len(expanded[0])
    letters: Mapping[int, str] = {dim: chr(ord("a") + dim) for dim in range(ndim)}
    lacking = [{dim % ndim for dim in dims} for dims in expanded]
    terms = ["".join(letters[dim] for dim in range(ndim) if dim not in without) for without in lacking]
    return ",".join(terms) + "->" + "".join(letters[dim] for dim in range(ndim) if dim not in summed)


def _gradient_of_distances(schema: OpSchema) -> str:
    """The equation of _cdist_backward; the gradient of no distances has the rows' own leading dims."""
    if any(0 in spec.shape for spec in schema.args_spec):
        return f"{','.join(map(_whole, schema.args_spec))}->{_whole(schema.args_spec[1])}"
    return "*pr,*p.,*r.,*pr->*p."


register_equation("searchsorted.Tensor", _in_sorted)
register_equation("bucketize.Tensor", "*,.->*")
register_equation("isin.Tensor_Tensor", lambda schema: f"*,{_whole(schema.args_spec[1])}->*")
register_equation("take", lambda schema: f"{_whole(schema.args_spec[0])},*->*", passing=[SELECTIVE.at(0)])
register_equation("_cdist_forward", "*p.,*r.->*pr")
register_equation("_euclidean_dist", "*p.,*r.->*pr")
register_equation("_cdist_backward", _gradient_of_distances, passing=[LINEAR.at(0)])
register_equation("_trilinear", _in_turn, passing=[ADDITIVE.at(0), ADDITIVE.at(1), ADDITIVE.at(2)])
