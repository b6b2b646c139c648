"""Sizes of the pieces in which rows travel while they are multiplied, and of the products that take them.

Small pieces leave little to wait for at the end, but each costs a message, and each product reads its matrix again: 0.8
ms for 8 MB on one core.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import log2
from typing import NamedTuple

from tritondt.planning.cost import CostTable, Link


class Rows(NamedTuple):
    """Rows that one rank has for each of `num_ranks - 1` others: their number, features and bytes per element."""

    num_rows: float
    num_features: int
    itemsize: int
    num_ranks: int

    @property
    def num_bytes(self) -> float:
        """Bytes for one other rank."""
        return self.num_rows * self.num_features * self.itemsize


class Pace(NamedTuple):
    """Seconds for the rows of one peer: in transit, per message, in products, and per product."""

    travel_s: float
    message_s: float
    part_s: float
    product_s: float


def pace_of(rows: Rows, num_others: int, num_threads: int, costs: CostTable) -> Pace:
    """Pace of rows that come from, or go to, a product with a matrix of their features by `num_others`."""
    link, num_products = _link_of(rows, costs), rows.num_features * num_others
    return Pace(
        rows.num_bytes * (1 / link.bandwidth + 1 / costs.copy_bandwidth),
        link.latency_s + (costs.slot_launch_s if link is costs.slots else 0.0),
        2 * rows.num_rows * num_products / (costs.flop_rate * num_threads),
        num_products * rows.itemsize / (2 * costs.copy_bandwidth),  # the matrix is read, and laid out in the cache
    )


def _link_of(rows: Rows, costs: CostTable) -> Link:
    return costs.link_of(rows.num_ranks, rows.num_ranks, rows.num_bytes)


def best_shares(rows: Rows, num_positions: int, costs: CostTable) -> tuple[int, ...]:
    """Shares of the pieces in which the rows of one peer should travel, in order of arrival; empty without overlap.

    Each is half of what is left: while it is multiplied the next is under way, and the last is small. Its size is that
    at which it takes as long as a message, or a product, costs besides. A link that keeps the processor busy hides
    nothing. Ranks may have matrices of different sizes, and must agree: the size of the matrix falls out.

    >>> best_shares(Rows(1024, 1024, 4, num_ranks=2), 1024, CostTable(ranks_per_host=1))
    (16, 8, 4, 2, 1, 1)
    >>> best_shares(Rows(1024, 1024, 4, num_ranks=2), 1024, CostTable())
    ()
    """
    pace = pace_of(rows, 1, 1, costs)
    hidden_s = pace.travel_s * (1 - _link_of(rows, costs).busy_share)
    if rows.num_ranks == 1:
        return ()
    num_worth = min(hidden_s / (pace.message_s * (rows.num_ranks - 1)), pace.part_s / pace.product_s, num_positions)
    if num_worth < 1:
        return ()
    halvings = int(log2(num_worth))
    return (*(2**left for left in reversed(range(halvings))), 1)


def merged(num_peers: int, shares: Sequence[int], pace: Pace, before_s: float) -> tuple[int, ...]:
    """Numbers of pieces that products take, where pieces arrive one by one and `before_s` is computed first.

    A product takes what is there of one peer when the one before it is done. Backwards it says how many pieces each
    product should make, where they leave one after the other and `before_s` is computed after them.

    >>> merged(1, (2, 1, 1), Pace(travel_s=8, message_s=0, part_s=4, product_s=0), before_s=4)
    (1, 1, 1)
    >>> merged(2, (2, 1, 1), Pace(travel_s=4, message_s=0, part_s=9, product_s=0), before_s=9)  # all there
    (3, 3)
    """
    pieces = [share / sum(shares) for share in shares] * num_peers
    arrivals = list(accumulate(pace.message_s + piece * pace.travel_s for piece in pieces))
    found, done_s, start = list[int](), before_s, 0
    while start < len(arrivals):
        done_s = max(done_s, arrivals[start])
        end_of_peer = start - start % len(shares) + len(shares)
        stop = bisect_right(arrivals, done_s, start, end_of_peer)
        done_s += pace.product_s + sum(pieces[start:stop]) * pace.part_s
        found.append(stop - start)
        start = stop
    return tuple(found)
