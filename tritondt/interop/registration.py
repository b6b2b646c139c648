"""What torch's modules are given as soon as a program imports them."""

import importlib
from types import ModuleType

from tritondt.dtensor.tensor import DTensor
from tritondt.interop.when_imported import when_imported
from tritondt.interop.with_torch import to_torch


def _add_checkpoints(_: ModuleType) -> None:
    # By name: it imports torch.distributed.checkpoint, which takes half a second that most programs need not spend.
    importlib.import_module("tritondt.interop.checkpoint")


def _add_state_dicts(module: ModuleType) -> None:
    importlib.import_module("tritondt.interop.state_dicts").add_distributed_tensors(module)


DTensor.to_torch = to_torch  # type: ignore[attr-defined]
when_imported("torch.distributed.checkpoint.planner_helpers", _add_checkpoints)
when_imported("torch.distributed._state_dict_utils", _add_state_dicts)
