"""torchtitan's Llama under its own activation checkpointing, sharded by fully_shard of torch or of tritondt."""

import importlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import tritondt  # noqa: F401  registers the backend


def losses_of(fully_shard: Any, recomputation: Any) -> list[float]:
    """Mean losses of the ranks over four steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:  # flex attention has no backward pass on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    recomputation.Config().build(dump_folder="").apply(model)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(4):
        tokens = torch.randint(0, 2048, (dist.get_world_size(), 2, 17), generator=generator)[dist.get_rank()]
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def main() -> None:
    """Trains with full and selective recomputation; over Gloo torch shards, over the other backend this library."""
    backend = os.environ["BACKEND"]
    dist.init_process_group(backend)
    package = "torch.distributed" if backend == "gloo" else "tritondt"
    fully_shard = importlib.import_module(f"{package}.fsdp").fully_shard
    losses = [loss for kind in (FullAC, SelectiveAC) for loss in losses_of(fully_shard, kind)]
    if dist.get_rank() == 0:
        sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
