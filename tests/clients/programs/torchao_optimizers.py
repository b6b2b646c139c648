"""torchao's AdamW of 8 bits on a model that fully_shard of torch or of tritondt has sharded."""

import importlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchao.optim import AdamW8bit

import tritondt


def losses_of(fully_shard: Any, kind: Any) -> list[float]:
    """Mean losses of the ranks over four steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = kind(model.parameters(), lr=1e-3)
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for _ in range(4):
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def main() -> None:
    """Trains; over Gloo torch shards, over the other backend this library."""
    backend = os.environ["BACKEND"]
    dist.init_process_group(backend)
    package = "torch.distributed" if backend == "gloo" else "tritondt"
    if package == "tritondt":
        tritondt.answer_clients("torchao")
    fully_shard = importlib.import_module(f"{package}.fsdp").fully_shard
    losses = [loss for kind in (AdamW8bit,) for loss in losses_of(fully_shard, kind)]
    if dist.get_rank() == 0:
        sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
