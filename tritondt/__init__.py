"""tritondt moves a tensor from any layout on a mesh of ranks to any other: fewest bytes, no padding, one exchange.

A name is imported when it is first asked for: `import tritondt` takes milliseconds, and planning imports no torch.
"""

from typing import TYPE_CHECKING

from tritondt import _importing
from tritondt.version import VERSION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tritondt.comm.transports.table import Transport, register_transport
    from tritondt.comm.work import Work
    from tritondt.comm.world import abort, close, set_timeout
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

__version__ = VERSION

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
    "Transport",
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
    "register_transport",
    "set_timeout",
    "to_torch",
    "zeros",
]

# The module of every name, as above.
_NAMES_OF = {
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "tritondt.comm.transports.table": ("Transport", "register_transport"),
    "tritondt.comm.work": ("Work",),
    "tritondt.comm.world": ("abort", "close", "set_timeout"),
    "tritondt.dtensor.distribute": ("distribute_module", "distribute_tensor"),
    "tritondt.dtensor.factories": ("empty", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"),
    "tritondt.dtensor.gradient_norm": ("clip_grad_norm_",),
    "tritondt.dtensor.many": ("redistribute_many",),
    "tritondt.dtensor.prefetch": ("prefetch",),
    "tritondt.dtensor.tensor": ("DTensor",),
    "tritondt.errors": tuple(name for name in __all__ if name.endswith(("Error", "Warning"))),
    "tritondt.interop.with_torch": ("accelerate_torch", "answer_clients", "from_torch", "to_torch"),
    "tritondt.kernels.memory": ("empty_cache",),
    "tritondt.ops.propagation.replication": ("implicit_replication",),
    "tritondt.redistribution.autograd": ("redistribute",),
    "tritondt.redistribution.compile": ("explain",),
    "tritondt.redistribution.implicit": ("explicit_redistribution",),
    "tritondt.sharding.layout": ("Layout",),
    "tritondt.sharding.mesh": ("Mesh", "init_device_mesh"),
    "tritondt.sharding.placement": ("Partial", "Placement", "Replicate", "Shard", "parse_placements"),
    "tritondt.sharding.spec": ("DTensorSpec", "TensorMeta", "compute_local_shape_and_global_offset"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
_PACKAGES = frozenset(
    (
        *("debug", "errors", "experimental", "found_plan", "fsdp", "interop", "kernels", "nccl", "ops", "parallel"),
        *("random", "sharded"),
    )
)

_importing.check_extension()
_importing.tell_torch()

if not TYPE_CHECKING:  # to type checkers, a name that is in no list stays an error

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return _importing.import_quickly(f"{__name__}.{name}")  # which makes it an attribute
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'tritondt' has no attribute {name!r}")
        module = _importing.import_quickly(_MODULE_OF[name])
        found = globals()[name] = getattr(module, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF, *_PACKAGES})
