"""Reductions over dims that stay pending where a dim is sharded, and those of which every row must be whole.

Over a sharded dim a linear reduction stays pending (Partial). Where the elements themselves are needed the dim is
gathered. Reductions that are neither are in `completed_reductions`.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.homomorphisms import (
    ADDITIVE,
    ALL,
    ANY,
    LARGEST,
    MULTIPLICATIVE,
    NONE,
    SELECTIVE,
    SMALLEST,
    Homomorphism,
    term_strategies,
)
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSharding, OutputSpecs
from tritondt.ops.rules.reductions import (
    accumulation_dtype,
    is_sharded,
    reduced,
    reduced_dims,
    rows,
    whole,
)
from tritondt.redistribution.compiled_step import identity_element
from tritondt.sharding.placement import Partial, ReduceOp, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten


class _Pending(NamedTuple):
    """The pending form of a reduction over a sharded dim, and the homomorphism by which terms pass through it."""

    reduce_op: ReduceOp
    homomorphism: Homomorphism


_SUM, _COUNT, _PRODUCT = _Pending("sum", ADDITIVE), _Pending("sum", NONE), _Pending("product", MULTIPLICATIVE)

_PENDING: dict[OpOverload, _Pending] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _SUM),
    **dict.fromkeys((aten.count_nonzero.default, aten.count_nonzero.dim_IntList), _COUNT),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), _PRODUCT),
    **dict.fromkeys((aten.amax.default, aten.max.default), _Pending("max", LARGEST)),
    **dict.fromkeys((aten.amin.default, aten.min.default), _Pending("min", SMALLEST)),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default), _Pending("max", ANY)),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default), _Pending("min", ALL)),
}
_MEANS = (aten.mean.default, aten.mean.dim)
# A kernel for these refuses a row without elements, which a rank's piece of a row may well be.
_EXTREMES = (aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)

# Torch's fake form of these gives a result for no elements, which its kernel refuses.
_EXTREMES_OF_ALL = (aten.max.default, aten.min.default)


def _local_pending(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """A mean divides by the global count; an extreme of no elements is what changes nothing."""
    (spec,) = schema.args_spec
    dims, keepdim = reduced(schema)
    if not is_sharded(spec, dims):
        return None
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    dtype = outputs.dtype
    if schema.op in _MEANS:
        count = prod(spec.shape[dim] for dim in dims)
        # The sum of many 16-bit floats may not be one.
        wide = accumulation_dtype(dtype)

        def mean(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.sum(x, dims, keepdim, dtype=wide).div_(count).to(dtype)

        return mean
    if schema.op in _EXTREMES and not prod(spec.local_shape[dim] for dim in dims):
        shape, identity = outputs.local_shape, identity_element(_PENDING[schema.op].reduce_op, dtype)
        return lambda x, *_, **__: x.new_full(shape, identity)
    return None


@strategy_of(list(_PENDING), localize=_local_pending)
def pending(schema: OpSchema) -> list[AxisStrategy]:
    """Every rank has a term of the result where a reduced dim is sharded."""
    how = _PENDING[schema.op]
    dims, _ = reduced(schema)
    if schema.op in _EXTREMES_OF_ALL and not schema.args_spec[0].layout.numel:
        raise RuntimeError(f"{schema.op} of no elements has no value; {schema} was asked for, a dim may be named")
    found = rows(schema) + [AxisStrategy((Shard(dim),), (Partial(how.reduce_op),)) for dim in dims]
    return [*found, *term_strategies(schema, [how.homomorphism.at(0)]), whole()]


_NEEDS_WHOLE_ROWS = [
    *(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default),
    *(aten.sort.default, aten.sort.stable, aten.topk.default),
]


@strategy_of(_NEEDS_WHOLE_ROWS)
def rows_whole(schema: OpSchema) -> list[AxisStrategy]:
    """Rows may be sharded, a row may not: places in it are counted, or every element depends on those before."""
    (spec,) = schema.args_spec
    num_outputs = len(schema.op._schema.returns)
    declared = [argument.name for argument in schema.op._schema.arguments]
    dims = reduced_dims(schema.argument(declared.index("dim"), "dim", -1), spec.ndim)
    found = [AxisStrategy((Shard(dim),), (Shard(dim),) * num_outputs) for dim in range(spec.ndim) if dim not in dims]
    if schema.op is aten.cumsum.default:
        found += term_strategies(schema, [ADDITIVE.at(0)])
    return [*found, whole(num_outputs)]


@strategy_of([aten.flip.default])
def flip(schema: OpSchema) -> list[AxisStrategy]:
    """Flipped dims must be whole: the gradient of a cumulative sum needs them so."""
    (spec,) = schema.args_spec
    dims = [dim % max(spec.ndim, 1) for dim in schema.args_schema[1]]
    found = [AxisStrategy((Shard(dim),), (Shard(dim),)) for dim in range(spec.ndim) if dim not in dims]
    found += term_strategies(schema, [SELECTIVE.at(0)])
    return [*found, whole()]


def _whole_value(schema: OpSchema) -> OutputSharding:
    """The decision about item(): a Python number needs the element on every rank."""
    (spec,) = schema.args_spec
    target = spec.with_placements([Replicate()] * spec.mesh.ndim)
    return OutputSharding(None, None if target is spec else (target,))


propagator.set_rule(aten._local_scalar_dense.default, _whole_value)
