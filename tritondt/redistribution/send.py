"""Redistribution of a tensor from some ranks of a mesh to all, on the communicator of the mesh.

It goes between two meshes, that of the senders and the target's: by one exchange, in which every rank receives what it
lacks. Over several hosts it may have two: what a host lacks crosses to it once, and is then spread inside.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from tritondt import events, identity
from tritondt.comm.communicator import Traffic
from tritondt.errors import LocalTensorError
from tritondt.kernels.memory import allocate
from tritondt.planning.across import make_plan_across
from tritondt.planning.exchange import with_peers
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.plan import Plan, Step
from tritondt.planning.storage import rank_blocks
from tritondt.redistribution.compile import carrier, carriers_on_hosts, costs_of, hosts_of_ranks
from tritondt.redistribution.compiled_step import CompiledPlan, CompiledStep, Side, Start, compiled_step
from tritondt.redistribution.refusals import refuse_carried
from tritondt.redistribution.run import check_address, run_into
from tritondt.sharding.layout import Layout
from tritondt.sharding.spec import DTensorSpec


def distribute_from(
    local: torch.Tensor, source: Layout, positions: tuple[int, ...], target: DTensorSpec, *, in_place: bool = False
) -> torch.Tensor:
    """Part of this rank under `target` of the tensor that the ranks at mesh `positions` hold as `source` says.

    `positions` are row-major places in the target's mesh, one per coordinate of the source. A collective call of all
    ranks of the mesh; `local` counts on senders only, and is the result there with `in_place`, which says that a sender
    holds its part already. Otherwise the result is a new tensor. Raises PeerError, MismatchError, TransportError.
    """
    if target.coordinate is None:
        return local.new_empty((0,))
    mesh = target.mesh
    sends = target.layout.position(target.coordinate) in positions
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    if sends:
        _check_or_refuse(local, source, positions, target)
    whole = local if in_place and sends else allocate(target.local_shape, target.dtype, torch.device(mesh.device_type))
    steps, communicator, last, description = _compile_send(
        source, positions, target, local.stride() if sends else None, in_place and sends, whole.device
    )
    assert communicator is not None, f"{description} without a communicator"
    given, started = local if sends else whole.new_empty(0), time.perf_counter()
    if len(steps) == 1:
        run_into(steps, given, whole, last)
    else:
        communicator.in_order(partial(run_into, steps, given, whole, last), description)
    if events.enabled():
        seconds = time.perf_counter() - started
        senders = f"{source} of {len(positions)} of {len(mesh.ranks)} ranks"
        events.emit_step("send", senders, str(target.layout), target.shape, _traffic(steps), seconds=seconds)
    return whole


def _traffic(steps: Sequence[CompiledStep]) -> Traffic:
    """Bytes and messages of this rank in all steps."""
    found = Traffic()
    for step in steps:
        if step.communicator is not None and step.transfer is not None:
            moved = step.communicator.traffic_of(step.transfer)
            found.count(moved.sent_bytes, moved.received_bytes, moved.num_sent, moved.num_received)
    return found


def _check_or_refuse(local: torch.Tensor, source: Layout, positions: tuple[int, ...], target: DTensorSpec) -> None:
    """Raises LocalTensorError for a tensor without memory, once the ranks that wait for this one know."""
    try:
        check_address(local, target)
    except LocalTensorError as error:
        _, carriers = _carried(source, positions, target)
        refuse_carried(tuple(sorted(target.mesh.ranks)), carriers, target.mesh.device_type, error)
        raise


def _carried(
    source: Layout, positions: tuple[int, ...], target: DTensorSpec
) -> tuple[Plan, tuple[tuple[int, ...], ...]]:
    """Plan of a send, equal on all ranks of the mesh, and the ranks that exchange with this one in each step."""
    mesh = target.mesh
    senders, whole = tuple(mesh.ranks[position] for position in positions), tuple(sorted(mesh.ranks))
    hosts = hosts_of_ranks(whole)
    if hosts:
        sides = (source, senders, target.layout, mesh.ranks)
        plan = make_plan_across(*sides, target.dtype.itemsize, costs_of(target), hosts)
        if len(plan.steps) > 1:
            return plan, carriers_on_hosts(plan, whole, mesh, hosts)
    # Exchanged also where nobody lacks anything: ranks that mean other senders hear of each other.
    step = Step("exchange", source, target.layout, source_ranks=senders, target_ranks=mesh.ranks)
    return Plan(source, target.layout, (step,), senders, mesh.ranks), (whole,)


@lru_cache(maxsize=1024)
def _compile_send(
    source: Layout,
    positions: tuple[int, ...],
    target: DTensorSpec,
    strides: tuple[int, ...] | None,
    in_place: bool,
    device: torch.device,
) -> CompiledPlan:
    mesh, rank = target.mesh, target.mesh.identity.rank
    plan, carriers = _carried(source, positions, target)
    whole, last = tuple(sorted(mesh.ranks)), len(plan.steps) - 1
    text = f"sending {target} from rank {', '.join(str(mesh.ranks[position]) for position in positions)}"
    steps = []
    for number, (step, ranks) in enumerate(zip(plan.steps, carriers, strict=True)):
        found = with_peers(step.exchange_of(rank), {peer: place for place, peer in enumerate(ranks)})
        if in_place and number == last:
            found = replace(found, keeps=())
        start = Start(None if number else strides, device, None)
        part = "" if last == 0 else f", step {number + 1} of {last + 1}"
        steps.append(
            compiled_step(
                step,
                Side(
                    found,
                    *rank_blocks(step, rank, start.strides),
                    step.target_coordinate(rank),
                    step.fill_op_of(rank),
                ),
                start,
                target.dtype,
                exchange_fingerprint(f"{source!r} at {positions} -> {target!r}{part}"),
                text + part,
                carrier(ranks, whole, mesh.device_type) if ranks else None,
            )
        )
    return CompiledPlan(tuple(steps), carrier(whole, whole, mesh.device_type), last, text)


identity.on_end(_compile_send.cache_clear)
