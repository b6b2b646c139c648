"""The same tensor as ours and as torch's, with the layout that it goes to, in sizes from small to large."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed.tensor as torch_tensor

import tritondt as T

# A tensor of one side, and the placements that it goes to.
Move = tuple[Any, list[Any]]


def quiet_rank() -> None:
    """Prepares a rank: one thread, and none of torch's advice among the figures."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def shape_of(number: int, count: int, smallest: int, largest: int, multiple: int) -> tuple[int, int]:
    """Shape of one of `count` float32 tensors between two sizes in bytes, each length a multiple of `multiple`.

    As many are small as large on a logarithmic scale.
    """
    size = smallest * (largest / smallest) ** (number / max(1, count - 1)) / 4
    rows = max(multiple, round(size**0.5 / multiple) * multiple)
    return rows, max(multiple, int(size / rows / multiple) * multiple)


def moves_of(mesh: T.DeviceMesh, pair: str, shape: tuple[int, int], seed: int) -> tuple[Move, Move]:
    """Ours and torch's move of one tensor on one memory; `pair` is such as "S0 R"."""
    source, target = pair.split()
    full = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).float()
    local = full if source == "P" else T.distribute_tensor(full, mesh, [_placement(T, source)]).to_local()
    ours = T.DTensor.from_local(local, mesh, [_placement(T, source)])
    theirs = torch_tensor.DTensor.from_local(local, mesh, [_placement(torch_tensor, source)])
    return (ours, [_placement(T, target)]), (theirs, [_placement(torch_tensor, target)])


def _placement(of: Any, text: str) -> Any:
    return of.Replicate() if text == "R" else of.Partial() if text == "P" else of.Shard(int(text[1]))
