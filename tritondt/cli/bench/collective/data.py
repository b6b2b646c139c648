"""Inputs and expected results of a collective, computed on each rank by plain torch alone.

Elements are small whole numbers, so that a reduction gives the same bits in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tritondt.cli.bench.collective.case import Case

DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
REDOPS = ("sum", "prod", "max", "min", "avg")

# bfloat16 has all whole numbers up to 256: sums of elements up to 8 are exact on 32 ranks.
_EXACT_SUM = 256
_LARGEST = 8
# A rank's factors of two in a product: 2**15 is the largest power of two in float16.
_MOST_TWOS = 6

_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def given(case: Case, rank: int, device: str = "cpu") -> torch.Tensor:
    """The tensor that `rank` gives: whole numbers, alike wherever they are computed."""
    dtype = DTYPES[case.type]
    generator = torch.Generator().manual_seed(rank + 1)
    draw = partial(torch.randint, size=(case.input_length(rank),), generator=generator)
    if case.redop == "prod":
        found = torch.where(draw(0, case.num_ranks) < _MOST_TWOS, 2, 1)
    else:
        largest = max(1, min(_LARGEST, _EXACT_SUM // case.num_ranks))
        found = draw(0 if dtype is torch.uint8 else -largest, largest + 1, dtype=torch.int16)
    return found.to(dtype).to(device)


def expected(case: Case, rank: int, device: str = "cpu") -> torch.Tensor:
    """The tensor that `rank` must hold afterwards; an empty one where it holds nothing."""
    name = case.kind.name.removesuffix("_v")
    if not case.output_length(rank):
        found = torch.empty(0, dtype=DTYPES[case.type])
    elif case.kind.reduces:
        found = _reduced(case)
        if name == "reduce_scatter":
            found = found.split(case.parts())[rank]
    elif name in ("broadcast", "scatter"):
        found = given(case, case.root)
        if name == "scatter":
            found = found.split(case.parts())[rank]
    elif name == "sendrecv":
        found = given(case, (rank - 1) % case.num_ranks)
    elif name == "all_to_all":
        found = torch.cat([given(case, peer).split(case.sends(peer))[rank] for peer in range(case.num_ranks)])
    else:
        found = torch.cat([given(case, peer) for peer in range(case.num_ranks)])
    return found.to(device)


def _reduced(case: Case) -> torch.Tensor:
    found = given(case, 0)
    for rank in range(1, case.num_ranks):
        found = _PAIRWISE[case.redop](found, given(case, rank))
    return found / case.num_ranks if case.redop == "avg" else found


def num_wrong(case: Case, found: torch.Tensor, correct: torch.Tensor) -> int:
    """Number of elements that differ; all of them where the lengths do.

    Only an average may differ by rounding, by one unit of the last place: some libraries divide the terms first.
    """
    if found.shape != correct.shape or found.dtype != correct.dtype:
        return max(found.numel(), correct.numel(), 1)
    if case.redop != "avg":
        return int((found != correct).sum())
    near = torch.isclose(found, correct, rtol=2 * torch.finfo(correct.dtype).eps * case.num_ranks, atol=0)
    return int((~near).sum())
