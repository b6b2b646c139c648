"""local_map, implicit_replication and register_sharding, by the names of torch.distributed.tensor.experimental.

The names of torch.distributed.tensor.experimental; context_parallel is not among them.
"""

from tritondt.dtensor.local_map import local_map
from tritondt.ops import register_sharding
from tritondt.ops.propagation.replication import implicit_replication

__all__ = ["implicit_replication", "local_map", "register_sharding"]
