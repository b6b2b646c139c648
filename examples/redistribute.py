"""Rows to columns on a 2x2 mesh, plain tensors in and out: `torchrun --nproc-per-node 4 examples/redistribute.py`."""

import torch
import torch.distributed as dist

import tritondt as T

dist.init_process_group("gloo")
mesh = T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

meta = T.TensorMeta.contiguous((1023, 1000))  # the whole tensor: 1023 rows do not divide
rows = T.DTensorSpec(mesh, (T.Shard(0), T.Shard(0)), meta)  # cut by dp, each piece again by tp
columns = T.DTensorSpec(mesh, (T.Replicate(), T.Shard(1)), meta)

found = T.explain(rows, columns)  # steps, bytes, memory, time: nothing has moved yet
local = torch.randn(rows.local_shape, requires_grad=True)  # this rank's rows: plain tensors in, plain tensors out
part = T.redistribute(local, rows, columns)  # this rank's columns
part.sum().backward()  # the gradient took the way back
if dist.get_rank() == 0:
    print(found)
    print(tuple(local.shape), "->", tuple(part.shape), "and its gradient", tuple(local.grad.shape))
dist.destroy_process_group()
