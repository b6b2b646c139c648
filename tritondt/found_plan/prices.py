"""Bytes, messages and seconds of redistributions on one rank, as the planner has them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from tritondt.comm import world
from tritondt.comm.process_world import default_costs
from tritondt.errors import ArgumentError
from tritondt.found_plan.dry_run import Movement
from tritondt.found_plan.traffic import Traffic
from tritondt.found_plan.work import Work
from tritondt.planning.cost import CostTable, Link
from tritondt.planning.explain import explain_layouts
from tritondt.planning.prices import built_in
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.mesh import Mesh

# Prices of computing.
_RATES = ("flop_rate", "flop_rates", "operator_s", "operator_bandwidth")


class Prices(NamedTuple):
    """The cost table of a type of device, and the number of the host of each rank."""

    device_type: str
    costs: CostTable
    hosts: tuple[int, ...]

    @property
    def data_link(self) -> Link:
        """The link that exchanges over the data axis are bound by: between hosts where there are several."""
        return self.costs.network if len(set(self.hosts)) > 1 else self.costs.host

    @property
    def turns(self) -> float:
        """Ranks of a host that take turns on one core; 1 where each has its own."""
        most, cores = max(Counter(self.hosts).values()), self.costs.cores_per_host
        return max(1.0, most / cores) if cores else 1.0

    @property
    def origin(self) -> str:
        """Where the rates of computing come from: "measured", "built in" or "given"."""
        if self.costs.is_measured:
            return "measured"
        known = built_in(1).get(self.device_type, built_in(1)["cpu"])
        return "built in" if all(getattr(self.costs, it) == getattr(known, it) for it in _RATES) else "given"

    @property
    def rates_text(self) -> str:
        """A line with the rates of computing, and where they come from."""
        costs = self.costs
        by_dtype = [f"{rate:.3g} in {name}" for name, rate in asdict(costs.flop_rates).items() if rate]
        matmuls = ", ".join(by_dtype) or f"{costs.flop_rate:.3g}"
        turns = f"; {self.turns:g} ranks take turns on a core" if self.turns > 1 else ""
        return (
            f"rates {self.origin}: matmuls {matmuls} FLOPs a second; other operators {costs.operator_bandwidth:.3g} "
            f"bytes a second; {costs.operator_s * 1e6:.3g} us of the host an operator{turns}"
        )

    def computing_s(self, work: Mapping[Work, int]) -> float:
        """Seconds of operators on a rank that has a core, or a device, to itself.

        On the CPU an operator takes the host's time and then its own; on a device the host runs ahead, and the longer
        of both counts.
        """
        return sum(number * self._operator_s(each) for each, number in work.items())

    def _operator_s(self, work: Work) -> float:
        costs = self.costs
        own_s = max(work.flops / costs.rate(work.dtype), work.num_bytes / costs.operator_bandwidth)
        return costs.operator_s + own_s if self.device_type == "cpu" else max(costs.operator_s, own_s)

    def traffic(self, movement: Movement, rank: int) -> Traffic:
        """Traffic of a redistribution on a rank that takes part in it."""
        hosts = tuple(self.hosts[each] for each in movement.ranks)
        itemsize = getattr(torch, movement.dtype).itemsize
        coordinate = movement.source.coordinate(movement.ranks.index(rank))
        given = (self.costs, hosts, movement.dtype, itemsize)
        found = _traffic(movement.source, movement.target, coordinate, *given)
        hosted_s = self.costs.exchange_s if movement.axis == "tensor" else self._group_s(movement, itemsize)
        # Ranks whose cores move the bytes take turns in that, too.
        turns = 1 + self.data_link.busy_share * (self.turns - 1)
        return replace(found, seconds=(hosted_s + found.seconds) * turns, exchanges=1)

    def _group_s(self, movement: Movement, itemsize: int) -> float:
        """Seconds of a group's exchange beside what moves: of the host, and of copies between its flat tensor and whole
        parameters or gradients.
        """
        copied_s = prod(movement.source.shape) * itemsize / self.costs.copy_bandwidth
        return self.costs.group_s + movement.num_parameters * self.costs.group_parameter_s + copied_s

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
    """Prices without a world, of consecutive ranks on each host: those given, or built-in ones under TRITONDT_COSTS."""
    if device_type not in built_in(1):
        raise ArgumentError(f"device_type got {device_type!r}; allowed are {', '.join(built_in(1))}")
    if ranks_per_host < 1:
        raise ArgumentError(f"ranks_per_host got {ranks_per_host}; allowed is a number of ranks of at least 1")
    table = default_costs(num_ranks, ranks_per_host)[device_type] if costs is None else costs
    return Prices(device_type, table, tuple(rank // table.ranks_per_host for rank in range(num_ranks)))


def prices_of_world(mesh: Mesh) -> Prices:
    """Prices that the ranks of the calling thread's world share, and the hosts of the ranks of a mesh."""
    found = world.current()
    return Prices(mesh.device_type, found.costs_for(mesh.device_type), found.hosts(mesh.ranks))
