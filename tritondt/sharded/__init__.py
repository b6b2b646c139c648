"""Sharded tensors: the API of torch.distributed._shard, on the exchange that moves distributed tensors.

    import tritondt.sharded as sharded
    spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])

A shard is any box of the tensor, and a rank holds any number of shards.
"""

import tritondt.sharded.registration  # noqa: F401  operators, torch.load and torch's checkpoints take sharded tensors
from tritondt.sharded.agreement import ShardingMismatchError
from tritondt.sharded.construct import (
    init_from_local_shards,
    init_from_local_shards_and_global_metadata,
    init_from_local_tensor,
    shard_tensor,
)
from tritondt.sharded.factories import empty, full, ones, rand, randn, zeros
from tritondt.sharded.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from tritondt.sharded.modules import (
    collect_local_shard,
    pre_load_state_dict_hook,
    reshard_output,
    shard_module,
    shard_parameter,
    state_dict_hook,
)
from tritondt.sharded.plans import Sharder, ShardingPlan, ShardingPlanner
from tritondt.sharded.registries import custom_sharded_op_impl, custom_sharding_spec_op
from tritondt.sharded.saving import load_with_process_group
from tritondt.sharded.specs import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
)
from tritondt.sharded.tensor import ShardedTensor

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingMismatchError",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "collect_local_shard",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "full",
    "init_from_local_shards",
    "init_from_local_shards_and_global_metadata",
    "init_from_local_tensor",
    "load_with_process_group",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "reshard_output",
    "shard_module",
    "shard_parameter",
    "shard_tensor",
    "state_dict_hook",
    "zeros",
]
