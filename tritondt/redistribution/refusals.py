"""Exchanges in which a rank cannot take part: the ranks that wait for it hear why, and all count them as run.

A rank refuses as many exchanges of a communicator as the others of the call have before them. A rank that hears of one
refuses those that are left as well, for not every rank has a message of the rank at fault.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from tritondt import identity
from tritondt.comm import world
from tritondt.comm.communicator import Communicator
from tritondt.errors import PeerError, mark_told, was_told
from tritondt.redistribution.compile import carrier, exchanging_ranks
from tritondt.redistribution.compiled_step import CompiledStep
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta


def refuse_each(carriers: Sequence[Communicator], error: Exception) -> None:
    """Reports why this rank takes no part in the next exchange of each, where that has not failed for good."""
    for communicator in carriers:
        if communicator.is_usable:
            communicator.refuse(error)
            mark_told(error)


def refuse_rest(steps: Sequence[CompiledStep], error: PeerError) -> None:
    """Takes no part in the exchanges after one that another rank refused, and lets the others know.

    Not every rank had a message of that rank, and those that had none come to the next exchange.
    """
    refuse_each([step.communicator for step in steps if step.communicator is not None], error)


def refuse_on(mesh: Mesh, error: Exception, num_exchanges: int = 1) -> None:
    """Reports why this rank takes no part in the next exchanges of all ranks of `mesh`; a rank outside has none."""
    if mesh.coordinate is not None and len(mesh.ranks) > 1 and not identity.is_alone():
        refuse_each([world.current().communicator(mesh.ranks, mesh.device_type)] * num_exchanges, error)


def refuse_redistribution(source: DTensorSpec, target: DTensorSpec, error: Exception) -> None:
    """Lets the ranks that wait for this one, if any do, know that this rank will not come."""
    if identity.is_alone() or (source.coordinate is None and target.coordinate is None):
        return
    refuse_carried(*exchanging_ranks(source, target), source.mesh.device_type, error)


def refuse_carried(
    whole: tuple[int, ...], carriers: Sequence[tuple[int, ...]], device_type: str, error: Exception
) -> None:
    """Reports why this rank takes no part in the exchanges of `carriers`, in the order of those of `whole`."""
    if identity.is_alone():
        return
    if carriers:  # what was issued exchanges on all of them, in the order of the widest
        carrier(whole, whole, device_type).drain()
    refuse_each([carrier(ranks, whole, device_type) for ranks in carriers], error)


@contextmanager
def refusing_next(mesh: Mesh, num_exchanges: int = 1) -> Iterator[None]:
    """Context of local checks, or of a user's function, before exchanges of all ranks of `mesh`, each of one step.

    Exchanges in it tell the others of their own errors: only what nobody was told of is refused.
    """
    try:
        yield
    except Exception as error:
        if not was_told(error):
            refuse_on(mesh, error, num_exchanges)
        raise


@contextmanager
def refusing_redistributions(*pairs: tuple[DTensorSpec, DTensorSpec]) -> Iterator[None]:
    """As `refusing_next`, before redistributions from the firsts of `pairs` to the seconds, whatever their lengths."""
    try:
        yield
    except Exception as error:
        if not was_told(error):
            for source, target in pairs:
                refuse_redistribution(source, target, error)
        raise


def refusing_comparison(mesh: Mesh) -> AbstractContextManager[None]:
    """As `refusing_next`, before a comparison of all ranks of `mesh`, in which each has a message of all."""
    meta = TensorMeta.contiguous((len(mesh.ranks), 1), torch.int64)
    rows = DTensorSpec(mesh, [Shard(0)] * mesh.ndim, meta)
    return refusing_redistributions((rows, rows.with_placements([Replicate()] * mesh.ndim)))
