"""Copies and constants of a tensor's shape: every placement stays, but constants have no terms."""

from math import prod

import torch

from tritondt.ops.propagation.homomorphisms import SELECTIVE, term_strategies
from tritondt.ops.propagation.pointwise import elementwise_passing, elementwise_strategies
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.registration import NUMBERS_BY_TYPE, strategy_of
from tritondt.ops.propagation.schema import AxisStrategy, LocalOp, OpSchema, OutputSharding, OutputSpecs
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import DTensorSpec
from tritondt.sharding.strides import strides_in_order_of

aten = torch.ops.aten


@strategy_of(
    [
        *(aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default),
        aten._pin_memory.default,
    ]
)
def unchanged(schema: OpSchema) -> list[AxisStrategy]:
    """The result has the placements of the argument."""
    return _unchanged(schema)


def _unchanged(schema: OpSchema) -> list[AxisStrategy]:
    placements = dict.fromkeys(p for p in schema.args_spec[0].placements if not isinstance(p, Partial))
    found = [AxisStrategy((placement,), (placement,), exact=True) for placement in placements]
    return [*found, *term_strategies(schema, [SELECTIVE.at(0)])]


@strategy_of([aten._to_copy.default])
def converted(schema: OpSchema) -> list[AxisStrategy]:
    """The result has the argument's placements; terms only where their dtype converts to the other one by one."""
    return [*_unchanged(schema), AxisStrategy((Replicate(),), (Replicate(),))]


@strategy_of(
    [aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default],
    schema_info=NUMBERS_BY_TYPE,
)
def like(schema: OpSchema) -> list[AxisStrategy]:
    """The result has the model's placements, with Replicate for Partial: a constant needs no terms."""
    return _like(schema)


def _like(schema: OpSchema) -> list[AxisStrategy]:
    placements = dict.fromkeys(schema.args_spec[0].placements)
    return [
        AxisStrategy((placement,), (Replicate() if isinstance(placement, Partial) else placement,), exact=True)
        for placement in placements
    ]


@strategy_of([aten.zero_.default])
def zeroed(schema: OpSchema) -> list[AxisStrategy]:
    """The tensor keeps its placements: zero is the sum of zeros."""
    return _unchanged(schema)


@strategy_of([aten.copy_.default])
def copied(schema: OpSchema) -> list[AxisStrategy]:
    """The values go to the target's placements; terms of a reduction may be copied to terms of it."""
    return [*elementwise_strategies(schema.args_spec), *term_strategies(schema, elementwise_passing(schema))]


@strategy_of([aten.fill_.Scalar, aten.fill_.Tensor], schema_info=NUMBERS_BY_TYPE)
def filled(schema: OpSchema) -> list[AxisStrategy]:
    """The tensor keeps its placements, terms excepted."""
    return elementwise_strategies(schema.args_spec)


def _with_local_sizes(schema: OpSchema, outputs: OutputSpecs) -> LocalOp:
    """The operator with this rank's sizes in place of the global ones."""
    op = schema.op._op
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    shape = outputs.local_shape
    if schema.op is not aten.new_empty_strided.default:
        return lambda model, size, *rest, **options: op(model, shape, *rest, **options)
    strides = strides_in_order_of(shape, outputs.tensor_meta.stride)
    return lambda model, size, stride, **options: op(model, shape, strides, **options)


@strategy_of(
    [
        *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
        aten.new_empty_strided.default,
    ],
    localize=_with_local_sizes,
)
def new(schema: OpSchema) -> list[AxisStrategy]:
    """A tensor of the model's shape has the model's placements; one of another shape is whole on every rank."""
    spec = schema.args_spec[0]
    if tuple(schema.args_schema[1]) == spec.shape:
        # Autograd copies gradients into what it has made so: terms are to stay terms.
        kept = _unchanged(schema) if schema.op is aten.new_empty_strided.default else []
        return [*kept, *_like(schema)]
    return [AxisStrategy((placement,), (Replicate(),), exact=True) for placement in dict.fromkeys(spec.placements)]


def _lying_as_other(schema: OpSchema, outputs: OutputSpecs) -> LocalOp:
    assert isinstance(outputs, DTensorSpec), f"{schema.op} gives one tensor"
    shape, strides = outputs.local_shape, outputs.tensor_meta.stride
    local_strides = strides_in_order_of(shape, strides)
    return lambda model, other, **options: model.new_empty_strided(shape, local_strides).zero_()


@strategy_of([aten._new_zeros_with_same_feature_meta.default], localize=_lying_as_other)
def zeros_for_derivative(schema: OpSchema) -> list[AxisStrategy]:
    """Zeros in the shape of a forward derivative, which has the placements, lie as what it is the derivative of."""
    derivative, other = (dict.fromkeys(spec.placements) for spec in schema.args_spec)
    return [
        AxisStrategy((mine, its), (Replicate() if isinstance(mine, Partial) else mine,), exact=True)
        for mine in derivative
        for its in other
    ]


def _of_one_size(schema: OpSchema) -> OutputSharding:
    """The answer whether two tensors have memory of one size, which forward derivatives ask: by their global shapes."""
    first, second = (prod(spec.shape) for spec in schema.args_spec)
    return OutputSharding(None, None, lambda one, other: first == second)


propagator.set_rule(aten._has_same_storage_numel.default, _of_one_size)


def _of_part(schema: OpSchema) -> OutputSharding:
    """The answer whether this rank's part is pinned: each rank's own, as where it lies in memory is."""
    return OutputSharding(None, None, lambda local, *_, **__: bool(local.is_pinned()))


propagator.set_rule(aten.is_pinned.default, _of_part)
