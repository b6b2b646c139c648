"""Explanations of the redistributions of a trace, made after it from what they were compiled for."""

from typing import NamedTuple

import torch

from tritondt.comm.packing.wire_dtype import is_scaled
from tritondt.debug.tracing.record import Redistribution
from tritondt.kernels.boxes import SCALE_BYTES
from tritondt.planning.across import make_plan_across
from tritondt.planning.between_hosts import Hosts
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import explain_plan
from tritondt.planning.planner import make_plan
from tritondt.planning.step_report import WireSize
from tritondt.redistribution.compile import is_one_grid
from tritondt.sharding.spec import DTensorSpec


class Compiled(NamedTuple):
    """The pair of specs that a transfer was compiled for, with the prices of its world and the hosts of its ranks."""

    source: DTensorSpec
    target: DTensorSpec
    wire_dtype: torch.dtype | None
    costs: CostTable
    hosts: Hosts


def explained(compiled: Compiled, site: str) -> Redistribution:
    """Explanation of a compiled redistribution, on one mesh or between two."""
    source, target, wire_dtype, costs, hosts = compiled
    itemsize, wire, moved_itemsize = source.dtype.itemsize, None, source.dtype.itemsize
    if wire_dtype is not None:
        moved_itemsize = wire_dtype.itemsize
        wire = WireSize(itemsize, moved_itemsize, SCALE_BYTES if is_scaled(wire_dtype) else 0)
    if is_one_grid(source, target):
        assert source.coordinate is not None, f"{source} was compiled on a rank outside its mesh"
        costs = costs if wire is None else costs.for_wire()
        plan = make_plan(source.layout, target.layout, moved_itemsize, costs, hosts=hosts)
        rank = source.layout.position(source.coordinate)
    else:
        ranks = source.mesh.ranks, target.mesh.ranks
        plan = make_plan_across(source.layout, ranks[0], target.layout, ranks[1], moved_itemsize, costs, hosts)
        rank = source.mesh.identity.rank
    return Redistribution(
        explanation=str(explain_plan(plan, rank, itemsize, costs, wire, hosts=hosts)),
        site=site,
        is_reduction=any(placement.is_partial() for placement in source.placements),
        replicates=any(placement.is_replicate() for placement in target.placements),
        itemsize=moved_itemsize,
    )
