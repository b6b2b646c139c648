"""Redistribution between two meshes of one world, compiled on one rank of either.

All exchanges of a plan run on the communicator of the ranks of both meshes, those in which a rank has no part too: so
every rank counts them alike.
"""

from dataclasses import replace

import torch

from tritondt.comm import world
from tritondt.comm.communicator import Communicator, Role
from tritondt.errors import LayoutError, MeshError
from tritondt.planning.across import PlanAcross, StepAcross, make_plan_across
from tritondt.planning.exchange import Exchange, Message
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.redistribution.compiled_step import CompiledPlan, CompiledStep, Side, Start, compiled_step, step_text
from tritondt.sharding.coordinates import ranks_text
from tritondt.sharding.spec import DTensorSpec


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


def plan_across(source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None = None) -> PlanAcross:
    """Plan of a pair of specs on two meshes, equal on every rank; `wire_dtype` is None or a narrower dtype."""
    if source.mesh.device_type != target.mesh.device_type:
        raise MeshError(
            f"cannot go from {source.mesh} to {target.mesh}: the one is of {source.mesh.device_type}, the other of "
            f"{target.mesh.device_type}; both must be of one type: move the local tensor to the other device first"
        )
    check_dtypes(source, target)
    itemsize = (source.dtype if wire_dtype is None else wire_dtype).itemsize
    costs = world.current().costs_for(source.mesh.device_type)
    return make_plan_across(source.layout, source.mesh.ranks, target.layout, target.mesh.ranks, itemsize, costs)


def compiled_across(source: DTensorSpec, target: DTensorSpec, start: Start) -> CompiledPlan:
    """Compiled plan of this rank, which is in either mesh, for a pair of specs on two meshes."""
    plan = plan_across(source, target, start.wire_dtype)
    ranks, communicator = tuple(sorted({*source.mesh.ranks, *target.mesh.ranks})), None
    if any(step.moving_axes for step in plan.steps):
        communicator = world.current().communicator(ranks, source.mesh.device_type)
    place_of = {rank: place for place, rank in enumerate(ranks)}
    steps = []
    for number, step in enumerate(plan.steps, 1):
        own_start = start if number == 1 else start._replace(strides=None)
        if not step.moving_axes:
            own_start = own_start._replace(wire_dtype=None)
        side = _side(step, source.mesh.identity.rank, own_start, place_of)
        steps.append(_compiled(step, side, number, plan, source, own_start, communicator))
    last = max(place for place, step in enumerate(plan.steps) if step.kind != "gather")
    return CompiledPlan(tuple(steps), communicator, last, _text(source, target))


def _side(step: StepAcross, rank: int, start: Start, place_of: dict[int, int]) -> Side:
    found = step.exchange_of(rank)
    if step.kind == "gather" and start.wire_dtype is None:
        found = replace(found, keeps=())  # what this rank reduced lies in the target already

    def placed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(Message(place_of[message.peer], message.parts) for message in messages)

    exchange: Exchange = replace(found, sends=placed(found.sends), receives=placed(found.receives))
    source_blocks, target_blocks = step.blocks_of(rank, start.strides)
    return Side(exchange, source_blocks, target_blocks, step.target_coordinate(rank), step.fill_op_of(rank))


def _compiled(
    step: StepAcross,
    side: Side,
    number: int,
    plan: PlanAcross,
    spec: DTensorSpec,
    start: Start,
    communicator: Communicator | None,
) -> CompiledStep:
    text = (
        f"{plan.source!r} at {plan.source_ranks} {plan.target!r} at {plan.target_ranks} {number} {spec.dtype} "
        f"{start.wire_dtype}"
    )
    description = step_text(step, number, len(plan.steps), spec.shape, start, spec.dtype)
    return compiled_step(
        step,
        side,
        start,
        spec.dtype,
        exchange_fingerprint(text),
        f"{description} from ranks {ranks_text(plan.source_ranks)} to {ranks_text(plan.target_ranks)}",
        communicator if step.moving_axes else None,
        role=_role(plan, spec.mesh.identity.rank),
    )


def _role(plan: PlanAcross, rank: int) -> Role:
    """The role of a rank in the redistribution: it is in the mesh that sends, in the one that receives, or in both."""
    if rank not in plan.target_ranks:
        return "source"
    return "both" if rank in plan.source_ranks else "target"


def _text(source: DTensorSpec, target: DTensorSpec) -> str:
    return f"{source.layout} of {source.mesh} -> {target.layout} of {target.mesh} of {source.shape}"
