"""Redistribution of a tensor from some ranks of a mesh to all: one exchange in which every rank receives what it lacks.

The exchange goes between two meshes, that of the senders and the target's, and runs on the target's communicator.
"""

import time
from dataclasses import replace
from functools import lru_cache

import torch

from tritondt import events, identity
from tritondt.comm import world
from tritondt.errors import LocalTensorError
from tritondt.kernels.memory import allocate
from tritondt.planning.exchange import with_peers
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.plan import Step
from tritondt.planning.storage import rank_blocks
from tritondt.redistribution.compiled_step import CompiledStep, Side, Start, compiled_step
from tritondt.redistribution.refusals import refuse_on
from tritondt.redistribution.run import check_address
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
        _check_or_refuse(local, target)
    whole = local if in_place and sends else allocate(target.local_shape, target.dtype, torch.device(mesh.device_type))
    found = _compile_send(
        source, positions, target, local.stride() if sends else None, in_place and sends, whole.device
    )
    if found.fill is not None:
        whole.fill_(found.fill)
    communicator, transfer = found.communicator, found.transfer
    assert communicator is not None, f"{found.step} is sent without a communicator"
    assert transfer is not None, f"{found.step} is sent without a transfer"
    before, started = replace(communicator.traffic), time.perf_counter()
    communicator.exchange([local if sends else whole.new_empty(0)], [whole], transfer)
    if events.enabled():
        seconds = time.perf_counter() - started
        senders = f"{source} of {len(positions)} of {len(mesh.ranks)} ranks"
        events.emit_step("send", senders, str(target.layout), target.shape, communicator.traffic, before, seconds)
    return whole


def _check_or_refuse(local: torch.Tensor, target: DTensorSpec) -> None:
    """Raises LocalTensorError for a tensor without memory, once the ranks that wait for this one know."""
    try:
        check_address(local, target)
    except LocalTensorError as error:
        refuse_on(target.mesh, error)
        raise


@lru_cache(maxsize=1024)
def _compile_send(
    source: Layout,
    positions: tuple[int, ...],
    target: DTensorSpec,
    strides: tuple[int, ...] | None,
    in_place: bool,
    device: torch.device,
) -> CompiledStep:
    mesh, rank = target.mesh, target.mesh.identity.rank
    senders = tuple(mesh.ranks[position] for position in positions)
    step = Step("exchange", source, target.layout, source_ranks=senders, target_ranks=mesh.ranks)
    found = with_peers(step.exchange_of(rank), {peer: place for place, peer in enumerate(sorted(mesh.ranks))})
    if in_place:
        found = replace(found, keeps=())
    return compiled_step(
        step,
        Side(found, *rank_blocks(step, rank, strides), target.coordinate, step.fill_op_of(rank)),
        Start(strides, device, None),
        target.dtype,
        exchange_fingerprint(f"{source!r} at {positions} -> {target!r}"),
        f"sending {target} from rank {', '.join(map(str, senders))}",
        world.current().communicator(mesh.ranks, mesh.device_type),
    )


identity.on_end(_compile_send.cache_clear)
