"""Sharded tensors as torch knows them: their operators, the names that torch.load may take, parts of checkpoints."""

import importlib
from types import ModuleType

import torch

from tritondt._importing import when_imported
from tritondt.sharded.operators import call
from tritondt.sharded.saving import rebuild_sharded_tensor
from tritondt.sharded.tensor import ShardedTensor


def _add_checkpoints(_: ModuleType) -> None:
    # By name: it imports torch.distributed.checkpoint, which takes half a second that most programs need not spend.
    importlib.import_module("tritondt.sharded.checkpoint")


when_imported("torch.distributed.checkpoint.planner_helpers", _add_checkpoints)
ShardedTensor.__torch_function__ = staticmethod(call)  # type: ignore[method-assign]
torch.serialization.add_safe_globals([ShardedTensor, rebuild_sharded_tensor])
