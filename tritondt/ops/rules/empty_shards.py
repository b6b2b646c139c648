"""Results on a rank that holds nothing of an argument: many kernels refuse empty tensors."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from tritondt.ops.propagation.schema import LocalOp, OpSchema, OutputSpecs
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec
from tritondt.sharding.strides import strides_in_order_of


def empty_shard_result(schema: OpSchema, outputs: OutputSpecs) -> LocalOp | None:
    """A function of empty results, or zeros where the result is terms of a sum; None where the operator has to run.

    It has to where this rank holds something of every argument, or all of arguments that are empty, or a result is no
    sum and not empty.
    """
    held = [spec for spec in schema.args_spec if prod(spec.shape)] or [
        spec for spec in schema.args_spec if spec.local_shape != spec.shape
    ]
    if schema.mesh.coordinate is None or all(spec.local_numel for spec in held):
        return None
    alone = isinstance(outputs, DTensorSpec)
    specs: Sequence[DTensorSpec | None] = [outputs] if isinstance(outputs, DTensorSpec) else outputs or []
    if not all(spec is None or spec.local_numel == 0 or _is_sum(spec) for spec in specs):
        return None
    device = schema.mesh.device_type

    def give(*_: Any, **__: Any) -> Any:
        found = [None if spec is None else _zeros(spec, device) for spec in specs]
        return found[0] if alone else tuple(found)

    return give


def _is_sum(spec: DTensorSpec) -> bool:
    return any(isinstance(placement, Partial) and placement.reduce_op == "sum" for placement in spec.placements)


def _zeros(spec: DTensorSpec, device: str) -> torch.Tensor:
    strides = strides_in_order_of(spec.local_shape, spec.tensor_meta.stride)
    return torch.empty_strided(spec.local_shape, strides, dtype=spec.dtype, device=device).zero_()
