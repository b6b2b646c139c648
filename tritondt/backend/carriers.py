"""What carries tensors of a device by NCCL: a library and the device's streams. A test double puts its own here."""

from collections.abc import Callable

import torch

from tritondt.backend.lane import Carrier
from tritondt.comm.nccl_library import nccl_library
from tritondt.comm.streams import CudaStreams


def _of_gpu(device: torch.device) -> Carrier:
    return Carrier(nccl_library(), CudaStreams(device))


# By the type of device; tensors on others go over Gloo.
carriers: dict[str, Callable[[torch.device], Carrier]] = {"cuda": _of_gpu}
