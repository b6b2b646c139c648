"""A parameter in uneven shards, gathered, resharded, and shared with a distributed tensor.

torchrun --standalone --nproc-per-node 2 examples/sharded_tensor.py
"""

import torch
import torch.distributed as dist
from torch import nn

import tritondt as T
import tritondt.sharded as sharded

dist.init_process_group("gloo")
rank = dist.get_rank()

# Rows as torch.chunk cuts them, and boxes of any sizes: here rank 0 holds two, rank 1 one.
rows = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
boxes = sharded.EnumerableShardingSpec(
    [
        sharded.ShardMetadata([0, 0], [1, 4], "rank:0/cpu"),
        sharded.ShardMetadata([1, 0], [4, 1], "rank:0/cpu"),
        sharded.ShardMetadata([1, 1], [4, 3], "rank:1/cpu"),
    ]
)

linear = nn.Linear(4, 5)
whole = linear.weight.detach().clone() if rank == 0 else None
sharded.shard_parameter(linear, "weight", rows)  # every rank has rank 0's values now
weight = linear.weight.detach().reshard(boxes)  # one exchange: ranks receive what they lack
sizes = [tuple(shard.tensor.shape) for shard in weight.local_shards()]

out = torch.empty(5, 4) if rank == 0 else None
weight.gather(0, out)
if rank == 0:
    assert whole is not None
    assert out is not None
    torch.testing.assert_close(out, whole, rtol=0, atol=0)
    print("rank 0 holds", sizes)

distributed = linear.weight.to_dtensor()  # shares the shards' memory
assert distributed.full_tensor().shape == (5, 4)

T.close()
dist.destroy_process_group()
