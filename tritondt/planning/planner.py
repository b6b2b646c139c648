"""Choice of the steps of a redistribution.

The fewest bytes come first and predicted time decides between equals: that is this library's promise, and the
reason that a plan can be checked. It has an exception: where latency decides, for at most `CostTable.one_shot_bytes` a
rank, terms may go to everybody who wants their sum, in one step, and not in pieces that are gathered. Collectives
of NCCL bring as many bytes, and are taken where they are predicted to be faster. Above
`CostTable.max_peers` peers a rank, where one hop would cost more in connections than in bytes, forms of several hops
are taken by time.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import permutations

from tritondt.errors import LayoutError, MeshError
from tritondt.planning.between_hosts import MOST_WEIGHED, Hosts, HostStep, MeshRanks, host_forms, pairing_of
from tritondt.planning.collectives import collective_between, is_offered
from tritondt.planning.cost import CostTable, step_cost
from tritondt.planning.exchange import Route
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Plan, Step, StepKind, moves_nothing
from tritondt.planning.traffic import crossing_elements, elements_between_hosts
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard

Steps = tuple[Step, ...]
# A form that knows hosts, after its elements between hosts and the number of its steps.
Knowing = tuple[int, int, Steps]
# Ranks whose messages are counted to know what a plan moves between hosts, and what an estimate may be too high.
_MOST_COUNTED, _SAMPLED_EXCESS = 64, 1.02


@lru_cache(maxsize=4096)
def make_plan(
    source: Layout, target: Layout, itemsize: int, costs: CostTable, dtype: str = "", hosts: Hosts = ()
) -> Plan:
    """Plan from `source` to `target`, equal on every rank; LayoutError or MeshError for different tensors or meshes.

    `dtype` names the elements where collectives of NCCL may move them, as far as the prices offer these. `hosts` has
    the number of the host of each position in the mesh, where the fewest bytes between hosts are to come first.

    >>> print(make_plan(Layout((2,), (Shard(0),), (4,)), Layout((2,), (Replicate(),), (4,)), 4, CostTable()))
    (S0) -> (R): exchange (S0) -> (R)
    """
    check_pair(source, target)
    if source is target:
        return Plan(source, target, ())
    found = candidates(source, target, costs, dtype)
    if len(set(hosts)) > 1 and all(steps[-1].collective is None for steps in found if steps):
        if costs.stages_by_time:
            found = [min(_ranked(found, itemsize, costs, hosts))[-1]]
        found = fitting_hosts(forms_knowing_hosts(source, target, hosts), found, itemsize, costs, hosts)
    return Plan(source, target, min(_ranked(found, itemsize, costs, hosts))[-1])


def forms_knowing_hosts(source: Layout, target: Layout, hosts: Hosts) -> list[Knowing]:
    """Forms of one mesh that know hosts, as `fitting_hosts` takes them."""
    scaled = _with_scaled_terms(source, target)
    middle = _without_free_terms(scaled, target)
    first: Steps = () if scaled is source else (Step("scale", source, scaled),)
    last: Steps = () if middle is target else _direct(middle, target)[0]
    return [
        (num_crossing + between_hosts(last, hosts), len(steps), first + steps + last)
        for num_crossing, steps in host_forms(scaled, middle, hosts)
    ]


def fitting_hosts(
    knowing: Sequence[Knowing],
    found: list[Steps],
    itemsize: int,
    costs: CostTable,
    hosts: Hosts,
    ranks: Sequence[int] = (),
) -> list[Steps]:
    """The forms to choose from on several hosts: `found`, or of `knowing` those that are better there.

    Better are those with the fewest elements between hosts, and of them those with the fewest steps; or the fastest
    one, where prices have `stages_by_time`: `found` is then the one form that is taken without hosts. For `ranks` see
    `between_hosts`.
    """
    if not knowing:
        return found
    if costs.stages_by_time:
        staged = fastest_on_hosts(knowing, itemsize, costs, hosts, ranks)
        least_s = min(seconds_on_hosts(steps, itemsize, costs, hosts, ranks) for steps in found)
        return found if least_s <= seconds_on_hosts(staged, itemsize, costs, hosts, ranks) else [staged]
    least, fewest = min(form[:2] for form in knowing)
    crossing = [between_hosts(steps, hosts, ranks) for steps in found]
    if min(crossing) <= least * (1 if len(hosts) <= _MOST_COUNTED else _SAMPLED_EXCESS):
        return [steps for steps, num_crossing in zip(found, crossing, strict=True) if num_crossing == min(crossing)]
    return [steps for num_crossing, num_steps, steps in knowing if (num_crossing, num_steps) == (least, fewest)]


def fastest_on_hosts(
    knowing: Sequence[Knowing], itemsize: int, costs: CostTable, hosts: Hosts, ranks: Sequence[int] = ()
) -> Steps:
    """The form that is predicted to be the fastest, of equals the one with fewer elements between hosts.

    Above 64 ranks, whose messages take long to be listed, only the form with the fewest elements is looked at.
    """
    if len(hosts) > MOST_WEIGHED:
        return min(knowing, key=lambda form: form[:2])[2]
    return min(knowing, key=lambda form: (seconds_on_hosts(form[2], itemsize, costs, hosts, ranks), form[:2]))[2]


def seconds_on_hosts(steps: Steps, itemsize: int, costs: CostTable, hosts: Hosts, ranks: Sequence[int] = ()) -> float:
    """Predicted seconds of a form by the links that its messages take. For `ranks` see `between_hosts`."""
    host_of = dict(zip(ranks or range(len(hosts)), hosts, strict=True))
    return sum(step_cost(step, itemsize, costs, host_of).seconds for step in steps)


def is_near(step: Step, hosts: Hosts, ranks: Sequence[int] = ()) -> bool:
    """Whether all messages of a step stay inside hosts; not known of exchanges among more than 64 ranks.

    For `ranks` see `between_hosts`.
    """
    if isinstance(step, HostStep):
        return step.is_near
    return len(hosts) <= _MOST_COUNTED and between_hosts((step,), hosts, ranks) == 0


def between_hosts(steps: Steps, hosts: Hosts, ranks: Sequence[int] = ()) -> int:
    """Elements that cross between hosts in some steps, of all ranks; of some, where pairs or messages are too many.

    Above 64 ranks messages are counted without a list, as far as these are of one mesh and know no hosts, or estimated
    from those of 64. Between two meshes `ranks` are those of either, ascending, whose hosts are given.

    >>> rows = Layout((4,), (Shard(0),), (8,))
    >>> between_hosts(make_plan(rows, rows.with_placements([Replicate()]), 4, CostTable()).steps, (0, 0, 1, 1))
    16
    """
    if not ranks and len(hosts) > _MOST_COUNTED:
        counts = [crossing_elements(step, hosts) for step in steps if not isinstance(step, HostStep)]
        if len(counts) == len(steps) and None not in counts:
            return sum(filter(None, counts))
    ranks = ranks or range(len(hosts))
    counted = ranks[:: -(-len(hosts) // _MOST_COUNTED)]
    host_of = dict(zip(ranks, hosts, strict=True))
    return sum(elements_between_hosts(steps, host_of, counted).values()) * len(hosts) // len(counted)


def least_between_hosts(source: Layout, target: Layout, hosts: Hosts, ranks: MeshRanks | None = None) -> int | None:
    """The fewest elements that can cross between hosts, whatever the plan; None where they are too many to be counted.

    Where an axis becomes Partial, of the plans that hold its new terms where the source holds elements, or at index 0.
    With `ranks` source and target are on two meshes, and `hosts` has the host of each rank of either, ascending.

    >>> terms = Layout((4,), (Partial(),), (8,))
    >>> least_between_hosts(terms, terms.with_placements([Replicate()]), (0, 0, 1, 1))
    16
    """
    if ranks is None:
        source = _with_scaled_terms(source, target)
        target = _without_free_terms(source, target)
    pairing = pairing_of(source, target, hosts, ranks)
    return None if pairing is None else pairing.least_between_hosts


def check_pair(source: Layout, target: Layout) -> None:
    """Refuses layouts that no redistribution connects: of different shapes, or on different meshes."""
    if source.shape != target.shape:
        raise LayoutError(
            f"cannot go from {source} to {target}: the source has shape {source.shape}, the target {target.shape}; "
            "they must be equal"
        )
    if source.mesh_shape != target.mesh_shape:
        raise MeshError(
            f"cannot go from {source} to {target}: the source mesh has shape {source.mesh_shape}, the target mesh "
            f"{target.mesh_shape}; they must be equal"
        )


def _ranked(
    found: Sequence[Steps], itemsize: int, costs: CostTable, hosts: Hosts = ()
) -> Iterator[tuple[float, float, float, int, Steps]]:
    """Candidates with their sort key: peers above the limit, bytes, seconds, place in the list."""
    priced = []
    host_of = _regarded(hosts, costs)
    for steps in found:
        single = [step_cost(step, itemsize, costs, host_of) for step in steps]
        peers = max(cost.num_peers for cost in single)
        received = sum(cost.received_elements for cost in single)
        priced.append((peers, received, sum(cost.seconds for cost in single)))
    limit = costs.one_shot_limit(found[0][0].target_layout.num_ranks)
    crowded = max(peers for peers, _, _ in priced) > costs.max_peers
    fewest = min(received for _, received, _ in priced)
    for place, ((peers, received, seconds), steps) in enumerate(zip(priced, found, strict=True)):
        excess = float(peers) if peers > costs.max_peers else 0.0
        counted = fewest if received * itemsize <= limit else received
        # Bytes are compared to 6 digits: forms that are equal on paper differ in the last bits.
        yield excess, 0.0 if crowded else float(f"{counted:.6g}"), seconds, place, steps


def _regarded(hosts: Hosts, costs: CostTable) -> dict[int, int]:
    """The host of each position in the mesh, where links between hosts count in the choice between forms."""
    return dict(enumerate(hosts)) if costs.stages_by_time and len(set(hosts)) > 1 else {}


def why_more_bytes(plan: Plan, itemsize: int, costs: CostTable, hosts: Hosts = ()) -> str | None:
    """The reason why a plan brings a rank more bytes than another form would; None where it brings the fewest.

    >>> from tritondt.planning.prices import CUDA
    >>> terms, sums = Layout((8,), (Partial("sum"),), (64, 64)), Layout((8,), (Replicate(),), (64, 64))
    >>> print(why_more_bytes(make_plan(terms, sums, 2, CUDA), 2, CUDA))
    every term goes to everybody in one step, 57,344 bytes a rank: 29 us predicted against 58 us for 14,336 bytes in \
    2 steps; up to 262,144 bytes latency decides
    """
    if not plan.steps or any(isinstance(step, HostStep) for step in plan.steps):
        return None

    host_of = _regarded(hosts, costs)

    def priced(steps: Steps) -> tuple[float, float, Steps]:
        single = [step_cost(step, itemsize, costs, host_of) for step in steps]
        return sum(cost.received_elements for cost in single) * itemsize, sum(cost.seconds for cost in single), steps

    own, limit = priced(plan.steps), costs.one_shot_limit(plan.target.num_ranks)
    least = min((priced(steps) for steps in candidates(plan.source, plan.target, costs)), key=lambda found: found[:2])
    if own[0] > limit or float(f"{own[0]:.6g}") <= float(f"{least[0]:.6g}"):
        return None
    return (
        f"every term goes to everybody in one step, {own[0]:,.0f} bytes a rank: {own[1] * 1e6:.0f} us predicted "
        f"against {least[1] * 1e6:.0f} us for {least[0]:,.0f} bytes in {len(least[2])} steps; up to "
        f"{limit:,} bytes latency decides"
    )


def why_collective(plan: Plan, itemsize: int, costs: CostTable, dtype: str, hosts: Hosts = ()) -> str | None:
    """The reason why a plan is a collective of NCCL, or is none where there is one; None where there is none.

    >>> from tritondt.planning.prices import CUDA
    >>> rows = Layout((8,), (Shard(0),), (4096, 4096))
    >>> plan = make_plan(rows, rows.with_placements([Replicate()]), 4, CUDA, "float32")
    >>> print(why_collective(plan, 4, CUDA, "float32"))
    all_gather of NCCL: 215 us predicted against 264 us for messages of our own
    """
    found = candidates(plan.source, plan.target, costs, dtype) if plan.steps else []
    collected = [steps for steps in found if steps[-1].collective is not None]
    if not collected:
        return None
    one = min(_ranked(collected, itemsize, costs, hosts))
    collective = one[-1][-1].collective
    assert collective is not None, "a form that was chosen for its collective"
    own = min(_ranked([steps for steps in found if steps[-1].collective is None], itemsize, costs, hosts))
    names = (collective.name, one[2]), ("messages of our own", own[2])
    (taken, taken_s), (other, other_s) = names if plan.steps[-1].collective is not None else names[::-1]
    return f"{taken}: {taken_s * 1e6:.0f} us predicted against {other_s * 1e6:.0f} us for {other}"


def candidates(source: Layout, target: Layout, costs: CostTable, dtype: str = "") -> list[Steps]:
    """All forms worth pricing, none of which holds more than the larger of source and target on the way."""
    scaled = _with_scaled_terms(source, target)
    first: Steps = () if scaled is source else (Step("scale", source, scaled),)
    if scaled is target:
        return [first]
    found = [first + steps for steps in _direct(scaled, target)]
    collective = collective_between(scaled, target) if dtype and costs.collectives else None
    if collective is not None and is_offered(collective, dtype, costs.collectives):
        kind: StepKind = "exchange" if collective.op is None else "reduce"
        forms = [collective]
        if costs.registered_bytes:
            forms.append(collective._replace(registered_bytes=costs.registered_bytes))
        found += [(*first, Step(kind, scaled, target, collective=form)) for form in forms]
    if max(step_cost(step, 1, costs).num_peers for steps in found for step in steps) > costs.max_peers:
        found += [first + steps for steps in _hops(scaled, target, costs)]
    return found


def _with_scaled_terms(source: Layout, target: Layout) -> Layout:
    """Source with sum and avg exchanged wherever the target asks for the other."""
    placements = list(source.placements)
    for axis, pair in enumerate(zip(source.placements, target.placements, strict=True)):
        ops = {placement.reduce_op for placement in pair if isinstance(placement, Partial)}
        if ops == {"sum", "avg"}:
            placements[axis] = target.placements[axis]
    return source.with_placements(placements)


def _direct(source: Layout, target: Layout) -> list[Steps]:
    """Forms of one hop where nothing is reduced, else forms that reduce and gather."""
    if not Route(source, target).reduced_axes:
        return [(Step("local" if moves_nothing(source, target) else "exchange", source, target),)]
    middle = _without_new_terms(source, target)
    last: Steps = () if middle is target else _direct(middle, target)[0]
    return [steps + last for steps in _reductions(source, middle)]


def _without_new_terms(source: Layout, target: Layout) -> Layout:
    """Target whose newly Partial axes stay as in the source, since terms are made after the reduction for free."""
    kept = Route(source, target).kept_axes
    sharded: list[Placement] = list(target.placements)
    whole = list(sharded)
    for axis, placement in enumerate(target.placements):
        was = source.placements[axis]
        if isinstance(placement, Partial) and not (axis in kept and isinstance(was, Partial)):
            whole[axis] = Replicate()
            sharded[axis] = was if isinstance(was, Shard) else Replicate()
    try:
        return target.with_placements(sharded)
    except LayoutError:  # the units of the two layouts do not nest: gather that axis instead
        return target.with_placements(whole)


def _without_free_terms(source: Layout, target: Layout) -> Layout:
    """Target before axes become Partial that hold a shard of it, or the whole: nobody sends anything for these."""
    kept, whole = list(target.placements), list(target.placements)
    for axis, (was, placement) in enumerate(zip(source.placements, target.placements, strict=True)):
        if isinstance(placement, Partial) and not isinstance(was, Partial):
            whole[axis] = Replicate()
            kept[axis] = was if isinstance(was, Shard) and placement.reduce_op != "avg" else Replicate()
    try:
        return target.with_placements(kept)
    except LayoutError:  # the units of the two layouts do not nest: gather those axes instead
        return target.with_placements(whole)


def _reductions(source: Layout, target: Layout) -> list[Steps]:
    """Forms that reduce each box whole at each holder, or in pieces among some or all of them and then gather."""
    holders = target.axes_where(Replicate)
    reduced = tuple(axis for axis in Route(source, target).reduced_axes if axis in holders)
    found: list[Steps] = [(Step("reduce", source, target),)]
    for axes in dict.fromkeys((reduced, holders)):
        if axes:
            pieces = FlatPieces(target, axes)
            found.append((Step("reduce", source, pieces), Step("gather", pieces, target)))
    return found


def _hops(source: Layout, target: Layout, costs: CostTable) -> Iterator[Steps]:
    """Forms that change one axis after the other, in every order that stays in bounds; each hop in its best form."""
    changed = [
        axis for axis, pair in enumerate(zip(source.placements, target.placements, strict=True)) if pair[0] != pair[1]
    ]
    limit = max(source.max_local_numel, target.max_local_numel)
    for axes in permutations(changed):
        layouts = _chain(source, target, axes)
        if layouts is None or any(layout.max_local_numel > limit for layout in layouts):
            continue
        hops = [_direct(before, after) for before, after in zip([source, *layouts], layouts, strict=False)]
        yield tuple(step for forms in hops for step in min(_ranked(forms, 1, costs))[-1])


def _chain(source: Layout, target: Layout, axes: Sequence[int]) -> list[Layout] | None:
    """Layouts after each of `axes` has taken its target placement; None where one cannot exist."""
    placements, found = list(source.placements), []
    for axis in axes[:-1]:
        placements[axis] = target.placements[axis]
        try:
            found.append(Layout(source.mesh_shape, placements, source.shape, target.order))
        except LayoutError:
            return None
    return [*found, target]
