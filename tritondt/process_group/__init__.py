"""The backend "tritondt" of torch.distributed: shared memory or sockets on the CPU, NCCL on a GPU.

    import torch.distributed as dist
    import tritondt

    dist.init_process_group("tritondt")

`tritondt._importing.register_backend` makes the name known.
"""

from tritondt.process_group.collectives import TritondtProcessGroup

__all__ = ["TritondtProcessGroup"]
