"""Explanations of plans between two meshes, on one rank of the world."""

from math import prod

from tritondt.planning.across import PlanAcross, StepAcross
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import Explanation
from tritondt.planning.step_report import WireSize, cast_report, near_ranks, step_report
from tritondt.sharding.coordinates import ranks_text
from tritondt.sharding.layout import Coordinate, Layout


def explain_plan_across(
    plan: PlanAcross, rank: int, itemsize: int, costs: CostTable, wire: WireSize | None = None
) -> Explanation:
    """Explanation of a plan between two meshes for a rank of the world; all zeros where it is in neither mesh.

    >>> from tritondt.planning.across import make_plan_across
    >>> from tritondt.sharding.placement import parse_placements
    >>> rows, columns = (Layout((2,), parse_placements(text), (4, 4)) for text in ("S0", "S1"))
    >>> plan = make_plan_across(rows, (0, 1), columns, (2, 3), 4, CostTable())
    >>> found = explain_plan_across(plan, 3, 4, CostTable())
    >>> found.sent_bytes, found.received_bytes, found.num_peers
    (0, 32, 2)
    """
    ranks = sorted({*plan.source_ranks, *plan.target_ranks})
    chunk_bytes = costs.chunk_bytes(len(ranks))
    near = near_ranks(costs, len(ranks), ranks.index(rank)) if rank in ranks else None
    reports, peers, peak = [], set[int](), 0
    for step in plan.steps:
        found = step.exchange_of(rank)
        peers.update(message.peer for message in (*found.sends, *found.receives))
        if wire is None or not step.moving_axes:
            seconds = _seconds(step, itemsize, costs)
            report = step_report(step, found, step.blocks_of(rank), itemsize, seconds, chunk_bytes, near=near)
        else:
            report = cast_report(step, found, wire, _seconds(step, wire.wire_itemsize, costs))
        reports.append(report)
        between = 0
        if step is not plan.steps[0] and isinstance(step.source, Layout):
            between = _num_bytes(step.source, step.source_coordinate(rank), itemsize)
        if step is not plan.steps[-1] and isinstance(step.target, Layout):
            between += _num_bytes(step.target, step.target_coordinate(rank), itemsize)
        peak = max(peak, report.packed_bytes + report.staged_bytes + between)
    first, last = plan.steps[0], plan.steps[-1]
    return Explanation(
        source=f"{plan.source} on ranks {ranks_text(plan.source_ranks)}",
        target=f"{plan.target} on ranks {ranks_text(plan.target_ranks)}",
        shape=plan.source.shape,
        coordinate=last.target_coordinate(rank) or first.source_coordinate(rank) or (),
        steps=tuple(reports),
        peak_bytes=peak,
        num_peers=len(peers),
        first_connections_seconds=len(peers) * costs.first_connection_s,
        wire_itemsize=None if wire is None else wire.wire_itemsize,
        rank=rank,
    )


def _seconds(step: StepAcross, itemsize: int, costs: CostTable) -> float:
    """Predicted seconds of the rank that receives most."""
    if not step.moving_axes:
        return step.target.max_local_numel * itemsize / costs.copy_bandwidth
    exchanges = [step.exchange_of(rank) for rank in step.ranks]
    num_messages = max(max(len(found.sends), len(found.receives)) for found in exchanges)
    received = max(step.received_elements) * itemsize
    link = costs.link(max(step.ranks) + 1)
    return num_messages * link.latency_s + received / link.bandwidth + received / costs.copy_bandwidth


def _num_bytes(layout: Layout, coordinate: Coordinate | None, itemsize: int) -> int:
    return 0 if coordinate is None else prod(layout.local_shape(coordinate)) * itemsize
