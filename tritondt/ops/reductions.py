"""Sums, means, extremes, norms, variances and whatever else turns a dim into one number.

Over a sharded dim a linear reduction stays pending (Partial), and one that is not linear is completed within the
operator by exchanging one number a row. Where the elements themselves are needed the dim is gathered.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload

from tritondt.execute import identity_element
from tritondt.ops.propagator import propagator
from tritondt.ops.reducing import (
    accumulation_dtype,
    completion,
    is_sharded,
    largest_and_sum,
    places_of_kept,
    reduced_dims,
)
from tritondt.ops.registration import strategy_of
from tritondt.ops.schema import AxisStrategy, LocalOp, OpSchema, OutputSharding, OutputSpecs
from tritondt.placement import Partial, Placement, ReduceOp, Replicate, Shard
from tritondt.spec import DTensorSpec

aten = torch.ops.aten


class _Pending(NamedTuple):
    """How a reduction over a sharded dim is left pending, and which pending arguments pass through it."""

    reduce_op: ReduceOp
    passing: tuple[ReduceOp, ...] = ()


_SUM = _Pending("sum", ("sum", "avg"))
_COUNT = _Pending("sum")
_PRODUCT = _Pending("product", ("product",))
_LARGEST, _SMALLEST = _Pending("max", ("max",)), _Pending("min", ("min",))

_PENDING: dict[OpOverload, _Pending] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _SUM),
    **dict.fromkeys((aten.count_nonzero.default, aten.count_nonzero.dim_IntList), _COUNT),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), _PRODUCT),
    **dict.fromkeys((aten.amax.default, aten.max.default, aten.any.default, aten.any.dim, aten.any.dims), _LARGEST),
    **dict.fromkeys((aten.amin.default, aten.min.default, aten.all.default, aten.all.dim, aten.all.dims), _SMALLEST),
}
_MEANS = (aten.mean.default, aten.mean.dim)
# A kernel for these refuses a row without elements, which a rank's piece of a row may well be.
_EXTREMES = (aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)
# An empty list of dims reduces nothing here, and everything elsewhere.
_EMPTY_IS_NONE = (aten.any.dims, aten.all.dims)


def _reduced(schema: OpSchema) -> tuple[tuple[int, ...], bool]:
    """The dims that a call reduces, and whether they stay with length 1."""
    declared = [argument.name for argument in schema.op._schema.arguments]
    dims: Any = schema.argument(declared.index("dim"), "dim") if "dim" in declared else None
    keepdim: Any = schema.argument(declared.index("keepdim"), "keepdim", False) if "keepdim" in declared else False
    if dims is not None and not isinstance(dims, int) and not dims and schema.op in _EMPTY_IS_NONE:
        return (), keepdim
    return reduced_dims(dims, schema.args_spec[0].ndim), keepdim


def _rows(schema: OpSchema, num_outputs: int = 1) -> list[AxisStrategy]:
    """The strategies that shard what is not reduced."""
    dims, keepdim = _reduced(schema)
    places = places_of_kept(dims, schema.args_spec[0].ndim, keepdim)
    return [AxisStrategy((Shard(dim),), (Shard(place),) * num_outputs) for dim, place in places.items()]


def _whole(num_outputs: int = 1) -> AxisStrategy:
    return AxisStrategy((Replicate(),), (Replicate(),) * num_outputs)


def _local_pending(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """A mean divides by the global count; an extreme of no elements is what changes nothing."""
    (spec,) = schema.args_spec
    dims, keepdim = _reduced(schema)
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
    """Sharded along a reduced dim, every rank has a term of the result."""
    (spec,) = schema.args_spec
    how = _PENDING[schema.op]
    dims, _ = _reduced(schema)
    found = _rows(schema) + [AxisStrategy((Shard(dim),), (Partial(how.reduce_op),)) for dim in dims]
    for placement in dict.fromkeys(spec.placements):
        if isinstance(placement, Partial) and placement.reduce_op in how.passing and _keeps_terms(schema):
            found.append(AxisStrategy((placement,), (placement,)))
    return [*found, _whole()]


def _keeps_terms(schema: OpSchema) -> bool:
    """Whether what the operator does to the dtype first may be done to terms, where only rounding changes."""
    (spec,) = schema.args_spec
    if schema.op in _EXTREMES:
        return True
    if _PENDING[schema.op].reduce_op in ("max", "min"):  # any and all: only for bools is max or, and min and
        return spec.dtype is torch.bool
    dtype = schema.kwargs_schema.get("dtype")
    if dtype is None:
        return spec.dtype in _SUMMED_AS_THEY_ARE or spec.dtype.is_floating_point or spec.dtype.is_complex
    return dtype is spec.dtype or (dtype.is_floating_point and spec.dtype.is_floating_point)


# Shorter ints become int64 first, and terms of 32 bits that wrap around are others in 64.
_SUMMED_AS_THEY_ARE = (torch.int64,)

_NEEDS_WHOLE_ROWS = [
    *(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default),
    *(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default),
    *(aten.sort.default, aten.sort.stable, aten.topk.default),
]
_LENGTH_STAYS = frozenset(_NEEDS_WHOLE_ROWS[4:])


@strategy_of(_NEEDS_WHOLE_ROWS)
def rows_whole(schema: OpSchema) -> list[AxisStrategy]:
    """Rows may be sharded, a row may not: places in it are counted, or every element depends on those before."""
    (spec,) = schema.args_spec
    num_outputs = len(schema.op._schema.returns)
    if schema.op not in _LENGTH_STAYS:
        return [*_rows(schema, num_outputs), _whole(num_outputs)]
    declared = [argument.name for argument in schema.op._schema.arguments]
    dims = reduced_dims(schema.argument(declared.index("dim"), "dim", -1), spec.ndim)
    found = [AxisStrategy((Shard(dim),), (Shard(dim),) * num_outputs) for dim in range(spec.ndim) if dim not in dims]
    if schema.op is aten.cumsum.default and schema.kwargs_schema.get("dtype") in (None, spec.dtype):
        found += [AxisStrategy((p,), (p,)) for p in dict.fromkeys(spec.placements) if _is_sum(p)]
    return [*found, _whole(num_outputs)]


@strategy_of([aten.flip.default])
def flip(schema: OpSchema) -> list[AxisStrategy]:
    """Dims that are turned round must be whole: the gradient of a cumulative sum needs them so."""
    (spec,) = schema.args_spec
    dims = [dim % max(spec.ndim, 1) for dim in schema.args_schema[1]]
    found = [AxisStrategy((Shard(dim),), (Shard(dim),)) for dim in range(spec.ndim) if dim not in dims]
    found += [AxisStrategy((p,), (p,)) for p in dict.fromkeys(spec.placements) if isinstance(p, Partial)]
    return [*found, _whole()]


def _is_sum(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg")


def _completed(schema: OpSchema, num_outputs: int = 1) -> list[AxisStrategy]:
    """Every dim may be sharded; along a reduced one the ranks complete the result within the operator."""
    dims, _ = _reduced(schema)
    found = [AxisStrategy((Shard(dim),), (Replicate(),) * num_outputs) for dim in dims]
    return [*_rows(schema, num_outputs), *found, _whole(num_outputs)]


def _shaped(found: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    """A result whose reduced dims have length 1, as the operator gives it."""
    return (found if keepdim else found.squeeze(dims)).to(dtype)


class _Power(NamedTuple):
    """A norm as the root of a reduction of terms, each made of a rank's own norm; `empty` is the norm of nothing."""

    reduce_op: ReduceOp
    term: Callable[[torch.Tensor], torch.Tensor]
    root: Callable[[torch.Tensor], torch.Tensor]
    empty: float = 0.0


