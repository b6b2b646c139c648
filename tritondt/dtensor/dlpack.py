"""Export of tensors to other libraries: torch's function in C++ gives a null pointer for a distributed one."""

from functools import wraps
from typing import Any

import torch
from torch.utils import dlpack

from tritondt.dtensor.tensor import DTensor

_export: Any = dlpack.to_dlpack


@wraps(_export)
def to_dlpack(tensor: torch.Tensor, **options: Any) -> Any:
    """torch's `to_dlpack`; PropagationError for a distributed tensor."""
    return tensor.__dlpack__() if isinstance(tensor, DTensor) else _export(tensor, **options)


def refuse_distributed_tensors() -> None:
    """Puts `to_dlpack` in the place of torch's, by both names: that one asks no class of tensors."""
    dlpack.to_dlpack = torch.to_dlpack = to_dlpack  # type: ignore[assignment]
