"""The device of tests marked `gpu`: a GPU, or in a dry run (`make gpu-dry`) the CPU with Triton interpreted."""

import contextlib
import os

import torch

from tritondt.kernels.tables import TritonMaker, table_makers

IS_DRY = os.environ.get("TRITONDT_GPU_DRY") == "1"
DEVICE = torch.device("cpu" if IS_DRY else "cuda")


def interpret_tables() -> contextlib.AbstractContextManager[None]:
    """Context in which a dry run's tables are Triton's and not C++'s; one that changes nothing on a GPU."""
    return table_makers.replaced("cpu", TritonMaker()) if IS_DRY else contextlib.nullcontext()
