"""Plans between two meshes of one world: what moves, in which steps, and exactly how much.

Source and target may share all, some or no ranks. A rank takes part where it is in either mesh. Without Partial a plan
is one exchange, in which every rank receives exactly what it lacks. Terms of a Partial are reduced where that moves
least: at their receivers, in pieces among receivers that then gather, or on the source's mesh before they leave it.
Over several hosts the fewest bytes between these come first, by the forms of between_hosts.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tritondt.errors import LayoutError
from tritondt.planning.between_hosts import Hosts, MeshRanks, host_forms
from tritondt.planning.cost import CostTable
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import MAX_COUNTED, Plan, Step, StepKind
from tritondt.planning.planner import Steps, fitting_hosts, make_plan
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard


@lru_cache(maxsize=4096)
def make_plan_across(
    source: Layout,
    source_ranks: tuple[int, ...],
    target: Layout,
    target_ranks: tuple[int, ...],
    itemsize: int,
    costs: CostTable,
    hosts: Hosts = (),
) -> Plan:
    """Plan between two meshes, equal on every rank; LayoutError for different tensors.

    The fewest bytes that all ranks together receive come first, then the fewest on the way of one rank, then steps.
    Counted rank by rank up to 1,024 ranks; above, terms are reduced on the source's mesh. `hosts` has the number of the
    host of each rank of either mesh, ascending, where the fewest bytes between hosts are to come before.

    >>> source, target = Layout((2,), (Partial(),), (4,)), Layout((2,), (Replicate(),), (4,))
    >>> print(make_plan_across(source, (0, 1), target, (2, 3), 4, CostTable()))
    (P(sum)) -> (R): reduce (P(sum)) -> (R) in 2 pieces; gather (R) in 2 pieces -> (R)
    """
    if source.shape != target.shape:
        raise LayoutError(
            f"cannot go from {source} to {target}: the source has shape {source.shape}, the target {target.shape}; "
            "they must be equal"
        )
    found = list(_candidates(source, source_ranks, target, target_ranks, itemsize, costs))
    ranks = MeshRanks(source_ranks, target_ranks)
    if len(set(hosts)) > 1:
        if costs.stages_by_time:
            found = [_fewest(found, ranks)]
        knowing = [(crossing, len(steps), steps) for crossing, steps in host_forms(source, target, hosts, ranks)]
        found = fitting_hosts(knowing, found, itemsize, costs, hosts, ranks.either)
    return Plan(source, target, _fewest(found, ranks), source_ranks, target_ranks)


def _fewest(found: list[Steps], ranks: MeshRanks) -> Steps:
    """The form with the fewest bytes; the last one where ranks are too many to be counted."""
    if len(found) > 1 and len(ranks.either) <= MAX_COUNTED:
        return min(found, key=_price)
    return found[-1]


def _price(steps: Steps) -> tuple[int, int, int]:
    received = [step.received_elements for step in steps]
    return sum(map(sum, received)), sum(max(elements, default=0) for elements in received), len(steps)


def _candidates(
    source: Layout,
    source_ranks: tuple[int, ...],
    target: Layout,
    target_ranks: tuple[int, ...],
    itemsize: int,
    costs: CostTable,
) -> Iterator[Steps]:
    """Forms worth pricing; the last is the one for meshes that are too large to be counted."""
    if not source.axes_where(Partial):
        yield (_crossing("exchange", source, source_ranks, target, target_ranks),)
        return
    yield (_crossing("reduce", source, source_ranks, target, target_ranks),)
    holders = target.axes_where(Replicate)
    if holders and not target.axes_where(Partial):
        pieces = FlatPieces(target, holders)
        yield (
            Step("reduce", source, pieces, source_ranks=source_ranks, target_ranks=target_ranks),
            Step("gather", pieces, target, source_ranks=target_ranks, target_ranks=target_ranks),
        )
    if {*source_ranks} & {*target_ranks}:
        yield from _onto_one_replica(source, source_ranks, target, target_ranks)
    for middle in _reduced_layouts(source):
        before = make_plan(source, middle, itemsize, costs)
        steps = [replace(step, source_ranks=source_ranks, target_ranks=source_ranks) for step in before.steps]
        yield (*steps, _crossing("exchange", middle, source_ranks, target, target_ranks))


def _onto_one_replica(
    source: Layout, source_ranks: tuple[int, ...], target: Layout, target_ranks: tuple[int, ...]
) -> Iterator[Steps]:
    """Forms that reduce at one replica of the target, whose ranks may hold terms already, and go on from there."""
    replicated = target.axes_where(Replicate)
    if not replicated or target.axes_where(Partial):
        return
    cut = [axis for axis in range(len(target.mesh_shape)) if axis not in replicated]
    one = Layout(
        [target.mesh_shape[axis] for axis in cut] or [1],
        [target.placements[axis] for axis in cut] or [Replicate()],
        target.shape,
        [cut.index(axis) for axis in target.order if axis in cut] or None,
    )
    ranks_of: dict[Coordinate, list[int]] = {}
    for rank, coordinate in zip(target_ranks, target.coordinates(), strict=True):
        ranks_of.setdefault(tuple(coordinate[axis] for axis in replicated), []).append(rank)
    most = max(len({*source_ranks}.intersection(ranks)) for ranks in ranks_of.values())
    for ranks in ranks_of.values():
        if len({*source_ranks}.intersection(ranks)) == most:
            first = _crossing("reduce", source, source_ranks, one, tuple(ranks))
            yield first, _crossing("exchange", one, tuple(ranks), target, target_ranks)


def _crossing(
    kind: StepKind, source: Layout, source_ranks: tuple[int, ...], target: Layout, target_ranks: tuple[int, ...]
) -> Step:
    step = Step(kind, source, target, source_ranks=source_ranks, target_ranks=target_ranks)
    return step if step.moving_axes else replace(step, kind="local")


def _reduced_layouts(source: Layout) -> Iterator[Layout]:
    """Layouts of the source's mesh in which every element has one holder, or as few as cut dims allow, reduced."""
    for dim in sorted(range(len(source.shape)), key=lambda dim: source.max_local_shape[dim]):
        placements: list[Placement] = [
            placement if isinstance(placement, Shard) else Shard(dim) for placement in source.placements
        ]
        own_cuts = [axis for axis in source.order if isinstance(source.placements[axis], Shard)]
        order = own_cuts + [axis for axis in source.order if axis not in own_cuts]
        try:
            yield Layout(source.mesh_shape, placements, source.shape, order)
        except LayoutError:  # a dim whose cut is in units that these do not divide
            continue
