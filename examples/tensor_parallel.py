"""A step of a plain module, tensor-parallel by a plan: `torchrun --nproc-per-node 4 examples/tensor_parallel.py`."""

import torch
import torch.distributed as dist
from torch import nn

import tritondt as T
from tritondt.debug import CommDebugMode
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Attention(nn.Module):
    """Causal self-attention that knows nothing of ranks."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v, self.out = (nn.Linear(heads * width, heads * width) for _ in range(4))

    def forward(self, x):
        """Mix the positions of x, (batch, length, heads * width)."""
        batch, length, _ = x.shape
        split = (batch, length, self.heads, self.width)
        q, k, v = (project(x).view(split).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


dist.init_process_group("gloo")
mesh = T.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
model = Attention(heads=6, width=16)
column = ColwiseParallel(unit=16, use_local_output=False)  # whole heads: 6 over 4 ranks are 2, 2, 2 and 0
parallelize_module(model, mesh, {"q": column, "k": column, "v": column, "out": RowwiseParallel(unit=16)})

optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
torch.manual_seed(0)
with CommDebugMode() as comm:
    model(torch.randn(2, 10, 96)).square().mean().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
if dist.get_rank() == 0:
    print(comm)  # what moved, by module and kind
    print(model.q.weight)  # a DTensor: (S0(unit=16)) of (96, 96)
dist.destroy_process_group()
