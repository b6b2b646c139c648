"""Operators that are decided with lengths left open, as those of a batch are in a graph of torch.compile.

With others the graph holds for the lengths at hand. Where a gradient is wanted, backward has to do with open lengths as
well: torch takes no length for known there that forward left open. So these operators are listed, with those of their
backward in mind.
"""

from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import OpenLengthError
from tritondt.ops.propagation.elementwise import is_pointwise
from tritondt.ops.propagation.schema import OutputSpecs
from tritondt.sharding.lengths import are_open
from tritondt.sharding.spec import DTensorSpec

aten = torch.ops.aten
_WITH_GRADIENT = frozenset((
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.t, aten.transpose, aten.permute),
    *(aten.detach, aten.alias, aten.clone, aten._to_copy, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.expand, aten.unbind),
    *(aten.sum, aten.mean, aten._softmax, aten._log_softmax, aten.native_layer_norm, aten._fused_rms_norm),
    *(aten.embedding, aten.native_dropout, aten.new_zeros, aten.new_ones),
    *(aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention),
    aten._scaled_dot_product_efficient_attention,
))  # fmt: skip


def takes_open_lengths(op: OpOverload, args: list[Any]) -> bool:
    """Whether a call is decided with lengths left open; `args` are its distributed tensors."""
    if any(are_open(item._spec.tensor_meta.stride) for item in args):
        return False
    has_gradient = torch.is_grad_enabled() and any(item.requires_grad for item in args)
    return not has_gradient or is_pointwise(op) or op.overloadpacket in _WITH_GRADIENT


def check_open_lengths(outputs: OutputSpecs) -> None:
    """Raises OpenLengthError for results whose strides are left open, products of lengths that no graph has."""
    specs = [outputs] if isinstance(outputs, DTensorSpec) else outputs or ()
    for spec in specs:
        if spec is not None and spec.is_open and are_open(spec.tensor_meta.stride):
            raise OpenLengthError(f"{spec} has strides that a graph leaves open, {spec.tensor_meta.stride}")
