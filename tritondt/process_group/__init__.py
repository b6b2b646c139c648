"""The backend "tritondt" of torch.distributed: shared memory or sockets on the CPU, NCCL on a GPU.

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
