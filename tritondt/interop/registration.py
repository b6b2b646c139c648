"""Additions to torch's modules, made as soon as a program imports them."""

import importlib
import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from tritondt._importing import when_imported
from tritondt.dtensor.tensor import DTensor
from tritondt.interop.data_parallel import guard_distributed_data_parallel, guard_fully_shard, guard_replicate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor as TorchDTensor


def _to_torch(self: DTensor, device_mesh: "DeviceMesh | None" = None) -> "TorchDTensor":
    """The torch.distributed.tensor.DTensor that shares this tensor's memory: see tritondt.to_torch."""
    # By name: it imports modules that are importing this tensor's.
    made: TorchDTensor = importlib.import_module("tritondt.interop.with_torch").to_torch(self, device_mesh)
    return made


def _add_checkpoints(_: ModuleType) -> None:
    # By name: it imports torch.distributed.checkpoint, which takes half a second that most programs need not spend.
    importlib.import_module("tritondt.interop.checkpoint")


def _add_state_dicts(module: ModuleType) -> None:
    importlib.import_module("tritondt.interop.state_dicts").add_distributed_tensors(module)


def _add_saving(modeling_utils: ModuleType) -> None:
    """Lets transformers' save_pretrained take a model that was laid out by hand, with parallelize_module or a mesh.

    A model of plain parameters is saved by transformers itself.
    """
    of_plain: Callable[..., Any] = modeling_utils.PreTrainedModel.save_pretrained

    @wraps(of_plain)
    def save(model: nn.Module, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        if not args and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            # By name, and here: it imports the styles, which may be importing this tensor's module now.
            saving = importlib.import_module("tritondt.interop.transformers.saving")
            return saving.save_method(model, save_directory, **options)
        return of_plain(model, save_directory, *args, **options)

    modeling_utils.PreTrainedModel.save_pretrained = save


DTensor.to_torch = _to_torch  # type: ignore[attr-defined]
when_imported("torch.distributed.checkpoint.planner_helpers", _add_checkpoints)
when_imported("torch.distributed._state_dict_utils", _add_state_dicts)
when_imported("torch.distributed.fsdp._fully_shard._fsdp_init", guard_fully_shard)
when_imported("torch.distributed._composable.replicate", guard_replicate)
guard_distributed_data_parallel()
when_imported("transformers.modeling_utils", _add_saving)
