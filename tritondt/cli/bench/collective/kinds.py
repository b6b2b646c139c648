"""Collectives as records: what is divided among the ranks, and which bandwidth a time means.

The factors are those of nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is size over time, and bus bandwidth is
that times the factor, so that it can be compared with a link's speed whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _whole(_: int) -> float:
    return 1.0


def _others_share(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _twice_the_others_share(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


@dataclass(frozen=True)
class Kind:
    """One collective; `divides` says that the size is that of all ranks' parts together.

    `has_uneven_parts` marks the form with a length for each rank, `has_in_place` that the result may lie where the
    input lay (nccl-tests leaves all-to-all and send-receive unchecked there; here they are not run).
    """

    name: str
    bus_factor: Callable[[int], float]
    divides: bool = False
    reduces: bool = False
    has_root: bool = False
    has_uneven_parts: bool = False
    has_in_place: bool = True

    def bandwidths(self, size: int, num_ranks: int, seconds: float) -> tuple[float, float]:
        """Algorithm and bus bandwidth in units of 1e9 bytes a second.

        >>> KINDS["all_reduce"].bandwidths(1_000_000_000, 4, 0.5)
        (2.0, 3.0)
        """
        algorithm = size / seconds / 1e9
        return algorithm, algorithm * self.bus_factor(num_ranks)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("all_reduce", _twice_the_others_share, reduces=True),
        Kind("all_gather", _others_share, divides=True),
        Kind("all_gather_v", _others_share, divides=True, has_uneven_parts=True),
        Kind("reduce_scatter", _others_share, divides=True, reduces=True),
        Kind("reduce_scatter_v", _others_share, divides=True, reduces=True, has_uneven_parts=True),
        Kind("all_to_all", _others_share, divides=True, has_in_place=False),
        Kind("all_to_all_v", _others_share, divides=True, has_uneven_parts=True, has_in_place=False),
        Kind("broadcast", _whole, has_root=True),
        Kind("reduce", _whole, reduces=True, has_root=True),
        Kind("gather", _others_share, divides=True, has_root=True),
        Kind("scatter", _others_share, divides=True, has_root=True),
        Kind("sendrecv", _whole, has_in_place=False),
    )
}
