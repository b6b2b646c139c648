"""The "tritondt" backend of torch.distributed under DDP: `torchrun --nproc-per-node 2 examples/torch_backend.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tritondt  # noqa: F401  registers the backend's name

dist.init_process_group("tritondt")  # shared memory or sockets on the CPU, NCCL on a GPU
model = DistributedDataParallel(nn.Linear(8, 1))  # or fully_shard, torch.distributed.tensor, ...

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())  # every rank has data of its own
for _ in range(20):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss)
if dist.get_rank() == 0:
    print(f"backend {dist.get_backend()}, mean loss {loss.item() / dist.get_world_size():.4f}")
dist.destroy_process_group()
