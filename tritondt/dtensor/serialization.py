"""Saved distributed tensors: a rank's own part, with the spec as plain values."""

from collections.abc import Callable
from typing import Any

import torch

from tritondt.errors import LocalTensorError
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec
from tritondt.sharding.spec_values import SpecValues, spec_from


def holds_equally(spec: DTensorSpec, coordinate: tuple[int, ...]) -> bool:
    """Whether the calling rank and the one at `coordinate` differ at most along axes of replicas."""
    own = spec.coordinate
    return own is not None and all(
        ours == theirs or placement == Replicate()
        for ours, theirs, placement in zip(own, coordinate, spec.placements, strict=True)
    )


def rebuild_dtensor(
    make: Callable[..., Any],
    local: torch.Tensor,
    values: SpecValues,
    requires_grad: bool,
    attributes: dict[str, Any],
    coordinate: tuple[int, ...] | None = None,
) -> Any:
    """The distributed tensor of class `make` that was saved; LocalTensorError where another rank's part was loaded.

    `coordinate` is that of the rank that saved; files from before 2026-11-22 have none, and only shapes tell there.
    """
    spec = spec_from(values, local.dtype)
    if coordinate is not None and not holds_equally(spec, coordinate):
        raise LocalTensorError(
            f"rank {spec.mesh.identity.rank} at coordinate {spec.coordinate} loaded the part that coordinate "
            f"{coordinate} of {spec} saved; load what this rank saved"
        )
    if tuple(local.shape) != spec.local_shape:
        raise LocalTensorError(
            f"rank {spec.mesh.identity.rank} at coordinate {spec.coordinate} loaded a local tensor of shape "
            f"{tuple(local.shape)} for {spec}, which has {spec.local_shape} there; load what this rank saved"
        )
    made = make(local, spec, requires_grad=requires_grad)
    made.__dict__.update(attributes)
    return made
