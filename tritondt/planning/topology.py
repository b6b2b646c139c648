"""Loads of a network's links under the traffic of a redistribution, by fixed shortest paths.

A topology gives the directed links on the way from one rank to another; a link is its kind and its ends. Ranks of one
host talk through the host's own switch; each has a network card of its own for the others.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tritondt.errors import LayoutError
from tritondt.planning.spread import Spread
from tritondt.planning.traffic import RankTraffic


class Link(NamedTuple):
    """A directed link of a kind, from one end to another; ends are numbers of ranks, switches or groups."""

    kind: str
    source: int
    target: int


class Topology(Protocol):
    """A network of hosts with equal numbers of ranks."""

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host."""
        ...

    def switch(self, rank: int) -> int:
        """Switch of the network that the rank's card is joined to."""
        ...

    def between(self, one: int, other: int) -> Iterator[Link]:
        """Links from a switch to another, or to itself."""
        ...


@dataclass(frozen=True)
class FatTree:
    """Hosts below leaf switches, all of which are joined by a core; the links of a leaf to the core count as one."""

    ranks_per_host: int
    hosts_per_leaf: int

    def switch(self, rank: int) -> int:
        """Leaf of the rank's host."""
        return rank // (self.ranks_per_host * self.hosts_per_leaf)

    def between(self, one: int, other: int) -> Iterator[Link]:
        """Up to the core and down, where the leaves differ."""
        if one != other:
            yield Link("leaf up", one, 0)
            yield Link("leaf down", 0, other)


@dataclass(frozen=True)
class RailOptimised:
    """A rail switch for each place within a host, which joins the ranks at that place; a core joins the rails."""

    ranks_per_host: int

    def switch(self, rank: int) -> int:
        """Rail of the rank's place within its host."""
        return rank % self.ranks_per_host

    def between(self, one: int, other: int) -> Iterator[Link]:
        """Up to the core and down, where the rails differ."""
        if one != other:
            yield Link("rail up", one, 0)
            yield Link("rail down", 0, other)


@dataclass(frozen=True)
class Dragonfly:
    """Groups of routers, each joined to all others of its group, and one link between each two groups.

    The link from group a to group b leaves at router b mod n of its group and arrives at router a mod n.
    """

    ranks_per_host: int
    hosts_per_router: int
    routers_per_group: int

    def switch(self, rank: int) -> int:
        """Router of the rank's host."""
        return rank // (self.ranks_per_host * self.hosts_per_router)

    def between(self, one: int, other: int) -> Iterator[Link]:
        """To the router at the end of the link between the groups, across, and to the receiver's router."""
        here, there = one, other
        count = self.routers_per_group
        group, other = here // count, there // count
        if group != other:
            gate, opposite = group * count + other % count, other * count + group % count
            if here != gate:
                yield Link("in group", here, gate)
            yield Link("between groups", group, other)
            here = opposite
        if here != there:
            yield Link("in group", here, there)


_KINDS = {"fat-tree": (FatTree, 2), "rail-optimised": (RailOptimised, 1), "dragonfly": (Dragonfly, 3)}


def parse_topology(text: str) -> Topology:
    """Topology of a text such as "fat-tree:8,4"; LayoutError for anything else.

    >>> parse_topology("dragonfly:4,2,8")
    Dragonfly(ranks_per_host=4, hosts_per_router=2, routers_per_group=8)
    """
    name, _, rest = text.partition(":")
    kind, count = _KINDS.get(name, (None, 0))
    numbers = rest.split(",")
    if kind is None or len(numbers) != count or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise LayoutError(
            f"cannot read the topology {text!r}; allowed are fat-tree:RANKS_PER_HOST,HOSTS_PER_LEAF, "
            "rail-optimised:RANKS_PER_HOST and dragonfly:RANKS_PER_HOST,HOSTS_PER_ROUTER,ROUTERS_PER_GROUP, with whole "
            "numbers above 0"
        )
    found: Topology = kind(*map(int, numbers))
    return found


def path(topology: Topology, sender: int, receiver: int) -> Iterator[Link]:
    """All links from one rank to another: through the host's switch, or through both ranks' network cards."""
    if sender // topology.ranks_per_host == receiver // topology.ranks_per_host:
        yield Link("host out", sender, sender // topology.ranks_per_host)
        yield Link("host in", receiver // topology.ranks_per_host, receiver)
        return
    yield Link("card out", sender, sender)
    yield from topology.between(topology.switch(sender), topology.switch(receiver))
    yield Link("card in", receiver, receiver)


def link_loads(traffic: RankTraffic, topology: Topology) -> dict[Link, int]:
    """Bytes over each link that carries any.

    >>> traffic = RankTraffic(4, {(0, 1): 5, (0, 3): 7}, (2, 0, 0, 0))
    >>> for link, num_bytes in link_loads(traffic, RailOptimised(2)).items():
    ...     print(*link, num_bytes)
    host out 0 0 5
    host in 0 1 5
    card out 0 0 7
    rail up 0 0 7
    rail down 0 1 7
    card in 3 3 7
    """
    loads: dict[Link, int] = defaultdict(int)
    for (sender, receiver), num_bytes in traffic.links.items():
        for link in path(topology, sender, receiver):
            loads[link] += num_bytes
    return dict(loads)


def loads_by_kind(loads: dict[Link, int]) -> dict[str, tuple[Spread, Link]]:
    """Of each kind the spread over the links that carry anything, and the busiest one."""
    by_kind: dict[str, list[Link]] = defaultdict(list)
    for link in loads:
        by_kind[link.kind].append(link)
    return {
        kind: (Spread.of([loads[link] for link in links]), max(links, key=loads.__getitem__))
        for kind, links in by_kind.items()
    }
