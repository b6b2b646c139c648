"""Inputs and expected results of a case by torch.chunk and addition alone, without the engine.

Elements are small whole numbers, so sums are exact in any order and results can be compared exactly.
"""

from __future__ import annotations

from itertools import product

import torch

from tritondt.cli.bench.cases import Case
from tritondt.sharding.placement import Partial, Placement, Shard

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32),
    )
}


def source_part(case: Case, dtype: torch.dtype, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Part of its term that the rank at `coordinate` holds before."""
    own = tuple(
        index for index, placement in zip(coordinate, case.pair.source, strict=True) if isinstance(placement, Partial)
    )
    return _part(_term(case, dtype, own), case, case.pair.source, coordinate)


def target_part(case: Case, dtype: torch.dtype, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Part of the sum of all terms that the rank at `coordinate` must hold after."""
    sizes = [
        size
        for size, placement in zip(case.mesh_shape, case.pair.source, strict=True)
        if isinstance(placement, Partial)
    ]
    whole = torch.zeros(case.shape, dtype=dtype)
    for number in product(*map(range, sizes)):
        whole += _term(case, dtype, number)
    return _part(whole, case, case.pair.target, coordinate)


def _term(case: Case, dtype: torch.dtype, number: tuple[int, ...]) -> torch.Tensor:
    """Whole tensor of which the ranks at index `number` of the Partial axes hold parts."""
    seed = 0
    for index in number:
        seed = seed * 1009 + index + 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, case.shape, dtype=dtype, generator=generator)


def _part(
    whole: torch.Tensor, case: Case, placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> torch.Tensor:
    part = whole
    for index, num_parts, placement in zip(coordinate, case.mesh_shape, placements, strict=True):
        if isinstance(placement, Shard):
            pieces = part.chunk(num_parts, placement.dim)
            length = part.shape[placement.dim]
            part = pieces[index] if index < len(pieces) else part.narrow(placement.dim, length, 0)
    return part.clone(memory_format=torch.contiguous_format)
