"""Inputs and expected results of a case by torch.chunk and plain arithmetic, without the engine.

Elements are small whole numbers whose sums, products and means are exact in any order: results are compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import product
from math import prod

import torch

from tritondt.cli.bench import DTYPE_NAMES
from tritondt.cli.bench.cases import Case
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Shard

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}

# What two terms are together; a mean is a sum that is divided at the end.
_TOGETHER: Mapping[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def source_part(case: Case, dtype: torch.dtype, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Part of its term that the rank at `coordinate` holds before."""
    own = tuple(
        index for index, placement in zip(coordinate, case.pair.source, strict=True) if isinstance(placement, Partial)
    )
    return _part(_term(case, dtype, own), case, case.pair.source, coordinate)


def target_part(case: Case, dtype: torch.dtype, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Part of what all terms are together that the rank at `coordinate` must hold after."""
    sizes, op = _partial_sizes(case), case.pair.reduce_op
    terms = (_term(case, dtype, number) for number in product(*map(range, sizes)))
    whole = next(terms) if op is None else reduce(_TOGETHER[op], terms)
    return _part(whole / prod(sizes) if op == "avg" else whole, case, case.pair.target, coordinate)


def _partial_sizes(case: Case) -> list[int]:
    """Sizes of the mesh axes on which ranks hold terms."""
    sizes = zip(case.mesh_shape, case.pair.source, strict=True)
    return [size for size, placement in sizes if isinstance(placement, Partial)]


def _term(case: Case, dtype: torch.dtype, number: tuple[int, ...]) -> torch.Tensor:
    """Whole tensor of which the ranks at index `number` of the Partial axes hold parts."""
    seed = 0
    for index in number:
        seed = seed * 1009 + index + 1
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-8, 8, case.shape, dtype=dtype, generator=generator)
    if case.pair.reduce_op == "product":  # of 1, 2 and their negatives
        return (torch.where(found < 0, -1, 1) * (found.remainder(2) + 1)).to(dtype)
    if case.pair.reduce_op == "avg":  # of multiples of their number, whether terms or sums are divided
        smaller = found.div(4, rounding_mode="floor")  # -2 to 1: half precision has their sums
        return smaller * prod(_partial_sizes(case))
    return found


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
