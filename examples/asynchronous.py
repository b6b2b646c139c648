"""Redistributions under way while something is computed: `torchrun --nproc-per-node 2 examples/asynchronous.py`."""

import torch
import torch.distributed as dist

import tritondt as T

dist.init_process_group("gloo")
mesh = T.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)  # alike on every rank
x, weight = (T.randn(512, 512, device_mesh=mesh, placements=[T.Shard(0)]) for _ in range(2))
other = torch.randn(256, 256)

whole = x.redistribute(placements=[T.Replicate()], async_op=True)  # under way; the first use of `whole` waits
T.prefetch(weight, [T.Replicate()])  # the next redistribution to there finds it on the way, or done
other = other @ other  # meanwhile
gathered = weight.redistribute(placements=[T.Replicate()])  # what was prefetched
half = weight.redistribute(placements=[T.Replicate()], wire_dtype=torch.bfloat16)  # half the bytes of float32

rounding = (half.to_local() - gathered.to_local()).abs().max().item()
if dist.get_rank() == 0:
    print(f"whole {tuple(whole.to_local().shape)}, largest rounding {rounding:.3f}")
T.close()  # a collective call: waits for all that was issued
dist.destroy_process_group()
