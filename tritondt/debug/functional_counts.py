"""Counts of steps by kind, which also answer to the functional collectives by which torch.distributed.tensor counts."""

import re
from typing import Any

from tritondt.redistribution.rows import ROWS_BY_SOURCE, ROWS_BY_TARGET
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard, parse_placements

_PLACEMENTS = re.compile(r"\((?:[^()]|\([^()]*\))*\)")


class CommCounts(dict[Any, int]):
    """Numbers of steps by kind; a functional collective of torch.ops is answered with the axes that it stands for.

    An axis that a step gathers counts for all_gather_into_tensor, one that it reduces into replicas for all_reduce, one
    that it reduces into shards for reduce_scatter_tensor, and one that cuts another dim for shard_dim_alltoall or
    all_to_all_single, of torch.ops.c10d_functional, _c10d_functional or _dtensor. A collective that has not run
    counts 0.

    >>> import torch.distributed._functional_collectives  # it defines the operators
    >>> counts = CommCounts({"(P(sum)) -> (R) in 4 pieces": 1, "(R) in 4 pieces -> (R)": 1, "(S0, R) -> (S1, R)": 2})
    >>> functional = torch.ops.c10d_functional
    >>> counts[functional.all_reduce], counts[functional.all_to_all_single], counts[functional.all_gather_into_tensor]
    (1, 2, 0)
    """

    def __missing__(self, key: Any) -> int:
        name = str(key).rpartition(".")[2]
        name = "shard_dim_alltoall" if name == "all_to_all_single" else name
        return sum(number * collectives_of(kind).count(name) for kind, number in self.items())


def collectives_of(kind: str) -> list[str]:
    """Names of the functional collectives that one step of a kind stands for, one for each axis that changes.

    >>> collectives_of("(S0, P(sum)) -> (R, S1)")
    ['all_gather_into_tensor', 'reduce_scatter_tensor']
    """
    if kind == f"{ROWS_BY_SOURCE} -> {ROWS_BY_TARGET}":
        return ["shard_dim_alltoall"]
    sides = kind.split(" -> ")
    # The second half of an all-reduce, from flat pieces to the whole, counts with the first.
    if len(sides) != 2 or "pieces" in sides[0]:
        return []
    found = [_PLACEMENTS.match(side) for side in sides]
    if found[0] is None or found[1] is None:
        return []
    source, target = (parse_placements(match[0]) for match in found if match is not None)
    return [name for pair in zip(source, target, strict=False) if (name := _collective(*pair)) is not None]


def _collective(source: Placement, target: Placement) -> str | None:
    """Name of the functional collective between two placements of one axis; None where nothing is sent."""
    if isinstance(source, Partial):
        names = {Replicate: "all_reduce", Shard: "reduce_scatter_tensor"}
        return names.get(type(target))
    if isinstance(source, Shard) and source != target:
        return "all_gather_into_tensor" if not isinstance(target, Shard) else "shard_dim_alltoall"
    return None
