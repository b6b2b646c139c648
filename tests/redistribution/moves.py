"""Redistributions of one small tensor, and what they must give."""

from typing import Any

import torch

from tritondt.sharding.placement import parse_placements

FULL = torch.arange(77.0).reshape(7, 11)


def to(x: Any, text: str, **options: Any) -> Any:
    return x.redistribute(placements=parse_placements(text), **options)


def equal(x, full):
    torch.testing.assert_close(x.full_tensor(), full, rtol=0, atol=0)
