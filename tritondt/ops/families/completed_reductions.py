"""Reductions that cannot stay pending: norms, variances, logsumexp and whether tensors are equal.

Over a sharded dim the ranks complete them within the operator, by exchanging one or two numbers a row.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch

from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSharding, OutputSpecs
from tritondt.ops.rules.reductions import (
    accumulation_dtype,
    check_rows_have_elements,
    completion,
    is_sharded,
    largest_and_sum,
    reduced,
    rows,
    whole,
)
from tritondt.redistribution.compiled_step import identity_element
from tritondt.sharding.placement import Partial, ReduceOp, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten


def _completed(schema: OpSchema, num_outputs: int = 1) -> list[AxisStrategy]:
    """Every dim may be sharded; along a reduced one the ranks complete the result within the operator."""
    dims, _ = reduced(schema)
    found = [AxisStrategy((Shard(dim),), (Replicate(),) * num_outputs) for dim in dims]
    return [*rows(schema, num_outputs), *found, whole(num_outputs)]


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
    dims, keepdim = reduced(schema)
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
    """Norms are replicated over sharded dims: a root of pending terms is none, and the gradient needs the norm."""
    return _completed(schema)


_LARGEST = frozenset({aten.max.dim, aten.argmax.default})
_WITH_VALUES = frozenset({aten.max.dim, aten.min.dim})
_LAST_PLACE = torch.iinfo(torch.int64).max


def _local_extreme(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The extreme of all ranks' extremes, and the first place that has it."""
    (spec,) = schema.args_spec
    dims, keepdim = reduced(schema)
    if not is_sharded(spec, dims):
        return None
    op, coordinate = schema.op, spec.coordinate
    assert coordinate is not None, "only ranks of the mesh run operators"
    # Numbers that the engine reduces; order and equality of truth values are those of 0 and 1.
    dtype = torch.uint8 if spec.dtype is torch.bool else spec.dtype
    reduce_op: ReduceOp = "max" if op in _LARGEST else "min"
    complete, first = completion(spec, dims, reduce_op, dtype), completion(spec, dims, "min", torch.int64)
    held = [spec.layout.intervals(dim, coordinate) for dim in dims]
    counts, lengths = [spec.local_shape[dim] for dim in dims], [spec.shape[dim] for dim in dims]
    kept = [1 if dim in dims else length for dim, length in enumerate(spec.local_shape)]

    def place(at: torch.Tensor) -> torch.Tensor:
        """Places among all elements of those at places among this rank's, both row-major."""
        found = torch.zeros_like(at)
        for number, intervals in enumerate(held):
            indices = torch.cat([torch.arange(start, stop, device=at.device) for start, stop in intervals])
            found += indices[at // prod(counts[number + 1 :]) % counts[number]] * prod(lengths[number + 1 :])
        return found

    def own(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not prod(counts):
            nothing = x.sum(dims, keepdim=True, dtype=dtype)  # of the input as on the other ranks, for like graphs
            value = nothing.masked_fill(nothing == 0, identity_element(reduce_op, dtype))
            return value, torch.full_like(value, _LAST_PLACE, dtype=torch.int64)
        rows = x.reshape(*x.shape[: dims[0]], prod(counts), *x.shape[dims[-1] + 1 :])
        at = op(rows, dims[0], True)[1] if op in _WITH_VALUES else op(rows, dims[0], True)
        return rows.gather(dims[0], at).reshape(kept).to(dtype), place(at).reshape(kept)

    def extreme(x: torch.Tensor, *_: Any, **__: Any) -> Any:
        value, at = own(x)
        found = complete(value)
        # NaN is the extreme of whatever it is among, and equals nothing.
        has_it = (value == found) | (value != value)
        places = _shaped(first(at.masked_fill(~has_it, _LAST_PLACE)), dims, keepdim, torch.int64)
        return (_shaped(found, dims, keepdim, spec.dtype), places) if op in _WITH_VALUES else places

    return extreme


@strategy_of([aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default], localize=_local_extreme)
def extremes_with_places(schema: OpSchema) -> list[AxisStrategy]:
    """Places are replicated over a sharded dim: two numbers a row from every rank, never the rows."""
    check_rows_have_elements(schema, reduced(schema)[0])
    return _completed(schema, len(schema.op._schema.returns))


def _local_variance(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """Variance by the mean over all ranks, then the squares of the differences."""
    (spec,) = schema.args_spec
    dims, keepdim = reduced(schema)
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
    """Empty results for a rank without rows, where the operator would warn of too few elements."""
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
    """Variances over sharded dims take two numbers a row; complex tensors are gathered."""
    num_outputs = len(schema.op._schema.returns)
    if schema.args_spec[0].dtype.is_complex:
        return [*rows(schema, num_outputs), whole(num_outputs)]
    return _completed(schema, num_outputs)


def _local_logsumexp(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    (spec,) = schema.args_spec
    dims, keepdim = reduced(schema)
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
    """Logsumexps over sharded dims take one exchange of two numbers a row."""
    return _completed(schema)


def _compared(schema: OpSchema) -> OutputSharding:
    """The decision about equal: both arguments under the placements of the more sharded; ranks agree by one element."""
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


propagator.set_rule(aten.equal.default, _compared)
