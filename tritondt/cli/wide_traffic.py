"""Bytes between blocks of ranks, and over links of a network, in worlds whose messages are too many to be listed.

They are added up by fans: senders that send the same amounts to the same ranks. All of S0 -> S1 on 65,536 ranks is one
fan of 4,294,967,296 messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from tritondt.errors import LayoutError
from tritondt.planning.host_counts import Pairs
from tritondt.planning.plan import Plan
from tritondt.planning.spread import Spread
from tritondt.planning.topology import Link, Topology
from tritondt.planning.traffic import rank_totals, step_traffic

# Switches between which a path is followed for every pair, at some 2 us each.
MOST_SWITCHES = 2048
# Pairs of ranks on one host that are looked at together: 64 MB for each of their numbers.
_PAIRS_AT_ONCE = 1 << 23


class Fan(NamedTuple):
    """Senders, and what each of them sends to which rank, itself included, in ascending order of receivers."""

    senders: torch.Tensor
    receivers: torch.Tensor
    num_bytes: torch.Tensor

    @property
    def kept(self) -> torch.Tensor:
        """Bytes that each sender keeps."""
        place = torch.searchsorted(self.receivers, self.senders).clamp_(max=len(self.receivers) - 1)
        return torch.where(self.receivers[place] == self.senders, self.num_bytes[place], 0)


def fans(plan: Plan, itemsize: int) -> Iterator[Fan]:
    """Fans of all steps of a plan whose messages hold elements of `itemsize` bytes.

    Raises LayoutError where too many pairs of parts would have to be listed.

    >>> from tritondt.planning.cost import CostTable
    >>> from tritondt.planning.planner import make_plan
    >>> from tritondt.sharding.layout import Layout
    >>> from tritondt.sharding.placement import parse_placements
    >>> source, target = (Layout((2,), parse_placements(text), (6, 2)) for text in ("S0", "R"))
    >>> [[values.tolist() for values in fan] for fan in fans(make_plan(source, target, 4, CostTable()), 4)]
    [[[0, 1], [0, 1], [24, 24]]]
    """
    for step in plan.steps:
        if not step.moving_axes:
            continue
        traffic = step_traffic(step)
        senders: dict[tuple[Pairs, ...], list[int]] = defaultdict(list)
        for rank, coordinate in enumerate(plan.source.coordinates()):
            senders[traffic.served(coordinate)].append(rank)
        senders.pop((), None)
        for factors, ranks in senders.items():
            receivers, numels = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
            for factor in factors:
                places, lengths = torch.frombuffer(bytearray(factor), dtype=torch.int64).view(-1, 2).unbind(1)
                receivers = (receivers[:, None] + places).flatten()
                numels = (numels[:, None] * lengths).flatten()
            order = receivers.argsort()
            yield Fan(torch.tensor(ranks), receivers[order], numels[order] * itemsize)


class WideTraffic:
    """Traffic of a plan whose messages hold elements of `itemsize` bytes, of any number of messages.

    >>> from tritondt.planning.cost import CostTable
    >>> from tritondt.planning.planner import make_plan
    >>> from tritondt.sharding.placement import parse_placements
    >>> from tritondt.sharding.layout import Layout
    >>> source, target = (Layout((2,), parse_placements(text), (5, 2)) for text in ("S0", "R"))
    >>> WideTraffic(make_plan(source, target, 4, CostTable()), 4).blocks(2)
    ([[0, 24], [16, 0]], 1)
    """

    def __init__(self, plan: Plan, itemsize: int) -> None:
        self.num_ranks = plan.source.num_ranks
        self._plan, self._itemsize = plan, itemsize

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """Spreads of bytes sent, bytes received and messages sent."""
        return rank_totals(self._plan, self._itemsize).spreads

    def blocks(self, most: int) -> tuple[list[list[int]], int]:
        """As `RankTraffic.blocks` has them; raises LayoutError where too many pairs would have to be listed."""
        size = -(-self.num_ranks // most)
        count = -(-self.num_ranks // size)
        rows = torch.zeros(count, count, dtype=torch.int64)
        for fan in fans(self._plan, self._itemsize):
            own = fan.senders // size
            _add_by_group(rows, fan, own, fan.receivers // size)
            rows.index_put_((own, own), -fan.kept, accumulate=True)
        return rows.tolist(), size

    def link_loads(self, topology: Topology) -> dict[Link, int]:
        """Bytes over each link that carries any; raises LayoutError where switches or pairs are too many."""
        return _LinkLoads(topology, self.num_ranks).of(fans(self._plan, self._itemsize))


class _LinkLoads:
    """Loads of the links of a topology, added up fan by fan."""

    def __init__(self, topology: Topology, num_ranks: int) -> None:
        self._topology, self._num_ranks = topology, num_ranks
        self._num_hosts = -(-num_ranks // topology.ranks_per_host)
        self._switch = torch.tensor([topology.switch(rank) for rank in range(num_ranks)])
        self._num_switches = int(self._switch.max()) + 1
        if self._num_switches > MOST_SWITCHES:
            raise LayoutError(
                f"{topology} has {self._num_switches:,} switches for {num_ranks:,} ranks; at most {MOST_SWITCHES:,} "
                "are allowed where messages are too many to be listed one by one"
            )
        # Bytes within hosts, and through cards, by sender and by receiver.
        self._host_out, self._host_in, self._card_out, self._card_in = torch.zeros(4, num_ranks, dtype=torch.int64)
        self._between = torch.zeros(self._num_switches, self._num_switches, dtype=torch.int64)

    def of(self, found: Iterable[Fan]) -> dict[Link, int]:
        """Loads of the links that carry any of these fans."""
        for fan in found:
            self._add(fan)
        size = self._topology.ranks_per_host
        loads: dict[Link, int] = defaultdict(int)
        for rank in range(self._num_ranks):
            loads[Link("host out", rank, rank // size)] = int(self._host_out[rank])
            loads[Link("host in", rank // size, rank)] = int(self._host_in[rank])
            loads[Link("card out", rank, rank)] = int(self._card_out[rank])
            loads[Link("card in", rank, rank)] = int(self._card_in[rank])
        for one, row in enumerate(self._between.tolist()):
            for other, num_bytes in enumerate(row):
                for link in self._topology.between(one, other) if num_bytes else ():
                    loads[link] += num_bytes
        return {link: num_bytes for link, num_bytes in loads.items() if num_bytes}

    def _add(self, fan: Fan) -> None:
        size = self._topology.ranks_per_host
        senders, receivers, num_bytes = fan
        hosts = senders // size
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), num_bytes.cumsum(0)])
        first, last = (torch.searchsorted(receivers, bound) for bound in (hosts * size, (hosts + 1) * size))
        inside, kept = ends[last] - ends[first], fan.kept
        self._host_out[senders] += inside - kept
        self._card_out[senders] += num_bytes.sum() - inside
        neighbours = torch.bincount(hosts, minlength=self._num_hosts)[receivers // size]
        self._host_in[receivers] += neighbours * num_bytes
        self._host_in[senders] -= kept
        self._card_in[receivers] += (len(senders) - neighbours) * num_bytes
        _add_by_group(self._between, fan, self._switch[senders], self._switch[receivers])
        if len(self._switch[:size].unique()) > 1:
            self._take_inside(fan, first, last)

    def _take_inside(self, fan: Fan, first: torch.Tensor, last: torch.Tensor) -> None:
        """Takes what goes within hosts from what goes between switches, where a host's ranks have several."""
        counts = last - first
        start = 0
        for stop in [*((counts.cumsum(0) // _PAIRS_AT_ONCE).diff().nonzero().flatten() + 1).tolist(), len(counts)]:
            part = slice(start, stop)
            sender = self._switch[fan.senders[part]].repeat_interleave(counts[part])
            ends = counts[part].cumsum(0)
            place = torch.arange(len(sender)) + (first[part] - ends + counts[part]).repeat_interleave(counts[part])
            pair = (sender, self._switch[fan.receivers[place]])
            self._between.index_put_(pair, -fan.num_bytes[place], accumulate=True)
            start = stop


def _add_by_group(totals: torch.Tensor, fan: Fan, senders: torch.Tensor, receivers: torch.Tensor) -> None:
    """Adds a fan to totals by group of sender (rows) and of receiver (columns), which are given for each rank."""
    to_group = torch.zeros(totals.shape[1], dtype=torch.int64).index_add_(0, receivers, fan.num_bytes)
    groups, counts = senders.unique(return_counts=True)
    totals.index_add_(0, groups, counts[:, None] * to_group)
