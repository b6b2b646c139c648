"""The backend "tritondt" of torch.distributed: Gloo for tensors on the CPU, NCCL for tensors on a GPU.

import torch.distributed as dist
import tritondt

dist.init_process_group("tritondt")
"""

import torch.distributed as dist

from tritondt.comm.store import starts
from tritondt.process_group.collectives import TritondtProcessGroup
from tritondt.process_group.group import NAME

dist.Backend.register_backend(NAME, TritondtProcessGroup, extended_api=True, devices=["cpu", "cuda"])
starts.register()

__all__ = ["TritondtProcessGroup"]
