"""Distributed tensors: the class, its dispatch, autograd, and the functions that make them."""

from tritondt.dtensor import wiring  # noqa: F401  dispatches DTensor's operators from here on
from tritondt.dtensor.dlpack import refuse_distributed_tensors
from tritondt.dtensor.serialization import rebuild_dtensor
from tritondt.dtensor.tensor import DTensor

refuse_distributed_tensors()

__all__ = ["DTensor", "rebuild_dtensor"]
