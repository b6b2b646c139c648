"""The backend "tritondt" of torch.distributed: Gloo for tensors on the CPU, NCCL for tensors on a GPU.

    import torch.distributed as dist
    import tritondt

    dist.init_process_group("tritondt")

`tritondt._importing.register_backend` makes the name known.
"""

from tritondt.process_group.collectives import TritondtProcessGroup

__all__ = ["TritondtProcessGroup"]
