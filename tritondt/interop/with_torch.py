"""Public functions between torch.distributed.tensor and tritondt, which import the former when they are called."""

import importlib
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

    from tritondt.interop.acceleration import Acceleration


def from_torch(tensor: torch.Tensor) -> DTensor:
    """The distributed tensor that shares the memory of a torch.distributed.tensor.DTensor; gradients go through.

    Uneven shards and cut orders are taken over; _StridedShard as the order that it stands for, where lengths divide.
    Not a collective call. Raises MixedTensorsError for another tensor, and LayoutError for placements that only torch
    has, as masked terms.

        weight = T.from_torch(torch_weight)
    """
    made: DTensor = importlib.import_module("tritondt.interop.torch_dtensor").from_torch(tensor)
    return made


def to_torch(tensor: DTensor, device_mesh: DeviceMesh | None = None) -> "TorchDTensor":
    """The torch.distributed.tensor.DTensor that shares a tensor's memory; gradients go through. Also x.to_torch().

    `device_mesh` is a DeviceMesh of the tensor's ranks and shape, by default the one that the tensor was made on. Not a
    collective call. Axes that cut a dim from right to left become _StridedShard where lengths divide. Raises
    LayoutError, on all ranks alike, for what torch cannot hold: any other cut than torch.chunk's; MeshError where there
    is no DeviceMesh, and MixedTensorsError for another tensor.

        torch_weight = weight.to_torch()
    """
    made: TorchDTensor = importlib.import_module("tritondt.interop.torch_dtensor").to_torch(tensor, device_mesh)
    return made


def accelerate_torch() -> "Acceleration":
    """Redistributions of torch's own DTensor on our engine, in this process: fewest bytes and one exchange each.

    All ranks call it, though it sends nothing. It holds until the end of a `with` block, or until `undo()` of what it
    returns. Explicit redistributions, those that operators make, and gradients are all meant; results are torch's, sums
    of floats but for the order in which terms are added. An asynchronous one is complete when it returns. Placements
    that only torch has (masked terms, _StridedShard of other lengths), new terms and traced graphs stay with torch.

        with T.accelerate_torch():
            y = x.redistribute(placements=[Shard(1)])  # x is a torch.distributed.tensor.DTensor
    """
    found: Acceleration = importlib.import_module("tritondt.interop.acceleration").Acceleration()
    return found
