"""A backend of torch.distributed, "tritondt": Gloo for tensors on the CPU, NCCL called by us for those on a GPU.

import torch.distributed as dist
import tritondt

dist.init_process_group("tritondt")
"""

import torch.distributed as dist

from tritondt.backend.group import NAME
from tritondt.backend.process_group import TritondtProcessGroup

dist.Backend.register_backend(NAME, TritondtProcessGroup, extended_api=True, devices=["cpu", "cuda"])

__all__ = ["TritondtProcessGroup"]
