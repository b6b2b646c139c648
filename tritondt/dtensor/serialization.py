"""What is kept of a distributed tensor in a file: a rank's own part, and as plain values what it is a part of.

Plain values are all that torch.load with weights_only takes; they also outlive the world in which they were written.
"""

from collections.abc import Callable
from typing import Any

import torch

from tritondt.errors import LocalTensorError
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import parse_placements, placements_text
from tritondt.sharding.spec import DTensorSpec, TensorMeta

# Mesh shape, axis names, ranks and device type; placements as text, global shape, strides and cut order.
SpecValues = tuple[
    tuple[tuple[int, ...], tuple[str, ...] | None, tuple[int, ...], str],
    tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]],
]


def spec_values(spec: DTensorSpec) -> SpecValues:
    """The spec as plain values, without its dtype, which the local tensor has."""
    mesh = spec.mesh
    return (
        (mesh.shape, mesh.names, mesh.ranks, mesh.device_type),
        (placements_text(spec.placements), spec.shape, spec.tensor_meta.stride, spec.order),
    )


def spec_from(values: SpecValues, dtype: torch.dtype) -> DTensorSpec:
    """The spec of these values in the calling thread's world; MeshError where it has not enough ranks."""
    (mesh_shape, names, ranks, device_type), (placements, shape, stride, order) = values
    mesh = Mesh(mesh_shape, names, ranks=ranks, device_type=device_type)
    return DTensorSpec(mesh, parse_placements(placements), TensorMeta(shape, stride, dtype), order)


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
