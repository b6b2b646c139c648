"""Bytes, messages and seconds of redistributions on one rank, as the planner has them."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from tritondt.comm import world
from tritondt.comm.transports.table import chosen
from tritondt.errors import ArgumentError
from tritondt.found_plan.dry_run import Movement
from tritondt.found_plan.traffic import Traffic
from tritondt.planning.cost import CostTable, Link
from tritondt.planning.explain import explain_layouts
from tritondt.planning.prices import built_in
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.mesh import Mesh


class Prices(NamedTuple):
    """The cost table of a type of device, and the number of the host of each rank."""

    device_type: str
    costs: CostTable
    hosts: tuple[int, ...]

    @property
    def data_link(self) -> Link:
        """The link that exchanges over the data axis are bound by: between hosts where there are several."""
        return self.costs.network if len(set(self.hosts)) > 1 else self.costs.host

    def traffic(self, movement: Movement, rank: int) -> Traffic:
        """Traffic of a redistribution on a rank that takes part in it."""
        hosts = tuple(self.hosts[each] for each in movement.ranks)
        itemsize = getattr(torch, movement.dtype).itemsize
        coordinate = movement.source.coordinate(movement.ranks.index(rank))
        given = (self.costs, hosts, movement.dtype, itemsize)
        return _traffic(movement.source, movement.target, coordinate, *given)

    def total(self, movements: Mapping[Movement, int] | Iterable[tuple[Movement, int]], rank: int) -> Traffic:
        """Traffic of many, each as often as it is counted."""
        listed = movements.items() if isinstance(movements, Mapping) else movements
        return sum((self.traffic(movement, rank).times(number) for movement, number in listed), Traffic())


@lru_cache(maxsize=4096)
def _traffic(
    source: Layout,
    target: Layout,
    coordinate: Coordinate,
    costs: CostTable,
    hosts: tuple[int, ...],
    dtype: str,
    itemsize: int,
) -> Traffic:
    found = explain_layouts(source, target, itemsize, costs, coordinate, dtype=dtype, hosts=hosts)
    return Traffic(found.sent_bytes, found.received_bytes, found.far_bytes, found.messages, found.seconds)


def built_in_prices(device_type: str, num_ranks: int, ranks_per_host: int, costs: CostTable | None) -> Prices:
    """Prices without a world: built-in ones, or those given, of consecutive ranks on each host."""
    if device_type not in built_in(1):
        raise ArgumentError(f"device_type got {device_type!r}; allowed are {', '.join(built_in(1))}")
    if ranks_per_host < 1:
        raise ArgumentError(f"ranks_per_host got {ranks_per_host}; allowed is a number of ranks of at least 1")
    table = chosen(device_type).price(built_in(ranks_per_host)[device_type]) if costs is None else costs
    return Prices(device_type, table, tuple(rank // table.ranks_per_host for rank in range(num_ranks)))


def prices_of_world(mesh: Mesh) -> Prices:
    """Prices that the ranks of the calling thread's world share, and the hosts of the ranks of a mesh."""
    found = world.current()
    return Prices(mesh.device_type, found.costs_for(mesh.device_type), found.hosts(mesh.ranks))
