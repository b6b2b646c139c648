"""Raw communicators of NCCL on tensors, for research on collectives, without tritondt's worlds, plans or watch.

from tritondt import nccl

with nccl.bootstrap() as communicator:  # over torch.distributed's default group
    communicator.all_reduce(tensor)

One build supports every NCCL from 2.18 on: a function that the loaded library lacks raises NcclUnsupportedError, with
the version that has it. docs/nccl_guide.md has the table of versions and the rules of lifetimes.
"""

from tritondt._C import NcclCallConfig, NcclCommunicator, NcclError, NcclLibrary, NcclUnsupportedError
from tritondt.comm.nccl.memory import empty, memory_pool
from tritondt.nccl.bootstrap import bootstrap, init, join, library
from tritondt.nccl.calls import Call
from tritondt.nccl.communicator import Communicator
from tritondt.nccl.memory import Buffer, Window
from tritondt.nccl.window_sum import WindowSum

__all__ = [
    "Buffer",
    "Call",
    "Communicator",
    "NcclCallConfig",
    "NcclCommunicator",
    "NcclError",
    "NcclLibrary",
    "NcclUnsupportedError",
    "Window",
    "WindowSum",
    "bootstrap",
    "empty",
    "init",
    "join",
    "library",
    "memory_pool",
]
