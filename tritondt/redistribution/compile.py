"""Compilation of a pair of specs on this rank: plan, boxes, descriptor tables and the communicator, decided once."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from tritondt.comm import registry, world
from tritondt.comm.communicator import Communicator, Reduction, Transfer
from tritondt.comm.packing.packed_transfer import packed_transfer
from tritondt.comm.packing.wire_dtype import is_scaled, narrower
from tritondt.errors import LayoutError, MeshError
from tritondt.kernels.boxes import SCALE_BYTES
from tritondt.kernels.tables import Table
from tritondt.planning.cost import step_cost
from tritondt.planning.exchange import renumber_peers
from tritondt.planning.explain import Explanation, explain_layouts
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Plan, Step
from tritondt.planning.planner import make_plan
from tritondt.planning.storage import step_blocks
from tritondt.sharding import intervals as regions
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Partial, ReduceOp
from tritondt.sharding.spec import DTensorSpec

_MAX_COUNTED = 1024


class CompiledStep(NamedTuple):
    """A step with all that does not change from call to call.

    `target_shape` is what a step allocates: the local tensor, or for a reduction into flat pieces the whole
    tensor around them, of which `piece` is the range that this rank reduces.
    """

    step: Step
    transfer: Transfer | None
    communicator: Communicator | None
    keep: Table | None
    target_shape: tuple[int, ...]
    piece: tuple[int, int] | None
    fill: float | int | bool | None


class _Start(NamedTuple):
    """Start of a step: strides of its tensor, None for dense ones, its device, and the dtype of messages, None for
    the tensor's.
    """

    strides: tuple[int, ...] | None
    device: torch.device
    wire_dtype: torch.dtype | None


class CompiledPlan(NamedTuple):
    """Steps of a pair of specs on this rank, and their communicator, None where nothing is exchanged.

    `last` is the step that allocates the result: one that gathers writes into the tensor of the step before.
    """

    steps: tuple[CompiledStep, ...]
    communicator: Communicator | None
    last: int
    description: str


def plan_for(source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None = None) -> Plan:
    """Plan of a pair of specs on one mesh, equal on every rank; `wire_dtype` is None or a narrower dtype."""
    if source.mesh is not target.mesh:
        raise MeshError(
            f"cannot go from {source.mesh} to {target.mesh}: source and target must be on one mesh, of the same "
            "ranks in the same grid"
        )
    if source.dtype is not target.dtype:
        raise LayoutError(f"cannot go from {source} to {target}: the dtypes differ; convert the local tensor first")
    itemsize = (source.dtype if wire_dtype is None else wire_dtype).itemsize
    return make_plan(source.layout, target.layout, itemsize, world.current().costs)


def explain(source: DTensorSpec, target: DTensorSpec, *, wire_dtype: torch.dtype | None = None) -> Explanation:
    """Explanation of a redistribution from `source` to `target` on this rank, before anything moves.

    Both specs are on one mesh, and of one global shape and dtype; `wire_dtype` is that of `redistribute`. Not a
    collective call. The result has `steps`, each with messages, bytes sent and received, temporary bytes and predicted
    seconds, and the totals `sent_bytes`, `received_bytes`, `messages`, `seconds`, `peak_bytes` (temporary) and
    `num_peers`; str() is a table, `to_json()` a JSON object. Bytes and messages are exact; seconds follow from the
    world's cost table.

    Raises MeshError for specs on different meshes, LayoutError for specs of different shapes or dtypes, and
    TransportError for a `wire_dtype` that the tensor's dtype cannot travel in.

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
    wire = narrower(source.dtype, wire_dtype)
    plan_for(source, target, wire)
    return explain_layouts(
        source.layout,
        target.layout,
        source.dtype.itemsize,
        world.current().costs,
        source.coordinate,
        wire_itemsize=None if wire is None else wire.itemsize,
        scale_bytes=SCALE_BYTES if wire is not None and is_scaled(wire) else 0,
    )


def received_bytes(source: DTensorSpec, target: DTensorSpec) -> int:
    """Most bytes that any rank receives when a tensor goes from `source` to `target`; equal on every rank.

    Counted rank by rank on meshes of up to 1,024 ranks where nothing is reduced, else the planner's upper bound.
    """
    itemsize = source.dtype.itemsize
    if source.layout.num_ranks <= _MAX_COUNTED and not source.layout.axes_where(Partial):
        return max(map(partial(_lacking, source.layout, target.layout), target.layout.coordinates())) * itemsize
    plan, costs = plan_for(source, target), world.current().costs
    return round(sum(step_cost(step, itemsize, costs).received_elements for step in plan.steps) * itemsize)


