"""Distributed tensors of torch.distributed.tensor as ours, and ours as torch's, on one memory.

Imports torch.distributed.tensor, and is itself imported when one of its functions is called (`registration`).
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError, MixedTensorsError
from tritondt.interop.torch_specs import placements_of_torch, torch_mesh, torch_placements


def from_torch(tensor: torch.Tensor) -> DTensor:
    """Our distributed tensor of torch's; see `tritondt.from_torch`."""
    if not isinstance(tensor, TorchDTensor):
        raise MixedTensorsError(
            f"from_torch was given a {type(tensor).__name__}; allowed is a torch.distributed.tensor.DTensor: "
            "distribute_tensor makes a distributed tensor of a plain one"
        )
    spec: Any = tensor._spec
    found = placements_of_torch(spec)
    if found is None:
        raise LayoutError(
            f"from_torch was given a DTensor of placements {tuple(spec.placements)}; allowed are Shard, Replicate and "
            "Partial: redistribute it to these first"
        )
    local: Any = tensor.to_local()
    if hasattr(local, "wait"):  # torch's AsyncCollectiveTensor
        local = local.wait()
    return DTensor.from_local(
        local, tensor.device_mesh, found[0], shape=tuple(tensor.shape), stride=tensor.stride(), order=found[1]
    )


def to_torch(self: DTensor, device_mesh: DeviceMesh | None = None) -> TorchDTensor:
    """Torch's distributed tensor of ours; see `tritondt.to_torch`."""
    if not isinstance(self, DTensor):
        raise MixedTensorsError(f"to_torch was given a {type(self).__name__}; allowed is a tritondt DTensor")
    spec = self._spec
    mesh, placements = torch_mesh(spec.mesh, device_mesh), torch_placements(spec.layout)
    made: TorchDTensor = TorchDTensor.from_local(
        self.to_local(),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=spec.tensor_meta.stride,
    )
    return made
