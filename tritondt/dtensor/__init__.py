"""Distributed tensors: the class, its dispatch, autograd, and the functions that make them."""

from tritondt.dtensor.serialization import loaded
from tritondt.dtensor.tensor import DTensor

__all__ = ["DTensor", "loaded"]