def _lacking(source: Layout, target: Layout, coordinate: Coordinate) -> int:
    """Number of elements of its region under `target` that a coordinate does not hold under `source`."""
    wanted = target.region(coordinate)
    held = regions.intersect(source.region(coordinate), wanted)
    return regions.numel(wanted) - (0 if held is None else regions.numel(held))


@lru_cache(maxsize=4096)
def compile_plan(
    source: DTensorSpec,
    target: DTensorSpec,
    strides: tuple[int, ...],
    device: torch.device,
    wire_dtype: torch.dtype | None,
) -> CompiledPlan:
    """Compiled plan of this rank for a pair of specs and a local tensor of the given strides and device.

    `wire_dtype` is what messages hold, narrower than the tensor's dtype, or None for that.
    """
    plan = plan_for(source, target, wire_dtype)
    communicator = None
    if any(step.moving_axes for step in plan.steps):
        communicator = world.current().communicator(source.mesh.ranks, source.mesh.device_type)
    starts = (_Start(None if number else strides, device, wire_dtype) for number in range(len(plan.steps)))
    steps = tuple(
        _compiled_step(step, number, plan, source, start, communicator)
        for number, (step, start) in enumerate(zip(plan.steps, starts, strict=True), 1)
    )
    last = max((place for place, step in enumerate(plan.steps) if step.kind != "gather"), default=0)
    return CompiledPlan(steps, communicator, last, f"{source.layout} -> {target.layout} of {source.shape}")


def _compiled_step(
    step: Step,
    number: int,
    plan: Plan,
    spec: DTensorSpec,
    start: _Start,
    communicator: Communicator | None,
) -> CompiledStep:
    coordinate = spec.coordinate
    assert coordinate is not None, f"{spec} is compiled on a rank outside its mesh"
    shape = step.target_layout.local_shape(coordinate)
    if step.kind == "scale":
        return CompiledStep(step, None, None, None, shape, None, None)
    found, moves = step.exchange(coordinate), bool(step.moving_axes)
    wire_dtype = start.wire_dtype
    if wire_dtype is not None and not (moves and _sends(step)):
        wire_dtype = None
    if step.kind == "gather" and wire_dtype is None:
        found = replace(found, keeps=())  # what this rank reduced lies in the target already
    source_blocks, target_blocks = step_blocks(step, coordinate, start.strides)
    dtype = str(spec.dtype) if wire_dtype is None else f"{spec.dtype} as {wire_dtype}"
    description = f"step {number} of {len(plan.steps)} ({step}) of {spec.shape} {dtype.replace('torch.', '')}"
    transfer = Transfer(
        exchange=renumber_peers(found, spec.mesh.ranks),
        source_blocks=(source_blocks,),
        target_blocks=(target_blocks,),
        dtypes=(spec.dtype,),
        reductions=(None if step.reduce_op is None else Reduction(step.reduce_op, step.divisor),),
        fingerprint=_fingerprint(plan, number, spec, wire_dtype),
        description=description,
        device=start.device,
        wire_dtype=wire_dtype,
    )
    return CompiledStep(
        step,
        transfer,
        communicator if moves else None,
        None if moves else packed_transfer(transfer).keep,
        shape,
        step.target.bounds(coordinate) if isinstance(step.target, FlatPieces) else None,
        None if step.fill_op is None else identity_element(step.fill_op, spec.dtype),
    )


def _sends(step: Step) -> bool:
    """Whether any rank sends anything in a step, found rank by rank; taken for granted on meshes of over 1,024."""
    layout = step.target_layout
    return layout.num_ranks > _MAX_COUNTED or any(step.exchange(it).receives for it in layout.coordinates())


def _fingerprint(plan: Plan, number: int, spec: DTensorSpec, wire_dtype: torch.dtype | None) -> int:
    text = f"{plan.source!r} {plan.target!r} {number} {spec.dtype} {wire_dtype} {spec.mesh.shape} {spec.mesh.ranks}"
    return exchange_fingerprint(text)


def identity_element(op: ReduceOp, dtype: torch.dtype) -> float | int | bool:
    """Identity of a reduction: 0, 1, or the dtype's lowest or highest value.

    >>> identity_element("max", torch.int8), identity_element("min", torch.float32)
    (-128, inf)
    """
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


registry.on_end(compile_plan.cache_clear)
