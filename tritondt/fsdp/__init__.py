"""Fully sharded data parallelism, alone or over tensor-parallel modules. Parameters are distributed tensors on the mesh
of data and tensor axes, gathered where a module runs.

    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
"""

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from tritondt.fsdp.extensions import DTensorExtensions, register_fsdp_extensions
from tritondt.fsdp.fully_shard import fully_shard
from tritondt.fsdp.host_mesh import init_host_mesh
from tritondt.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method

__all__ = [
    "DTensorExtensions",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "init_host_mesh",
    "register_fsdp_extensions",
    "register_fsdp_forward_method",
]
