"""Saved distributed tensors: a rank's own part, with the spec as plain values."""

from collections.abc import Callable
from typing import Any

import torch

from tritondt.errors import LocalTensorError
from tritondt.sharding.spec_values import SpecValues, spec_from


def rebuild_dtensor(
    make: Callable[..., Any],
    local: torch.Tensor,
    values: SpecValues,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Any:
    """The distributed tensor of class `make` that was saved; LocalTensorError where another rank's part was loaded."""
    spec = spec_from(values, local.dtype)
    if tuple(local.shape) != spec.local_shape:
        raise LocalTensorError(
            f"rank {spec.mesh.identity.rank} at coordinate {spec.coordinate} loaded a local tensor of shape "
            f"{tuple(local.shape)} for {spec}, which has {spec.local_shape} there; load what this rank saved"
        )
    made = make(local, spec, requires_grad=requires_grad)
    made.__dict__.update(attributes)
    return made
