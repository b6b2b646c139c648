"""Construction of the outer tensor: global shape, stride and dtype, and no memory of its own."""

from collections.abc import Callable
from typing import Any

import torch

from tritondt.sharding.spec import DTensorSpec

# (class, local tensor, spec, requires_grad): torch's own constructor for such tensors reads `spec.tensor_meta` and sets
# `_local_tensor` and `_spec`; it takes 1.0 us where _make_wrapper_subclass with the attributes takes 2.2.
Construct = Callable[..., Any]

_LAZY = torch._C._additional_keys_to_prop_for_wrapper_tensors


def construct_at_start(
    tensor_class: type[torch.Tensor], local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool
) -> Any:
    """An outer tensor at offset 0, by the constructor that every supported torch has.

    Torch's own constructor takes the offset of the local tensor, which is this rank's and this layout's alone. Of an
    outer tensor behind its start, data_ptr() is no null pointer, so it looks as if it had memory; and a view and its
    forward derivative, which torch wants to lie alike, may be cut differently.
    """
    meta = spec.tensor_meta
    made: Any = torch.Tensor._make_wrapper_subclass(
        tensor_class,
        meta.shape,
        strides=meta.stride,
        dtype=meta.dtype,
        device=local.device,
        layout=local.layout,
        requires_grad=requires_grad,
        # Dispatch resolves a lazy conjugation or sign of the outer tensor; kernels of local ones would not see theirs.
        _extra_dispatch_keys=_LAZY & torch._C._dispatch_keys(local),
    )
    made._local_tensor, made._spec = local, spec
    return made


construct: Construct = getattr(torch.Tensor, "_dtensor__new__", construct_at_start)
