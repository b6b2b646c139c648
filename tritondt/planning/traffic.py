"""Bytes between all pairs of ranks in a redistribution, counted rank by rank from its plan."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tritondt.errors import LayoutError
from tritondt.planning.plan import Plan
from tritondt.planning.spread import Spread
from tritondt.planning.totals import RankTotals

# Counting them takes 20 s where one of 65,536 ranks sends to all the others.
MOST_MESSAGES = 200_000


@dataclass(frozen=True)
class RankTraffic:
    """Bytes and messages of a redistribution; `links` has bytes by sender and receiver, as positions in the mesh."""

    num_ranks: int
    links: Mapping[tuple[int, int], int]
    messages: tuple[int, ...]

    @cached_property
    def sent(self) -> list[int]:
        """Bytes that each rank sends."""
        return self._sums(0)

    @cached_property
    def received(self) -> list[int]:
        """Bytes that each rank receives."""
        return self._sums(1)

    def _sums(self, end: int) -> list[int]:
        found = [0] * self.num_ranks
        for link, num_bytes in self.links.items():
            found[link[end]] += num_bytes
        return found

    @property
    def spreads(self) -> dict[str, Spread]:
        """Spreads of bytes sent, bytes received and messages sent."""
        return RankTotals(tuple(self.sent), tuple(self.received), self.messages).spreads

    def blocks(self, most: int) -> tuple[list[list[int]], int]:
        """Bytes between groups of neighbouring ranks, at most `most` groups, a row for each sending one; ranks a group.

        >>> RankTraffic(4, {(0, 1): 5, (0, 3): 7}, (2, 0, 0, 0)).blocks(2)
        ([[5, 7], [0, 0]], 2)
        """
        size = -(-self.num_ranks // most)
        count = -(-self.num_ranks // size)
        rows = [[0] * count for _ in range(count)]
        for (sender, receiver), num_bytes in self.links.items():
            rows[sender // size][receiver // size] += num_bytes
        return rows, size


def rank_traffic(plan: Plan, itemsize: int) -> RankTraffic:
    """Traffic of all steps of a plan whose messages hold elements of `itemsize` bytes.

    Raises LayoutError where there are more than 200,000 messages.

    >>> from tritondt.planning.cost import CostTable
    >>> from tritondt.planning.planner import make_plan
    >>> from tritondt.sharding.layout import Layout
    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((2,), parse_placements(text), (5, 2)) for text in ("S0", "R"))
    >>> rank_traffic(make_plan(source, target, 4, CostTable()), 4).links
    {(0, 1): 24, (1, 0): 16}
    """
    links: dict[tuple[int, int], int] = defaultdict(int)
    messages = [0] * plan.source.num_ranks
    total = 0
    for step in plan.steps:
        for rank, coordinate in enumerate(plan.source.coordinates()) if step.moving_axes else ():
            sends = step.exchange(coordinate).sends
            total += len(sends)
            if total > MOST_MESSAGES:
                raise LayoutError(
                    f"{plan.source} -> {plan.target} of {plan.source.shape} has more than {MOST_MESSAGES:,} messages "
                    f"between its {plan.source.num_ranks:,} ranks, too many to be listed for a picture or a topology; "
                    "what each rank sends and receives is counted without (--all-ranks, rank_totals)"
                )
            messages[rank] += len(sends)
            for message in sends:
                links[rank, message.peer] += message.numel * itemsize
    return RankTraffic(plan.source.num_ranks, dict(links), tuple(messages))
