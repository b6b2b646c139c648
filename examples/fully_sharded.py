"""Fully sharded over tensor parallel: 9 hidden features on 2 x 2 ranks, trained, saved and read back.

torchrun --nproc-per-node 4 examples/fully_sharded.py
"""

import torch
import torch.distributed as dist
from torch import nn

import tritondt as T
from tritondt.fsdp import fully_shard
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(2)])

# The tensor axis first, then the data axis: layers first, the model that has them last.
parallelize_module(model, mesh["tp"], {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()})
for layer in model:
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])

optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
torch.manual_seed(mesh["dp"].get_local_rank())  # ranks of one tensor-parallel group have the same part of the batch
for _ in range(3):
    loss = (model(torch.randn(4, 6)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

state = model.state_dict()
whole = {name: value.full_tensor() for name, value in state.items()}
model.load_state_dict(state)
if dist.get_rank() == 0:
    for name, value in state.items():
        print(name, value.placements, tuple(value.to_local().shape), "of", tuple(whole[name].shape))
T.close()
dist.destroy_process_group()
