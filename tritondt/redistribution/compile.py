"""Compilation of a pair of specs on this rank: plan, boxes, descriptor tables and the communicator, decided once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import torch

from tritondt import identity
from tritondt.comm import world
from tritondt.comm.communicator import Communicator, Role
from tritondt.comm.packing.wire_dtype import is_scaled, narrower
from tritondt.comm.transports import table as transport_table
from tritondt.errors import LayoutError, LocalTensorError, MeshError
from tritondt.errors.arguments import checked
from tritondt.kernels.boxes import SCALE_BYTES
from tritondt.planning.across import make_plan_across
from tritondt.planning.alignment import DENSE, NCCL_ALIGNMENT
from tritondt.planning.between_hosts import Hosts, MeshRanks
from tritondt.planning.collectives import group_of
from tritondt.planning.cost import CostTable, step_cost
from tritondt.planning.exchange import with_peers
from tritondt.planning.explain import Explanation, explain_plan
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.plan import MAX_COUNTED, Plan, Step
from tritondt.planning.planner import is_near, make_plan
from tritondt.planning.step_report import WireSize
from tritondt.planning.storage import rank_blocks
from tritondt.planning.traffic import step_traffic
from tritondt.redistribution.compiled_step import CompiledPlan, CompiledStep, Side, Start, compiled_step, step_text
from tritondt.sharding.coordinates import ranks_text
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement
from tritondt.sharding.spec import DTensorSpec, target_spec

# Functions that are told of every plan when it is compiled, with what it was compiled for.
on_compiled: list[Callable[[DTensorSpec, DTensorSpec, torch.dtype | None, CompiledPlan], object]] = []


def is_one_grid(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether two specs are on the same ranks in the same grid, whatever the names of its axes."""
    before, after = source.mesh, target.mesh
    if before is after:
        return True
    return (before.ranks, before.shape, before.device_type) == (after.ranks, after.shape, after.device_type)


def check_dtypes(source: DTensorSpec, target: DTensorSpec) -> None:
    """Refuses specs of different dtypes."""
    if source.dtype is not target.dtype:
        raise LayoutError(f"cannot go from {source} to {target}: the dtypes differ; convert the local tensor first")


def plan_across(source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None = None) -> Plan:
    """Plan of a pair of specs on two meshes, equal on every rank; `wire_dtype` is None or a narrower dtype."""
    if source.mesh.device_type != target.mesh.device_type:
        raise MeshError(
            f"cannot go from {source.mesh} to {target.mesh}: the one is of {source.mesh.device_type}, the other of "
            f"{target.mesh.device_type}; both must be of one type: move the local tensor to the other device first"
        )
    check_dtypes(source, target)
    itemsize = (source.dtype if wire_dtype is None else wire_dtype).itemsize
    sides = (source.layout, source.mesh.ranks, target.layout, target.mesh.ranks)
    return make_plan_across(*sides, itemsize, costs_of(source), hosts_of(source, target, wire_dtype))


def plan_for(
    source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None = None, *, in_messages: bool = False
) -> Plan:
    """Plan of a pair of specs on one mesh, equal on every rank; `wire_dtype` is None or a narrower dtype.

    With `in_messages` no step is a collective of NCCL.
    """
    if not is_one_grid(source, target):
        raise MeshError(
            f"cannot go from {source.mesh} to {target.mesh} here: source and target must be on one mesh, of the same "
            "ranks in the same grid; x.redistribute(mesh, placements) goes to another one"
        )
    check_dtypes(source, target)
    itemsize = (source.dtype if wire_dtype is None else wire_dtype).itemsize
    dtype = "" if in_messages else _collected_dtype(source, wire_dtype)
    costs = costs_of(source) if wire_dtype is None else costs_of(source).for_wire()
    return make_plan(source.layout, target.layout, itemsize, costs, dtype, hosts_of(source, target, wire_dtype))


def hosts_of(source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None) -> Hosts:
    """Hosts of the ranks of a plan, for the fewest bytes between these; () where all are on one host.

    They are of the positions of the one mesh, or of the ranks of either of two, ascending.
    Elements that travel with scales are rounded at every step, and take only one.
    """
    ranks = source.mesh.ranks
    if not is_one_grid(source, target):
        ranks = MeshRanks(ranks, target.mesh.ranks).either
    if wire_dtype is not None and is_scaled(wire_dtype):
        return ()
    return hosts_of_ranks(ranks)