def _power(order: float) -> _Power:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    if order in (0, 1):
        return _Power("sum", same, same)
    if order == 2:
        return _Power("sum", torch.square, torch.sqrt)
    if order == float("inf"):
        return _Power("max", same, same)
    if order == float("-inf"):
        return _Power("min", same, same, float("inf"))
    # The term of nothing is 0: the norm of nothing is 0 to positive powers and infinite to negative ones.
    return _Power("sum", lambda x: x**order, lambda x: x ** (1 / order), 0.0 if order > 0 else float("inf"))


def _local_norm(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The root of the sum over all ranks of their norms' powers."""
    (spec,) = schema.args_spec
    dims, keepdim = _reduced(schema)
    if not is_sharded(spec, dims):
        return None
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    order = float(schema.argument(1, "ord", 2))
    power, dtype = _power(order), outputs.dtype
    wide = accumulation_dtype(dtype)
    complete = completion(spec, dims, power.reduce_op, wide)
    empty = not prod(spec.local_shape[dim] for dim in dims)
    shape = [1 if dim in dims else length for dim, length in enumerate(spec.local_shape)]
    converted = wide.to_complex() if spec.dtype.is_complex else wide

    def norm(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if empty:
            own = torch.full(shape, power.empty, dtype=wide, device=x.device)
        else:
            own = torch.linalg.vector_norm(x, order, dims, True, dtype=converted)
        return _shaped(power.root(complete(power.term(own))), dims, keepdim, dtype)

    return norm


@strategy_of([aten.linalg_vector_norm.default], localize=_local_norm)
def norms(schema: OpSchema) -> list[AxisStrategy]:
    """Replicated over sharded dims: a root of pending terms is none, and its gradient needs the norm itself."""
    return _completed(schema)


def _local_variance(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The mean over all ranks first, then the squares of what is left."""
    (spec,) = schema.args_spec
    dims, keepdim = _reduced(schema)
    several = cast("Sequence[DTensorSpec]", [outputs] if isinstance(outputs, DTensorSpec) else outputs)
    if not is_sharded(spec, dims):
        return None if several[0].local_numel else _nothing(several)
    dtype, wide = several[0].dtype, accumulation_dtype(several[0].dtype)
    correction = schema.kwargs_schema.get("correction")
    count = prod(spec.shape[dim] for dim in dims)
    freedom = max(count - (1 if correction is None else correction), 0)
    complete = completion(spec, dims, "sum", wide)
    rooted = schema.op in (aten.std.correction, aten.std_mean.correction)

    def variance(x: torch.Tensor, *_: Any, **__: Any) -> Any:
        x = x.to(wide)
        mean = complete(x.sum(dims, keepdim=True) / count)
        found = complete((x - mean).square_().sum(dims, keepdim=True)) / freedom
        found = _shaped(found.sqrt_() if rooted else found, dims, keepdim, dtype)
        return found if len(several) == 1 else (found, _shaped(mean, dims, keepdim, dtype))

    return variance


def _nothing(outputs: Sequence[DTensorSpec]) -> LocalOp:
    """For a rank without rows, where the operator would warn of too few elements."""
    shape, dtype = outputs[0].local_shape, outputs[0].dtype

    def empty(x: torch.Tensor, *_: Any, **__: Any) -> Any:
        found = [x.new_empty(shape, dtype=dtype) for _ in outputs]
        return found[0] if len(found) == 1 else tuple(found)

    return empty


@strategy_of(
    [aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction],
    localize=_local_variance,
)
def variances(schema: OpSchema) -> list[AxisStrategy]:
    """Over sharded dims by two numbers a row; complex tensors are gathered."""
    num_outputs = len(schema.op._schema.returns)
    if schema.args_spec[0].dtype.is_complex:
        return [*_rows(schema, num_outputs), _whole(num_outputs)]
    return _completed(schema, num_outputs)


def _local_logsumexp(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    (spec,) = schema.args_spec
    dims, keepdim = _reduced(schema)
    if not is_sharded(spec, dims):
        return None
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    dtype, wide = outputs.dtype, accumulation_dtype(outputs.dtype)
    find = largest_and_sum(spec, dims, wide)

    def logsumexp(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        largest, total = find(x.to(wide))
        # Where the largest is infinite, it is the result.
        found = torch.where(largest.isinf(), largest, largest + total.log_())
        return _shaped(found, dims, keepdim, dtype)

    return logsumexp


@strategy_of([aten.logsumexp.default], localize=_local_logsumexp)
def logsumexps(schema: OpSchema) -> list[AxisStrategy]:
    """Over sharded dims by one exchange of two numbers a row."""
    return _completed(schema)


def _whole_value(schema: OpSchema) -> OutputSharding:
    """A Python number needs the element on every rank."""
    (spec,) = schema.args_spec
    target = spec.with_placements([Replicate()] * spec.mesh.ndim)
    return OutputSharding(None, None if target is spec else (target,))


propagator.register_sharding_prop_rule(aten._local_scalar_dense.default, _whole_value)


def _compared(schema: OpSchema) -> OutputSharding:
    """Both laid out like the one that is sharded on more axes; all ranks agree on the verdict by one element."""
    first, second = schema.args_spec
    if first.shape != second.shape:
        return OutputSharding(None, None, lambda left, right: False)
    model = max((first, second), key=lambda spec: len(spec.layout.axes_where(Shard)))
    placements = [Replicate() if isinstance(p, Partial) else p for p in model.placements]
    wanted = tuple(spec.with_placements(placements, model.order) for spec in (first, second))
    model, dims = wanted[0], range(first.ndim)
    complete = completion(model, dims, "min", torch.bool)

    def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
        verdict = torch.full([1] * len(dims), torch.equal(left, right), device=left.device)
        return bool(complete(verdict).item())

    return OutputSharding(None, None if wanted == (first, second) else wanted, equal)


propagator.register_sharding_prop_rule(aten.equal.default, _compared)
