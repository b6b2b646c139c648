"""Plan of loading a checkpoint: all of it, or nothing."""

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from tritondt.errors import CheckpointError

_MAX_NAMED = 5


class WholeLoadPlanner(DefaultLoadPlanner):
    """torch's planner, which refuses entries that a state asks for and the checkpoint lacks, and the reverse, too.

    A fresh optimizer has no moments: torch's would leave those of the checkpoint where they are, and training would go
    on from others.
    """

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks; CheckpointError where nobody reads an entry that holds anything."""
        assert self.metadata is not None, "torch sets a planner up before it asks for plans"
        read = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        left = [
            name
            for name, entry in self.metadata.state_dict_metadata.items()
            if name not in read and not (isinstance(entry, TensorStorageMetadata) and 0 in torch.Size(entry.size))
        ]
        if left:
            more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
            raise CheckpointError(
                f"the checkpoint has entries that the state lacks: {', '.join(sorted(left)[:_MAX_NAMED])}{more}; "
                "give a state with all of them (for an optimizer, get_state_dict of "
                "torch.distributed.checkpoint.state_dict makes one), or load with is_partial=True"
            )
        return super().create_global_plan(global_plan)