def hosts_of_ranks(ranks: tuple[int, ...]) -> Hosts:
    """Hosts of ranks, in their order, for the fewest bytes between these; () where all are on one."""
    if len(ranks) == 1:
        return ()
    found = world.current().hosts(ranks)
    return found if len(set(found)) > 1 else ()


def _collected_dtype(spec: DTensorSpec, wire_dtype: torch.dtype | None) -> str:
    """Name of the dtype of which collectives move elements; "" where none can: their blocks are in order of ranks."""
    ranks = spec.mesh.ranks
    is_in_order = all(before < after for before, after in pairwise(ranks))
    return str(spec.dtype).removeprefix("torch.") if is_in_order and wire_dtype is None else ""


def costs_of(spec: DTensorSpec) -> CostTable:
    """Prices on the type of device that a spec's tensors are on, which all ranks of the world share."""
    return world.current().costs_for(spec.mesh.device_type)


def exchanging_ranks(
    source: DTensorSpec, target: DTensorSpec, *, in_messages: bool = False
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Ranks whose communicator carries a redistribution, ascending, and those of the communicator of each exchange.

    Exchanges of fewer ranks run on their communicator inside that of all.
    """
    _, whole, carriers = _carried(source, target, None, in_messages=in_messages)
    return whole, tuple(filter(None, carriers))


def _carried(
    source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None, *, in_messages: bool
) -> tuple[Plan, tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Plan of a pair of specs, ranks of the communicator in whose order it runs, and ranks that exchange in each step.

    The order is that of the widest of its exchanges. Between two meshes these are among the ranks of either.
    """
    hosts = hosts_of(source, target, wire_dtype)
    if is_one_grid(source, target):
        plan = plan_for(source, target, wire_dtype, in_messages=in_messages)
        whole, carriers = tuple(sorted(source.mesh.ranks)), _carriers(plan, source, hosts)
    else:
        plan = plan_across(source, target, wire_dtype)
        whole = tuple(plan.ranks)
        carriers = carriers_on_hosts(plan, whole, source.mesh, hosts)
    return plan, max(carriers, key=len, default=()) or whole, carriers


def carriers_on_hosts(plan: Plan, ranks: tuple[int, ...], mesh: Mesh, hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    """Ranks that exchange in each step of a plan of `ranks`: all, those of this rank's host where these do, or none.

    `hosts` has the host of each of `ranks`, or is () where all are on one. `mesh` is one of the plan's: the transport
    of its devices says whether stages inside hosts have communicators of their own.
    """
    whole, rank = tuple(sorted(ranks)), mesh.identity.rank
    near = whole
    if hosts and rank in whole and not transport_table.chosen(mesh.device_type).knows_hosts:
        own = hosts[ranks.index(rank)]
        near = tuple(sorted(other for other, host in zip(ranks, hosts, strict=True) if host == own))
    across = ranks if plan.source_ranks is not None else ()
    return tuple(
        (near if hosts and is_near(step, hosts, across) else whole) if step.moving_axes else () for step in plan.steps
    )


def _carriers(plan: Plan, spec: DTensorSpec, hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    """Ranks that exchange in each step of a plan on one mesh, ascending: of the mesh, of this rank's host, or none."""
    whole, coordinate = tuple(sorted(spec.mesh.ranks)), spec.coordinate
    collective = plan.steps[-1].collective if plan.steps else None
    if hosts and coordinate is not None and collective is None:
        return carriers_on_hosts(plan, spec.mesh.ranks, spec.mesh, hosts)
    if collective is not None and coordinate is not None:
        places = group_of(spec.mesh.shape, collective.axes, coordinate)
        whole = tuple(sorted(spec.mesh.ranks[place] for place in places))
    return tuple(whole if step.moving_axes else () for step in plan.steps)


def carrier(ranks: tuple[int, ...], whole: tuple[int, ...], device_type: str) -> Communicator:
    """Communicator of an exchange of `ranks` in a redistribution that the communicator of `whole` orders."""
    return world.current().communicator(ranks, device_type, () if ranks == whole else whole)


@checked
def explain(
    source: DTensorSpec | torch.Tensor,
    target: DTensorSpec | Sequence[Placement],
    *,
    order: Sequence[int | str] | None = None,
    wire_dtype: torch.dtype | None = None,
) -> Explanation:
    """Explanation of a redistribution from `source` to `target` on this rank, before anything moves.

    `source` may be a distributed tensor. `target` is then the placements, one per mesh axis, for its `redistribute`,
    with `order`. Both specs have the same global shape and dtype, and lie on one mesh or on two meshes of one world;
    `wire_dtype` is that of `redistribute`. Not a collective call. The result has `steps`, each with messages, bytes
    sent and received, temporary bytes and predicted seconds, and the totals `sent_bytes`, `received_bytes`, `messages`,
    `seconds`, `peak_bytes` (temporary) and `num_peers`; str() is a table, `to_json()` a JSON object. Bytes and messages
    are exact; seconds are predicted from the world's cost table.

    Between two meshes the bytes are those of this rank; they are 0 where the rank is in neither mesh.

    Raises LayoutError for specs of different shapes or dtypes, MeshError for meshes on devices of different types,
    TransportError for a `wire_dtype` that the tensor's dtype cannot travel in, and LocalTensorError for a plain tensor.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharding.mesh import Mesh
    >>> from tritondt.sharding.placement import Shard
    >>> from tritondt.sharding.spec import TensorMeta
    >>> def explain_on(rank):
    ...     meta = TensorMeta.contiguous((4, 2))
    ...     return explain(*(DTensorSpec(Mesh((2,)), (Shard(dim),), meta) for dim in (0, 1)))
    >>> found = run_ranks(2, explain_on)[0]
    >>> found.sent_bytes, found.received_bytes, found.messages
    (8, 8, 1)
    >>> print(found)
    (S0) -> (S1) of (4, 2) at (0,)
    step      from  to    sends  bytes out  receives  bytes in  temporary  predicted
    exchange  (S0)  (S1)  1      8          1         8         8          30 us
    peak temporary 8 bytes; 1 peers, first connections 1.0 ms
    """
    if isinstance(source, torch.Tensor):
        source = _spec_of(source)
    if not isinstance(target, DTensorSpec):
        target = target_spec(source, tuple(target), None if order is None else tuple(order))
    wire = narrower(source.dtype, wire_dtype)
    costs, itemsize = costs_of(source), source.dtype.itemsize
    hosts = hosts_of(source, target, wire)
    if is_one_grid(source, target):
        plan = plan_for(source, target, wire)
        rank = 0 if source.coordinate is None else source.layout.position(source.coordinate)
    else:
        plan, rank = plan_across(source, target, wire), source.mesh.identity.rank
    return explain_plan(
        plan,
        rank,
        itemsize,
        costs if wire is None else costs.for_wire(),
        None if wire is None else WireSize(itemsize, wire.itemsize, SCALE_BYTES if is_scaled(wire) else 0),
        alignment=NCCL_ALIGNMENT if source.mesh.device_type == "cuda" else DENSE,
        dtype=_collected_dtype(source, wire),
        hosts=hosts,
    )


def _spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Spec of a distributed tensor, whose class is defined above this layer."""
    spec = getattr(tensor, "_spec", None)
    if not isinstance(spec, DTensorSpec):
        raise LocalTensorError(
            f"explain was given a {type(tensor).__name__} of shape {tuple(tensor.shape)}, which has no placements; "
            "allowed are a DTensor and a DTensorSpec"
        )
    return spec


def received_bytes(source: DTensorSpec, target: DTensorSpec) -> int:
    """Most bytes that any rank receives when a tensor goes from `source` to `target`; equal on every rank.

    Counted rank by rank on meshes of up to 1,024 ranks where nothing is reduced, as by one exchange; else estimated.
    """
    itemsize = source.dtype.itemsize
    if source.layout.num_ranks <= MAX_COUNTED and not source.layout.axes_where(Partial):
        traffic = step_traffic(Step("exchange", source.layout, target.layout))
        coordinates = target.layout.coordinates()
        return max(traffic.arriving(each) - traffic.kept(each) for each in coordinates) * itemsize
    plan, costs = plan_for(source, target), costs_of(source)
    return round(sum(step_cost(step, itemsize, costs).received_elements for step in plan.steps) * itemsize)


@lru_cache(maxsize=4096)
def compile_plan(
    source: DTensorSpec,
    target: DTensorSpec,
    strides: tuple[int, ...],
    device: torch.device,
    wire_dtype: torch.dtype | None,
    in_messages: bool = False,
) -> CompiledPlan:
    """Compiled plan of this rank for a pair of specs and a local tensor of the given strides and device.

    `wire_dtype` is what messages hold, narrower than the tensor's dtype, or None for that. `in_messages` is for who
    makes other messages of these, and takes no collectives.
    """
    plan, whole, carriers = _carried(source, target, wire_dtype, in_messages=in_messages)
    communicator, device_type = None, source.mesh.device_type
    if any(carriers):
        communicator = world.current().communicator(whole, device_type)
    first = Start(strides, device, wire_dtype)
    starts = (first._replace(strides=None) if number else first for number in range(len(plan.steps)))
    steps = tuple(
        _compiled_step(step, number, plan, source, start, carrier(own, whole, device_type) if own else None)
        for number, (step, start, own) in enumerate(zip(plan.steps, starts, carriers, strict=True), 1)
    )
    if communicator is not None:
        exchanged = [step for step in steps if step.communicator is communicator]
        communicator.prepare([step.transfer for step in exchanged if step.transfer is not None])
    last = max((place for place, step in enumerate(plan.steps) if step.kind != "gather"), default=0)
    sides = (
        f"{spec.layout}" if plan.source_ranks is None else f"{spec.layout} of {spec.mesh}" for spec in (source, target)
    )
    made = CompiledPlan(steps, communicator, last, f"{' -> '.join(sides)} of {source.shape}")
    for hook in on_compiled:
        hook(source, target, wire_dtype, made)
    return made


def _compiled_step(
    step: Step,
    number: int,
    plan: Plan,
    spec: DTensorSpec,
    start: Start,
    communicator: Communicator | None,
) -> CompiledStep:
    rank = spec.mesh.identity.rank if plan.source_ranks is not None else _own_position(spec)
    if step.kind == "scale":
        return CompiledStep(step, None, None, None, step.local_shape(plan.coordinate(rank)), None, None)
    found = step.exchange_of(rank)
    if start.wire_dtype is not None and not (step.moving_axes and _sends(step)):
        start = start._replace(wire_dtype=None)
    if step.kind == "gather" and start.wire_dtype is None:
        found = replace(found, keeps=())  # what this rank reduced lies in the target already
    if plan.source_ranks is None:
        found = with_peers(found, spec.mesh.ranks)
    if communicator is not None:
        found = with_peers(found, {peer: place for place, peer in enumerate(sorted(communicator.ranks))})
    description = step_text(step, number, len(plan.steps), spec.shape, start, spec.dtype)
    if plan.source_ranks is not None and plan.target_ranks is not None:
        description += f" from ranks {ranks_text(plan.source_ranks)} to {ranks_text(plan.target_ranks)}"
    return compiled_step(
        step,
        Side(found, *rank_blocks(step, rank, start.strides), step.target_coordinate(rank), step.fill_op_of(rank)),
        start,
        spec.dtype,
        _fingerprint(plan, number, spec, start.wire_dtype),
        description,
        communicator,
        role=_role(plan, rank),
    )


def _own_position(spec: DTensorSpec) -> int:
    """Position of this rank in the mesh of a spec."""
    assert spec.coordinate is not None, f"{spec} is compiled on a rank outside its mesh"
    return spec.layout.position(spec.coordinate)


def _sends(step: Step) -> bool:
    """Whether any rank sends anything in a step, found rank by rank; taken for granted on over 1,024 ranks."""
    return len(step.ranks) > MAX_COUNTED or any(step.received_elements)


def _fingerprint(plan: Plan, number: int, spec: DTensorSpec, wire_dtype: torch.dtype | None) -> int:
    if plan.source_ranks is not None:
        sides = f"{plan.source!r} at {plan.source_ranks} {plan.target!r} at {plan.target_ranks}"
        return exchange_fingerprint(f"{sides} {number} {spec.dtype} {wire_dtype}")
    text = f"{plan.source!r} {plan.target!r} {number} {spec.dtype} {wire_dtype} {spec.mesh.shape} {spec.mesh.ranks}"
    collective = plan.steps[number - 1].collective
    return exchange_fingerprint(text if collective is None else f"{text} {collective.name}")


def _role(plan: Plan, rank: int) -> Role:
    """The role of a rank between meshes: it is in the mesh that sends, in the one that receives, or in both."""
    if plan.source_ranks is None or plan.target_ranks is None:
        return ""
    if rank not in plan.target_ranks:
        return "source"
    return "both" if rank in plan.source_ranks else "target"


identity.on_end(compile_plan.cache_clear)
