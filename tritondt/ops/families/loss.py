"""Losses: negative log-likelihood over sharded rows or sharded classes, and elementwise losses.

A mean over sharded rows is a sum of terms, each divided by what all ranks have counted, so that uneven shards, ignored
targets and class weights give what one device gives.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.pointwise import broadcast_shape, elementwise_strategies
from tritondt.ops.propagation.registration import strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.rules.positions import check_indices, positions_among
from tritondt.ops.rules.reductions import accumulation_dtype, completion, is_sharded
from tritondt.sharding.intervals import Intervals, total
from tritondt.sharding.placement import Partial, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten

# torch's numbers for reduction="none", "mean" and "sum".
_NONE, _MEAN, _SUM = 0, 1, 2

_NLL = [aten.nll_loss_forward.default, aten.nll_loss2d_forward.default]
_NLL_BACKWARD = [aten.nll_loss_backward.default, aten.nll_loss2d_backward.default]


def _class_dim(log_probabilities: DTensorSpec) -> int:
    """The dim of the classes: the second, or the only one where there are no rows."""
    return min(1, log_probabilities.ndim - 1)


def _of_rows(num_dims: int, class_dim: int) -> list[tuple[Shard, Shard]]:
    """Pairs of shards per row dim, of the log-probabilities and of the targets, which have no class dim."""
    return [(Shard(dim), Shard(dim - (dim > class_dim))) for dim in range(num_dims) if dim != class_dim]


class _Picker:
    """Look-up of every row's target class among the classes that this rank holds."""

    def __init__(self, log_probabilities: DTensorSpec, ignore_index: int) -> None:
        self.dim, self._ignored = _class_dim(log_probabilities), ignore_index
        self._num_classes = log_probabilities.shape[self.dim]
        coordinate = log_probabilities.coordinate
        assert coordinate is not None, "only ranks of the mesh run operators"
        self._held: Intervals = log_probabilities.layout.intervals(self.dim, coordinate)

    def classes(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets with class 0 for ignored ones, and a mask of the ignored; IndexError out of range."""
        ignored = target == self._ignored
        classes = target.masked_fill(ignored, 0)
        check_indices(classes, self._num_classes, "target class")
        return classes, ignored

    def places(self, classes: torch.Tensor, ignored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the classes in this rank's piece, class dim of length 1, and a mask of rows without any."""
        if not total(self._held):
            return torch.zeros_like(classes).unsqueeze(self.dim), torch.ones_like(ignored)
        places, missing = positions_among(self._held, classes)
        return places.unsqueeze(self.dim), missing | ignored

    @property
    def holds_any(self) -> bool:
        """Whether this rank holds any class."""
        return bool(total(self._held))


def _row_weights(
    classes: torch.Tensor, ignored: torch.Tensor, weight: torch.Tensor | None, like: torch.dtype
) -> torch.Tensor:
    """The weight of every row, 0 where its target is ignored."""
    found = torch.ones_like(classes, dtype=like) if weight is None else weight.to(like)[classes]
    return found.masked_fill_(ignored, 0)


def _nll_reduction(schema: OpSchema) -> int:
    # Right after the weight, which is None or a tensor.
    reduction: int = schema.args_schema[3 + (schema.op in _NLL_BACKWARD)]
    return reduction


def _local_nll(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """Losses of rows from this rank's classes, which the ranks that cut them add up.

    A mean divides by the weight of all rows, which the ranks that cut these add up first.
    """
    spec, target_spec = schema.args_spec[:2]
    reduction = _nll_reduction(schema)
    rows_sharded = is_sharded(target_spec, range(target_spec.ndim))
    if not is_sharded(spec, (_class_dim(spec),)) and not (rows_sharded and reduction == _MEAN):
        return None
    picker = _Picker(spec, schema.args_schema[4])
    dtype, wide = spec.dtype, accumulation_dtype(spec.dtype)
    dims = tuple(range(target_spec.ndim))
    complete = completion(target_spec, dims, "sum", wide)
    # One number travels where the rows are whole; else each row's, for the sums over rows are other ranks' business.
    by_row = rows_sharded or reduction == _NONE
    complete_rows = completion(spec, (picker.dim,) if by_row else tuple(range(spec.ndim)), "sum", wide)

    def nll(
        x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        classes, ignored = picker.classes(target)
        weights = _row_weights(classes, ignored, weight, wide)
        places, missing = picker.places(classes, ignored)
        if picker.holds_any:
            picked = x.gather(picker.dim, places).squeeze(picker.dim).to(wide).masked_fill_(missing, 0)
            losses = picked.mul_(weights).neg_()
        else:
            losses = weights * x.sum(dtype=wide)  # zeros, of the input as on the other ranks, for graphs to be alike
        if by_row:
            losses = complete_rows(losses.unsqueeze(picker.dim)).squeeze(picker.dim)
        else:
            losses = complete_rows(losses.sum().reshape((1,) * spec.ndim))
        if reduction == _NONE:
            return losses.to(dtype), losses.new_zeros((), dtype=dtype)
        counted = weights.sum(dims, keepdim=True)
        if reduction == _MEAN:
            counted = complete(counted)
            return (losses.sum() / counted.squeeze(dims)).to(dtype), counted.squeeze(dims).to(dtype)
        return losses.sum().to(dtype), counted.squeeze(dims).to(dtype)

    return nll


@strategy_of(_NLL, localize=_local_nll)
def nll_loss(schema: OpSchema) -> list[AxisStrategy]:
    """The loss is terms of a sum over sharded rows, whole over sharded classes, and unreduced sharded as the rows.

    Over classes a row's loss is one rank's number, and programs read it on one rank, as under torch's loss_parallel.
    """
    spec = schema.args_spec[0]
    reduction, dim = _nll_reduction(schema), _class_dim(spec)
    weight = (Replicate(),) * (len(schema.args_spec) - 2)
    found = []
    for of_input, of_target in _of_rows(spec.ndim, dim):
        loss = of_target if reduction == _NONE else Partial()
        of_total = Partial() if reduction == _SUM else Replicate()
        found.append(AxisStrategy((of_input, of_target, *weight), (loss, of_total)))
    found.append(AxisStrategy((Shard(dim), Replicate(), *weight), (Replicate(), Replicate())))
    return [*found, AxisStrategy((Replicate(),) * len(schema.args_spec), (Replicate(), Replicate()))]


def _local_nll_backward(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The gradient: minus the weight at target classes that this rank holds."""
    spec = schema.args_spec[1]
    if not is_sharded(spec, (_class_dim(spec),)):
        return None
    reduction = _nll_reduction(schema)
    picker = _Picker(spec, schema.args_schema[5])
    wide = accumulation_dtype(spec.dtype)

    def nll_backward(
        grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, *rest: Any
    ) -> torch.Tensor:
        result = torch.zeros_like(x, memory_format=torch.contiguous_format)
        if not picker.holds_any:
            return result
        classes, ignored = picker.classes(target)
        places, missing = picker.places(classes, ignored)
        scale = grad.to(wide) / rest[-1].to(wide) if reduction == _MEAN else grad.to(wide)
        values = (_row_weights(classes, missing, weight, wide) * -scale).masked_fill_(missing, 0)
        return result.scatter_(picker.dim, places, values.unsqueeze(picker.dim).to(x.dtype))

    return nll_backward


@strategy_of(_NLL_BACKWARD, localize=_local_nll_backward)
def nll_loss_backward(schema: OpSchema) -> list[AxisStrategy]:
    """The gradient is sharded as the log-probabilities are, by rows or by classes."""
    spec = schema.args_spec[1]
    reduction, dim = _nll_reduction(schema), _class_dim(spec)
    rest = (Replicate(),) * (len(schema.args_spec) - 3)
    found = []
    # A sum's gradient does not look at the total weight, which may stay as the forward gives it.
    of_total = Partial() if reduction == _SUM else Replicate()
    for of_input, of_target in _of_rows(spec.ndim, dim):
        of_gradient = of_target if reduction == _NONE else Replicate()
        found.append(AxisStrategy((of_gradient, of_input, of_target, *rest[:-1], of_total), (of_input,)))
    found.append(AxisStrategy((Replicate(), Shard(dim), Replicate(), *rest), (Shard(dim),)))
    return [*found, AxisStrategy((Replicate(),) * len(schema.args_spec), (Replicate(),))]


# Losses of pairs of elements, and which argument is the reduction.
_LOSSES: dict[OpOverload, int] = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}
_LOSS_GRADIENTS: dict[OpOverload, int] = {
    aten.mse_loss_backward.default: 3,
    aten.smooth_l1_loss_backward.default: 3,
    aten.huber_loss_backward.default: 3,
    aten.soft_margin_loss_backward.default: 3,
    aten.binary_cross_entropy_backward.default: 4,
}


def _with_reduction(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int, reduction: int
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with another reduction, wherever it stands; arguments before it that were left out are None."""
    changed = list(args)
    if place < len(changed):
        changed[place] = reduction
        return changed, dict(kwargs)
    return changed, {**kwargs, "reduction": reduction}


def _local_loss(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """A mean is the sum of this rank's elements over the global count."""
    place = _LOSSES[schema.op]
    specs = schema.args_spec
    if schema.argument(place, "reduction", _MEAN) != _MEAN or not any(s.layout.axes_where(Shard) for s in specs):
        return None
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    op, count, dtype = schema.op._op, prod(broadcast_shape(specs)), outputs.dtype
    wide = accumulation_dtype(dtype)

    def mean(*args: Any, **kwargs: Any) -> torch.Tensor:
        changed, options = _with_reduction(args, kwargs, place, _NONE if wide is not dtype else _SUM)
        found: torch.Tensor = op(*changed, **options)
        return found.sum(dtype=wide).div_(count).to(dtype)

    return mean


@strategy_of(list(_LOSSES), localize=_local_loss)
def elementwise_losses(schema: OpSchema) -> list[AxisStrategy]:
    """The arguments are sharded alike along any dim; a reduced loss is a sum of terms."""
    found = elementwise_strategies(schema.args_spec)
    if schema.argument(_LOSSES[schema.op], "reduction", _MEAN) == _NONE:
        return found
    return [
        AxisStrategy(inputs, (Partial() if isinstance(outputs[0], Shard) else Replicate(),))
        for inputs, outputs, _ in found
    ]


def _local_loss_gradient(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The gradient of a mean is that of a sum over the global count."""
    place = _LOSS_GRADIENTS[schema.op]
    specs = schema.args_spec
    if schema.argument(place, "reduction", _MEAN) != _MEAN or not any(s.layout.axes_where(Shard) for s in specs):
        return None
    op: Callable[..., Any] = schema.op._op
    count = prod(broadcast_shape(specs[1:]))

    def of_mean(gradient: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        changed, options = _with_reduction((gradient / count, *args), kwargs, place, _SUM)
        return op(*changed, **options)

    return of_mean


@strategy_of(list(_LOSS_GRADIENTS), localize=_local_loss_gradient)
def elementwise_loss_gradients(schema: OpSchema) -> list[AxisStrategy]:
    """The gradient is sharded as the elements are; the gradient of a reduced loss is one number on every rank."""
    return elementwise_strategies(schema.args_spec)
