"""Softmax, layer norm and RMS norm: rows may be sharded anywhere, and the dim of a softmax too.

A softmax whose dim is sharded, as over a vocabulary that is split between ranks, exchanges two numbers a row forward
and one backward; the result stays sharded. Layer norm and the fused RMS norm gather the dims that they normalize.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tritondt.ops.propagation.homomorphisms import ADDITIVE, LINEAR, SHIFT, term_strategies
from tritondt.ops.propagation.pointwise import elementwise_strategies
from tritondt.ops.propagation.registration import NUMBERS_BY_TYPE, strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSpecs
from tritondt.ops.rules.reductions import accumulation_dtype, completion, is_sharded, largest_and_sum
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten

_FORWARD = [aten._softmax.default, aten._log_softmax.default]
_BACKWARD = [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default]


def _softmax_dim(schema: OpSchema) -> tuple[int, ...]:
    """The dim that a softmax or its gradient is over; none for a tensor without dims."""
    spec = schema.args_spec[0]
    dim = schema.args_schema[len(schema.args_spec)]
    return (dim % spec.ndim,) if spec.ndim else ()


def _local_softmax(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """Softmax of x - m, with the row's maximum m and the sum of exp(x - m) over all ranks."""
    (spec,) = schema.args_spec
    dims = _softmax_dim(schema)
    if not is_sharded(spec, dims):
        return None
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    dtype, wide = outputs.dtype, accumulation_dtype(outputs.dtype)
    find = largest_and_sum(spec, dims, wide)

    def softmax(x: torch.Tensor, *_: Any) -> torch.Tensor:
        x = x.to(wide)
        largest, total = find(x)
        return (x - largest).exp_().div_(total).to(dtype)

    def log_softmax(x: torch.Tensor, *_: Any) -> torch.Tensor:
        x = x.to(wide)
        largest, total = find(x)
        return (x - largest).sub_(total.log_()).to(dtype)

    return softmax if schema.op is aten._softmax.default else log_softmax


@strategy_of(_FORWARD, localize=_local_softmax)
def softmaxes(schema: OpSchema) -> list[AxisStrategy]:
    """The result has the placements of the argument, whichever dim is sharded."""
    (spec,) = schema.args_spec
    found = [AxisStrategy((Shard(dim),), (Shard(dim),)) for dim in range(spec.ndim)]
    return [*found, AxisStrategy((Replicate(),), (Replicate(),))]


