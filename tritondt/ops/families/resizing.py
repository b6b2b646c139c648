"""Tensors that take another shape in place, to or from no elements at all."""

from math import prod

import torch

from tritondt.errors import LayoutError, PropagationError
from tritondt.ops.propagation.propagator import propagator
from tritondt.ops.propagation.schema import OpSchema, OutputSharding
from tritondt.ops.propagation.tensor_meta import propagate_tensor_meta
from tritondt.sharding.placement import placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta
from tritondt.sharding.strides import strides_in_order_of

aten = torch.ops.aten


def resized(schema: OpSchema) -> OutputSharding:
    """The decision about resize_: the placements stay; PropagationError where elements would have to stay as well."""
    spec, meta = schema.args_spec[0], propagate_tensor_meta(schema)
    assert isinstance(meta, TensorMeta), f"{schema.op} gives one tensor"
    if meta.shape == spec.shape:
        return OutputSharding(spec, None, lambda local, *_, **__: local)
    if prod(meta.shape) and prod(spec.shape):
        raise PropagationError(
            f"{schema} to {meta.shape} would keep elements by their place in memory, which other ranks have; resize "
            "what has none (x.resize_(0) first), or make a new tensor"
        )
    try:
        output = DTensorSpec(spec.mesh, spec.placements, meta, spec.order)
    except LayoutError as error:
        raise PropagationError(
            f"{schema} cannot be resized to {meta.shape}, of which {placements_text(spec.placements)} is no layout: "
            f"{error}; make a new tensor"
        ) from None
    shape = output.local_shape
    strides = strides_in_order_of(shape, meta.stride)
    return OutputSharding(output, None, lambda local, *_, **__: local.new_empty_strided(shape, strides))


propagator.set_rule(aten.resize_.default, resized)
