"""Training steps of torch's own parallelisms on a given process group, in ranks that are processes.

All on torch's default device.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator, device="cpu").to(torch.get_default_device())


def train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = (model(batch(rank, step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def whole(parameter: Any) -> torch.Tensor:
    found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.detach().clone()


def ddp(group: Any, rank: int, hook: Any = None) -> list[torch.Tensor]:
    model = DistributedDataParallel(model_of(rank), process_group=group, bucket_cap_mb=0.0002)
    if hook is not None:
        model.register_comm_hook(group, hook)
    losses = train(model, rank)
    return [*losses, *map(whole, model.parameters())]


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, torch.get_default_device().type)


def fsdp(group: Any, rank: int) -> list[torch.Tensor]:
    return fsdp_on(mesh_of(group), rank)


def fsdp_on(mesh: DeviceMesh, rank: int) -> list[torch.Tensor]:
    """Sharded over a mesh of one axis, or over the second of two and replicated over the first."""
    model = model_of()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, rank)
    return [*losses, *map(whole, model.parameters())]


def tensor_parallel(group: Any, rank: int) -> list[torch.Tensor]:
    mesh, model = mesh_of(group), model_of()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(model, 0)
    return [*map(whole, losses), *map(whole, model.parameters())]


def redistributions(group: Any, rank: int) -> list[torch.Tensor]:
    mesh = mesh_of(group)
    x: Any = distribute_tensor(torch.arange(7.0 * 6).reshape(7, 6), mesh, [Shard(0)])
    found = [
        x.redistribute(mesh, [Shard(1)]),
        x.redistribute(mesh, [Replicate()]),
        (x @ x.T).redistribute(mesh, [Shard(1)]),
    ]
    return [tensor.to_local() for tensor in found]


def half_precision_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gradients travel as bfloat16: works with what a future of the backend gives, in a callback."""
    sent = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future: Any = dist.all_reduce(sent, group=group, async_op=True).get_future()
    done: torch.futures.Future[torch.Tensor] = future.then(lambda sent: bucket.buffer().copy_(sent.value()[0]))
    return done


def ddp_with_a_hook(group: Any, rank: int) -> list[torch.Tensor]:
    return ddp(group, rank, half_precision_hook)
