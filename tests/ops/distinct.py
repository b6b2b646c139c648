"""Tensors whose elements are all different, so that one in the wrong place is seen."""

from math import prod

import torch


def numbers(*shape: int) -> torch.Tensor:
    """0, 1, 2... in row-major order, in float64."""
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape)
