"""save_pretrained of a model of peft that is laid out: adapters are small, and are written whole by one rank."""

import os
from typing import Any

import torch

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import CheckpointError
from tritondt.interop.transformers.together import together
from tritondt.sharding.mesh import Mesh

_IGNORED = ("state_dict", "is_main_process", "save_embedding_layers")


def save_adapters_method(mesh: Mesh) -> Any:
    """The method `save_pretrained` of a model of peft that is laid out over a mesh."""

    def save_pretrained(model: Any, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Writes adapters as peft does: each is gathered, and the first rank writes. A collective call.

        Raises CheckpointError, on all ranks, where that rank cannot write, and for options of peft's.
        """
        given = [name for name, value in options.items() if value not in (None, False) and name not in _IGNORED]
        if given:
            raise CheckpointError(
                f"save_pretrained of a parallelized {type(model).__name__} was given {', '.join(given)}; allowed is "
                "the folder alone"
            )
        adapters = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        with torch.no_grad():
            whole = {
                name: value.full_tensor().to("cpu") if isinstance(value, DTensor) else value
                for name, value in model.state_dict().items()
                if name in adapters or ".lora_" in name
            }
        is_first = mesh.coordinate is not None and not any(mesh.coordinate)

        def write() -> None:
            if is_first:
                type(model).save_pretrained(model, save_directory, state_dict=whole, save_embedding_layers=False)

        together(mesh, write, "writing adapters")

    return save_pretrained
