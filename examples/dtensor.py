"""Distributed tensors: operators, gradients and redistribution; `torchrun --nproc-per-node 2 examples/dtensor.py`."""

import torch
import torch.distributed as dist

import tritondt as T

dist.init_process_group("gloo")
mesh = T.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)  # alike on every rank
x = T.randn(8, 64, device_mesh=mesh)  # Replicate: the whole of it on every rank
weight = T.distribute_tensor(torch.randn(1001, 64, requires_grad=True), mesh, [T.Shard(0)])
y = x @ weight.t()  # every rank computes its own columns; nothing is sent
y.square().mean().backward()  # weight.grad is cut by rows, too
rows = y.redistribute(placements=[T.Shard(0)])  # columns to rows, in one exchange
if dist.get_rank() == 0:
    print(rows.to_local().shape, weight.grad.placements)
dist.destroy_process_group()
