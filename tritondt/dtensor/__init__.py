"""Distributed tensors: the class, its dispatch, autograd, and the functions that make them."""

from tritondt.dtensor.serialization import rebuild_dtensor
from tritondt.dtensor.tensor import DTensor

__all__ = ["DTensor", "rebuild_dtensor"]
