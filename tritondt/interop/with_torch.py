"""Public functions between torch.distributed.tensor and tritondt, which import the former when they are called."""

import importlib
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.tensor import DTensor
from tritondt.errors.arguments import checked

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

    from tritondt.interop.acceleration import Acceleration
    from tritondt.interop.clients import Answers


@checked
def from_torch(tensor: torch.Tensor) -> DTensor:
    """The distributed tensor that shares the memory of a torch.distributed.tensor.DTensor; gradients go through.

    Uneven shards and cut orders are kept; _StridedShard becomes the cut order that it stands for, where lengths divide.
    Not a collective call. Raises MixedTensorsError for another tensor, and LayoutError for placements that only torch
    has, as masked terms.

    >>> import torch.distributed as dist
    >>> from torch.distributed.tensor import Shard, ones
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = from_torch(ones(4, device_mesh=DeviceMesh("cpu", [0]), placements=[Shard(0)]))
    >>> weight.placements, weight.to_local().tolist()
    ((S0,), [1.0, 1.0, 1.0, 1.0])
    >>> dist.destroy_process_group()
    """
    made: DTensor = importlib.import_module("tritondt.interop.torch_dtensor").from_torch(tensor)
    return made


@checked
def to_torch(tensor: DTensor, device_mesh: DeviceMesh | None = None) -> "TorchDTensor":
    """The torch.distributed.tensor.DTensor that shares a tensor's memory; gradients go through. Also x.to_torch().

    `device_mesh` is a DeviceMesh of the tensor's ranks and shape, by default the one that the tensor was made on. Not a
    collective call. Axes that cut a dim from right to left become _StridedShard where lengths divide. Raises
    LayoutError, on all ranks alike, for layouts that torch cannot hold: any cut other than torch.chunk's; MeshError
    where there is no DeviceMesh, and MixedTensorsError for another tensor.

    >>> import torch.distributed as dist
    >>> import tritondt as T
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = T.ones(4, device_mesh=DeviceMesh("cpu", [0]), placements=[T.Shard(0)])
    >>> to_torch(weight).placements
    (Shard(dim=0),)
    >>> dist.destroy_process_group()
    """
    made: TorchDTensor = importlib.import_module("tritondt.interop.torch_dtensor").to_torch(tensor, device_mesh)
    return made


def accelerate_torch() -> "Acceleration":
    """Runs the redistributions of torch's own DTensor on this engine, in this process: fewest bytes, one exchange each.

    All ranks must call it; it sends nothing. It lasts until the end of a `with` block, or until `undo()` of the result.
    It covers explicit redistributions, those of operators, and those of gradients. Results equal torch's, except for
    the order in which terms of a float sum are added. An asynchronous one is complete when it returns. Placements that
    only torch has (masked terms, _StridedShard of other lengths), new terms and traced graphs stay with torch.

    >>> import torch.distributed as dist
    >>> from torch.distributed.tensor import Replicate, Shard, ones
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = ones(4, 2, device_mesh=DeviceMesh("cpu", [0]), placements=[Shard(0)])
    >>> with accelerate_torch():
    ...     x.redistribute(placements=[Replicate()]).to_local().shape
    torch.Size([4, 2])
    >>> dist.destroy_process_group()
    """
    found: Acceleration = importlib.import_module("tritondt.interop.acceleration").Acceleration()
    return found


@checked
def answer_clients(*packages: str) -> "Answers":
    """Makes isinstance(x, torch.distributed.tensor.DTensor) true for our tensors in the named packages, in this
    process.

    It serves packages that test isinstance(x, DTensor) and then call full_tensor, to_local, redistribute, placements or
    device_mesh, which our tensors have too; their DTensor.from_local makes tensors of ours. All other modules, torch's
    own included, tell the classes apart. It holds until the end of a `with` block, or until `undo()` of the result. Not
    collective. Raises ArgumentError for torch itself. docs/clients.md lists packages.

    >>> with answer_clients("trl", "pytorch_optimizer") as answers:
    ...     pass
    """
    found: Answers = importlib.import_module("tritondt.interop.clients").Answers(packages)
    return found
