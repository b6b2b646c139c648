"""tritondt moves a tensor from any layout on a mesh of ranks to any other: fewest bytes, no padding, one exchange."""

from torch.distributed.device_mesh import DeviceMesh

from tritondt.autograd import redistribute
from tritondt.errors import (
    LayoutError,
    LocalTensorError,
    MeshError,
    MismatchError,
    PeerError,
    ReductionError,
    TransportError,
    TritondtError,
    WorldError,
)
from tritondt.execute import explain
from tritondt.layout import Layout
from tritondt.mesh import Mesh, init_device_mesh
from tritondt.placement import Partial, Placement, Replicate, Shard, parse_placements
from tritondt.spec import DTensorSpec, TensorMeta, compute_local_shape_and_global_offset

__version__ = "0.1.0"

__all__ = [
    "DTensorSpec",
    "DeviceMesh",
    "Layout",
    "LayoutError",
    "LocalTensorError",
    "Mesh",
    "MeshError",
    "MismatchError",
    "Partial",
    "PeerError",
    "Placement",
    "ReductionError",
    "Replicate",
    "Shard",
    "TensorMeta",
    "TransportError",
    "TritondtError",
    "WorldError",
    "compute_local_shape_and_global_offset",
    "explain",
    "init_device_mesh",
    "parse_placements",
    "redistribute",
]
