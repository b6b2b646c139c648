"""Redistribution of a tensor from some ranks of a mesh to all: one exchange in which every rank receives what it lacks.

The exchange goes between two meshes, that of the senders and the target's, and runs on the target's communicator.
"""

import time
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from tritondt import events, identity
from tritondt.comm import world
from tritondt.comm.communicator import Transfer
from tritondt.errors import LocalTensorError
from tritondt.kernels.memory import allocate
from tritondt.planning.exchange import Route, exchange_across, renumber_peers
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.storage import blocks
from tritondt.redistribution.compiled_step import identity_element
from tritondt.redistribution.refusals import refuse_on
from tritondt.redistribution.run import check_address
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec


class _CompiledSend(NamedTuple):
    """Side of one rank of a send, with all that does not change from call to call."""

    transfer: Transfer
    fill: float | int | bool | None


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
    communicator = world.current().communicator(mesh.ranks, mesh.device_type)
    before, started = replace(communicator.traffic), time.perf_counter()
    communicator.exchange([local if sends else whole.new_empty(0)], [whole], found.transfer)
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
) -> _CompiledSend:
    coordinate, layout = target.coordinate, target.layout
    assert coordinate is not None, f"{target} is compiled on a rank outside its mesh"
    own = layout.position(coordinate)
    everybody = tuple(range(layout.num_ranks))
    found = exchange_across(source, positions, layout, everybody, own)
    if in_place:
        found = replace(found, keeps=())
    text = f"{source!r} at {positions} -> {target!r}"
    sender = source.coordinate(positions.index(own)) if own in positions else None
    transfer = Transfer(
        exchange=renumber_peers(found, target.mesh.ranks),
        source_blocks=(() if sender is None else blocks(source, sender, strides),),
        target_blocks=(blocks(layout, coordinate),),
        dtypes=(target.dtype,),
        reductions=(None,),
        fingerprint=exchange_fingerprint(text),
        description=f"sending {target} from rank {', '.join(str(target.mesh.ranks[place]) for place in positions)}",
        device=device,
    )
    return _CompiledSend(transfer, _fill(Route(source, layout, positions, everybody), target))


identity.on_end(_compile_send.cache_clear)


def _fill(route: Route, target: DTensorSpec) -> float | int | bool | None:
    """Value that fills the tensor of a rank that takes nothing: the identity of its sum or product."""
    assert target.coordinate is not None, f"{target} is filled on a rank outside its mesh"
    if not route.takes_nothing(target.coordinate):
        return None
    ops = [placement.reduce_op for placement in target.placements if isinstance(placement, Partial)]
    return identity_element(ops[0], target.dtype)
