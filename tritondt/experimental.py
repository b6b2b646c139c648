"""local_map, implicit_replication and register_sharding, by the names of torch.distributed.tensor.experimental.

context_parallel is not among them. ExplicitRedistributionContext is torch's name of `explicit_redistribution`.
"""

from tritondt.dtensor.local_map import local_map
from tritondt.ops import register_sharding
from tritondt.ops.propagation.replication import implicit_replication
from tritondt.redistribution.implicit import explicit_redistribution as ExplicitRedistributionContext

__all__ = ["ExplicitRedistributionContext", "implicit_replication", "local_map", "register_sharding"]
