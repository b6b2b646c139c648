"""Operators that torch, or this library, knows as elementwise."""

from functools import lru_cache

import torch
from torch._ops import OpOverload

# Treat every element alike, though torch 2.13, or an older one, does not tag them.
_UNTAGGED = frozenset({
    *("_add_relu", "_conj_copy", "_masked_scale", "_prelu_kernel", "_prelu_kernel_backward", "_standard_gamma_grad"),
    *("complex", "copy", "elu_backward", "floor_divide", "hardshrink_backward", "hardsigmoid_backward", "hardswish"),
    *("hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_forward"),
    *("log_sigmoid_backward", "polar", "rrelu_with_noise_backward", "rsub", "softplus_backward"),
    *("softshrink_backward", "isin.Tensor_Scalar", "isin.Scalar_Tensor", "masked_fill.Tensor", "fill"),
    "__irshift__",
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