def _local_softmax_backward(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """Every row takes off a multiple of a sum over all ranks: of gradient times result, or of the gradient."""
    gradient, spec = schema.args_spec
    dims = _softmax_dim(schema)
    if not is_sharded(spec, dims):
        return None
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    dtype, wide = outputs.dtype, accumulation_dtype(gradient.dtype)
    complete = completion(spec, dims, "sum", wide)

    def of_softmax(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> torch.Tensor:
        product = grad.to(wide) * output
        return product.sub_(output * complete(product.sum(dims, keepdim=True))).to(dtype)

    def of_log_softmax(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> torch.Tensor:
        grad = grad.to(wide)
        total = complete(grad.sum(dims, keepdim=True))
        return (grad - output.to(wide).exp().mul_(total)).to(dtype)

    return of_softmax if schema.op is aten._softmax_backward_data.default else of_log_softmax


@strategy_of(_BACKWARD, localize=_local_softmax_backward)
def softmax_gradients(schema: OpSchema) -> list[AxisStrategy]:
    """Gradient and result have the same placements; the operator is linear in the gradient."""
    _, output = schema.args_spec
    found = [AxisStrategy((Shard(dim),) * 2, (Shard(dim),)) for dim in range(output.ndim)]
    found += term_strategies(schema, [LINEAR.at(0)])
    return [*found, AxisStrategy((Replicate(),) * 2, (Replicate(),))]


def _rows_and_parameters(num_rowwise: int, num_parameters: int, num_dims: int) -> list[Sequence[Placement]]:
    """Placements per row dim: rowwise arguments sharded, parameters whole; the replicated ones last."""
    whole: list[Placement] = [Replicate()] * num_parameters
    found: list[Sequence[Placement]] = [[Shard(dim)] * num_rowwise + whole for dim in range(num_dims)]
    return [*found, [Replicate()] * num_rowwise + whole]


def _num_row_dims(schema: OpSchema, shape_position: int) -> int:
    """Number of dims before those that are normalized."""
    return schema.args_spec[0].ndim - len(schema.args_schema[shape_position])


@strategy_of([aten.native_layer_norm.default])
def layer_norm(schema: OpSchema) -> list[AxisStrategy]:
    """Result, mean and reciprocal deviation are sharded as the rows are."""
    num_parameters = len(schema.args_spec) - 1
    offered = _rows_and_parameters(1, num_parameters, _num_row_dims(schema, 1))
    return [AxisStrategy(tuple(inputs), (inputs[0],) * 3) for inputs in offered]


@strategy_of([aten.native_layer_norm_backward.default])
def layer_norm_backward(schema: OpSchema) -> list[AxisStrategy]:
    """Parameters have terms of their gradients wherever there are rows."""
    return _norm_backward(schema, num_rowwise=4, num_parameter_gradients=2)


def _norm_backward(schema: OpSchema, num_rowwise: int, num_parameter_gradients: int) -> list[AxisStrategy]:
    num_parameters = len(schema.args_spec) - num_rowwise
    found = []
    for inputs in _rows_and_parameters(num_rowwise, num_parameters, _num_row_dims(schema, 2)):
        rows = inputs[0]
        of_parameters: Placement = Partial() if isinstance(rows, Shard) else Replicate()
        found.append(AxisStrategy(tuple(inputs), (rows, *(of_parameters,) * num_parameter_gradients)))
    return [*term_strategies(schema, [LINEAR.at(0)]), *found]


_FUSED_RMS_NORM = getattr(aten, "_fused_rms_norm", None)
_FUSED_RMS_NORM_BACKWARD = getattr(aten, "_fused_rms_norm_backward", None)


@strategy_of([_FUSED_RMS_NORM.default] if _FUSED_RMS_NORM is not None else [])
def rms_norm(schema: OpSchema) -> list[AxisStrategy]:
    """Result and reciprocal root are sharded as the rows are."""
    offered = _rows_and_parameters(1, len(schema.args_spec) - 1, _num_row_dims(schema, 1))
    return [AxisStrategy(tuple(inputs), (inputs[0],) * 2) for inputs in offered]


@strategy_of([_FUSED_RMS_NORM_BACKWARD.default] if _FUSED_RMS_NORM_BACKWARD is not None else [])
def rms_norm_backward(schema: OpSchema) -> list[AxisStrategy]:
    """The weight has terms of its gradient wherever there are rows."""
    return _norm_backward(schema, num_rowwise=3, num_parameter_gradients=1)


def _local_shift(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """The tensor unchanged on all ranks but one: a number that is added to a sum belongs to one term."""
    spec = schema.args_spec[0]
    pending = [axis for axis, placement in enumerate(spec.placements) if placement.is_partial("sum")]
    if spec.coordinate is None or not any(spec.coordinate[axis] for axis in pending):
        return None
    return lambda x, *_, **__: x


@strategy_of([aten.add_.Scalar], schema_info=NUMBERS_BY_TYPE, localize=_local_shift)
def shifted(schema: OpSchema) -> list[AxisStrategy]:
    """Pending reductions pass too: an RMS norm without a fused kernel adds its epsilon to a pending mean."""
    # Of a sum only one term gets the number.
    return [*elementwise_strategies(schema.args_spec), *term_strategies(schema, [ADDITIVE.at(0), SHIFT.at(0)])]
