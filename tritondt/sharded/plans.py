"""Plans that say how the parameters and the outputs of a module are sharded, and who shards a submodule otherwise."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from tritondt.errors.arguments import checked_class
from tritondt.sharded.specs import ShardingSpec


class Sharder(ABC):
    """Base of classes that shard a whole submodule, in ways that a spec cannot express.

    >>> class Frozen(Sharder):
    ...     def shard(self, module):
    ...         return module.requires_grad_(False)
    >>> next(Frozen().shard(nn.Linear(1, 1)).parameters()).requires_grad
    False
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Returns the replacement of `module`, which may be `module` itself."""


@checked_class
@dataclass
class ShardingPlan:
    """Plan of a module, by paths within it, "" for the module itself.

    `plan` gives a spec to a parameter ("fc1.weight") or a Sharder to a submodule ("fc1"). `output_plan` gives a spec to
    a module whose output is resharded, `return_local_tensor` lists modules whose sharded output becomes this rank's
    shard. `shard_module` looks at the values, on all ranks, so that a rank whose plan is wrong tells the others.

    >>> from tritondt.sharded import ChunkShardingSpec
    >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> ShardingPlan({"fc1.weight": rows}, output_plan={"fc1": rows}, return_local_tensor=["fc1"]).return_local_tensor
    ['fc1']
    """

    plan: dict[str, "ShardingSpec | Sharder"]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Base of classes that make a plan for a module.

    >>> class Nothing(ShardingPlanner):
    ...     def build_plan(self, module):
    ...         return ShardingPlan({})
    >>> Nothing().build_plan(nn.Linear(1, 1)).plan
    {}
    """

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Plan for a module."""
