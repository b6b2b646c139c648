"""tritondt moves a tensor from any layout on a mesh of ranks to any other: fewest bytes, no padding, one exchange."""

from types import ModuleType
from typing import TYPE_CHECKING

from tritondt import _importing

_importing.check_extension()

with _importing.without_collections():
    from torch.distributed.device_mesh import DeviceMesh

    import tritondt.interop.registration  # torch's checkpoints and state dicts take distributed tensors
    import tritondt.process_group  # noqa: F401  torch.distributed knows it by its name from here on
    from tritondt.comm.work import Work
    from tritondt.comm.world import abort, close, set_timeout
    from tritondt.comm.world import close as shutdown
    from tritondt.dtensor.distribute import distribute_module, distribute_tensor
    from tritondt.dtensor.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
    from tritondt.dtensor.gradient_norm import clip_grad_norm_
    from tritondt.dtensor.many import redistribute_many
    from tritondt.dtensor.prefetch import prefetch
    from tritondt.dtensor.tensor import DTensor
    from tritondt.errors import (
        ArgumentError,
        CheckpointError,
        ImplicitRedistributionError,
        ImplicitRedistributionWarning,
        LayoutError,
        LocalTensorError,
        MeshError,
        MismatchError,
        MixedTensorsError,
        PeerError,
        PropagationError,
        ReductionError,
        RefusalError,
        TransportError,
        TritondtError,
        WorldError,
    )
    from tritondt.interop.with_torch import accelerate_torch, answer_clients, from_torch, to_torch
    from tritondt.kernels.memory import empty_cache
    from tritondt.ops.propagation.replication import implicit_replication
    from tritondt.redistribution.autograd import redistribute
    from tritondt.redistribution.compile import explain
    from tritondt.redistribution.implicit import explicit_redistribution
    from tritondt.sharding.layout import Layout
    from tritondt.sharding.mesh import Mesh, init_device_mesh
    from tritondt.sharding.placement import Partial, Placement, Replicate, Shard, parse_placements
    from tritondt.sharding.spec import DTensorSpec, TensorMeta, compute_local_shape_and_global_offset

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "ImplicitRedistributionError",
    "ImplicitRedistributionWarning",
    "Layout",
    "LayoutError",
    "LocalTensorError",
    "Mesh",
    "MeshError",
    "MismatchError",
    "MixedTensorsError",
    "Partial",
    "PeerError",
    "Placement",
    "PropagationError",
    "ReductionError",
    "RefusalError",
    "Replicate",
    "Shard",
    "TensorMeta",
    "TransportError",
    "TritondtError",
    "Work",
    "WorldError",
    "abort",
    "accelerate_torch",
    "answer_clients",
    "clip_grad_norm_",
    "close",
    "compute_local_shape_and_global_offset",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "empty_cache",
    "explain",
    "explicit_redistribution",
    "from_torch",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "linspace",
    "logspace",
    "ones",
    "parse_placements",
    "prefetch",
    "rand",
    "randn",
    "redistribute",
    "redistribute_many",
    "set_timeout",
    "shutdown",
    "to_torch",
    "zeros",
]

# Public packages that are imported when they are first asked for: `T.debug.mark_step()` needs no import of its own.
_ON_DEMAND = frozenset(("debug", "experimental", "fsdp", "nccl", "parallel", "random", "sharded"))

if not TYPE_CHECKING:  # to type checkers, a name that is in no list stays an error

    def __getattr__(name: str) -> ModuleType:
        if name in _ON_DEMAND:
            return _importing.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module 'tritondt' has no attribute {name!r}")
