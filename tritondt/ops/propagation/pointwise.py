"""Elementwise operators with broadcasting.

A dim may be sharded wherever an argument is; a Partial passes through what is linear in it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.schema import AxisStrategy, OpSchema
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten

# Of sums and means: every term on its own. The others in the line must be replicated, or numbers.
_LINEAR_IN_FIRST: frozenset[OpOverload] = frozenset({
    *(aten.neg.default, aten.neg_.default),
    *(aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar),
    *(aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar),
    *(aten.real.default, aten.imag.default, aten.positive.default, aten.conj_physical.default),
})  # fmt: skip
_LINEAR_IN_SECOND: frozenset[OpOverload] = frozenset({aten.mul.Tensor})
# All together: terms of the one add to terms of the other.
_ADDITIVE: frozenset[OpOverload] = frozenset({
    *(aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor),
})  # fmt: skip
_TOGETHER: Mapping[OpOverload, tuple[tuple[int, ...], ...]] = {
    aten.where.self: ((1, 2),),
    **dict.fromkeys((aten.lerp.Scalar, aten.lerp_.Scalar, aten.complex.default), ((0, 1),)),
}

# Treat every element alike, though torch 2.13, or an older one, does not tag them.
_UNTAGGED = frozenset({
    *("_add_relu", "_conj_copy", "_masked_scale", "_prelu_kernel", "_prelu_kernel_backward", "_standard_gamma_grad"),
    *("complex", "copy", "elu_backward", "floor_divide", "hardshrink_backward", "hardsigmoid_backward", "hardswish"),
    *("hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_forward"),
    *("log_sigmoid_backward", "polar", "rrelu_with_noise_backward", "rsub", "softplus_backward"),
    *("softshrink_backward", "isin.Tensor_Scalar", "isin.Scalar_Tensor", "masked_fill.Tensor", "fill"),
    # Tagged from 2.11 and 2.12 on.
    *("ldexp", "ldexp_", "leaky_relu", "leaky_relu_"),
})  # fmt: skip


@lru_cache(maxsize=4096)
def is_pointwise(op: OpOverload) -> bool:
    """Whether torch tags `op` or its functional form as pointwise, or we know that `op` is.

    torch 2.13 leaves the tag off 25 of the former, masked_fill_ among them.
    """
    if torch.Tag.pointwise in op.tags:
        return True
    namespace, _, name = op._schema.name.partition("::")
    if namespace == "aten" and not _UNTAGGED.isdisjoint((name, f"{name}.{op._overloadname}")):
        return True
    if not name.endswith("_") or name.endswith("__"):
        return False
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    functional = getattr(packet, op._overloadname, None)
    return isinstance(functional, OpOverload) and torch.Tag.pointwise in functional.tags


def broadcast_shape(specs: Sequence[DTensorSpec]) -> tuple[int, ...]:
    """The shape that tensors of these specs broadcast to."""
    return tuple(torch.broadcast_shapes(*(spec.shape for spec in specs)))


def elementwise_strategies(specs: Sequence[DTensorSpec], num_outputs: int = 1) -> list[AxisStrategy]:
    """One strategy a dim of the broadcast shape, and the replicated one last."""
    shape = broadcast_shape(specs)
    found = []
    for dim, length in enumerate(shape):
        inputs = tuple(broadcast_placement(spec, dim - len(shape), length) for spec in specs)
        if any(isinstance(placement, Shard) for placement in inputs):
            found.append(AxisStrategy(inputs, (Shard(dim),) * num_outputs))
    found.append(AxisStrategy((Replicate(),) * len(specs), (Replicate(),) * num_outputs))
    return found


def broadcast_placement(spec: DTensorSpec, from_end: int, length: int) -> Placement:
    """Shard of the dim at `from_end`, a negative number; Replicate where the tensor is broadcast along that dim."""
    dim = from_end + spec.ndim
    return Shard(dim) if dim >= 0 and spec.shape[dim] == length else Replicate()


def partial_ops(specs: Sequence[DTensorSpec]) -> list[Partial]:
    """The sums and means that any argument holds terms of."""
    found = (p for spec in specs for p in spec.placements if isinstance(p, Partial) and p.reduce_op in ("sum", "avg"))
    return list(dict.fromkeys(found))


def pointwise_strategies(
    specs: Sequence[DTensorSpec], *, linear_in: Sequence[Sequence[int]] = (), num_outputs: int = 1
) -> list[AxisStrategy]:
    """Strategies of an elementwise operator; `linear_in` lists groups of arguments that may be Partial together."""
    found = elementwise_strategies(specs, num_outputs)
    for partial in partial_ops(specs):
        for group in linear_in:
            inputs = tuple(partial if place in group else Replicate() for place in range(len(specs)))
            found.append(AxisStrategy(inputs, (partial,) * num_outputs))
    return found


def linear_groups(op: OpOverload, num_tensors: int) -> list[Sequence[int]]:
    """Groups of arguments of `op` that may be Partial together, the result being Partial alike."""
    groups: list[Sequence[int]] = list(_TOGETHER.get(op, ()))
    if op._schema.name.endswith("_backward") and op._schema.arguments[0].name.startswith("grad"):
        groups.append((0,))
    # A number that is added belongs to one term only: with a single tensor nothing passes through.
    if op in _ADDITIVE and num_tensors > 1:
        groups.append(range(num_tensors))
    if op in _LINEAR_IN_FIRST:
        groups.append((0,))
    if op in _LINEAR_IN_SECOND and num_tensors > 1:
        groups.append((1,))
    return groups


def pointwise_strategy(schema: OpSchema) -> list[AxisStrategy]:
    """The strategies that `propagator` uses for every pointwise operator."""
    specs = schema.args_spec
    groups = linear_groups(schema.op, len(specs))
    return pointwise_strategies(specs, linear_in=groups, num_outputs=len(schema.op._schema.returns))
