"""Buckets of a list of redistributions: which tensors share exchanges, and what those move.

Plans of single tensors are made as ever. Tensors whose plans run on one communicator share its exchanges, in the order
of the list, as many of them as a bucket holds: first steps with first steps, second ones with second ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from tritondt import identity
from tritondt.comm import world
from tritondt.comm.communicator import Communicator, Transfer
from tritondt.kernels.memory import Shape, shape_of
from tritondt.planning.exchange import Exchange, merge
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.redistribution.compile import carrier, compile_plan, exchanging_ranks
from tritondt.redistribution.compiled_step import CompiledPlan, CompiledStep
from tritondt.sharding.coordinates import ranks_text
from tritondt.sharding.spec import DTensorSpec


class Group(NamedTuple):
    """Tensors of one bucket, by place in the list, the ranks that share them, and those of each exchange.

    Where these are fewer than all in some exchanges, all tensors of the bucket have the same ones.
    """

    places: tuple[int, ...]
    ranks: tuple[int, ...]
    device_type: str
    exchanges: tuple[tuple[int, ...], ...] = ()

    @property
    def communicator(self) -> Communicator:
        """The communicator of the exchanges."""
        return world.current().communicator(self.ranks, self.device_type)

    @property
    def carriers(self) -> list[Communicator]:
        """The communicator of each exchange."""
        return [carrier(ranks, self.ranks, self.device_type) for ranks in self.exchanges]


# Messages of this size run at the speed of the link, and packed ones are still in the cache when they are sent.
BUCKET_BYTES = 4 << 20
# In shared memory messages go in chunks whatever the bucket, and ranks meet once in each: a list of 200 tensors took
# 0.63 to 0.71 of the time of single redistributions in buckets of 64 MB, 0.72 in those of 4.
_IN_SHARED_MEMORY = 64 << 20

# What each local tensor is part of, and what is wanted.
Pairs = tuple[tuple[DTensorSpec, DTensorSpec], ...]


@lru_cache(maxsize=256)
def groups_of(pairs: Pairs, bucket_bytes: int | None) -> tuple[Group, ...]:
    """Buckets of a list of sources and targets, equal on all ranks of each; tensors that move nothing are in none."""
    closed, filling = list[Group](), dict[object, tuple[Group, int]]()
    for place, (source, target) in enumerate(pairs):
        if source is target or (source.coordinate is None and target.coordinate is None):
            continue
        ranks, exchanges = exchanging_ranks(source, target, in_messages=True)
        if not exchanges:
            continue
        device_type = source.mesh.device_type
        # One after another, exchanges of all ranks are shared by plans of any length.
        key = ranks, device_type, exchanges if {*exchanges} != {ranks} else ()
        num_bytes = max(source.layout.max_local_numel, target.layout.max_local_numel) * source.dtype.itemsize
        group, filled = filling.get(key, (Group((), ranks, device_type), 0))
        if group.places and filled + num_bytes > (bucket_bytes or _most_bytes(ranks, device_type)):
            closed.append(group)
            group, filled = Group((), ranks, device_type), 0
        group = group._replace(places=(*group.places, place), exchanges=max(group.exchanges, exchanges, key=len))
        filling[key] = group, filled + num_bytes
    # In an order that all ranks share: that of the first tensor in each.
    return tuple(sorted((*closed, *(group for group, _ in filling.values()))))


def _most_bytes(ranks: tuple[int, ...], device_type: str) -> int:
    """Bytes of a bucket where none are asked for."""
    shares_memory = world.current().costs_for(device_type).shares_memory(len(ranks))
    return _IN_SHARED_MEMORY if shares_memory else BUCKET_BYTES


class Bucket(NamedTuple):
    """Plans of the tensors of a group and, per exchange, the tensors in it, by place in the group, and the transfer.

    `results` are shapes, on `device`, where the plans are one exchange each, for which nothing is made ready.
    """

    group: Group
    communicator: Communicator
    plans: tuple[CompiledPlan, ...]
    members: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]
    description: str
    results: tuple[Shape, ...] | None
    device: torch.device


_Held = tuple[tuple[tuple[int, ...], torch.device], ...]


@lru_cache(maxsize=256)
def compiled_list(pairs: Pairs, held: _Held, bucket_bytes: int | None) -> tuple[tuple[int, ...], tuple[Bucket, ...]]:
    """Places of the tensors of a list that are in no bucket, and its buckets.

    `held` are the strides and devices of the local tensors of this rank.
    """
    groups = groups_of(pairs, bucket_bytes)
    written = sum(_num_bytes(pairs[place][1]) for group in groups for place in group.places)
    shared = {place for group in groups for place in group.places}
    alone = tuple(place for place in range(len(pairs)) if place not in shared)
    return alone, tuple(_bucket(group, pairs, held, written) for group in groups)


def _num_bytes(spec: DTensorSpec) -> int:
    """Bytes of this rank's part."""
    return prod(spec.local_shape) * spec.dtype.itemsize


def _bucket(group: Group, pairs: Pairs, held: _Held, written_bytes: int) -> Bucket:
    plans = tuple(compile_plan(*pairs[place], *held[place], None, True) for place in group.places)
    exchanging = [[step for step in plan.steps if step.communicator is not None] for plan in plans]
    communicator, carriers = group.communicator, group.carriers
    members, transfers = [], []
    num_bytes = sum(pairs[place][0].layout.numel * pairs[place][0].dtype.itemsize for place in group.places)
    text = f"{len(plans)} tensors of {num_bytes} bytes among ranks {ranks_text(group.ranks)}"
    rank, num_exchanges = pairs[0][0].mesh.identity.rank, len(carriers)
    for number, carrying in enumerate(carriers):
        own = carrying.ranks.index(rank)
        here = tuple(index for index, steps in enumerate(exchanging) if number < len(steps))
        members.append(here)
        description = f"exchange {number + 1} of {num_exchanges} of {text}"
        merged = _merged([exchanging[index][number] for index in here], own, description)
        transfers.append(replace(merged, result_bytes=written_bytes))
    results = None
    if all(len(plan.steps) == 1 and _is_plain(plan.steps[0]) for plan in plans):
        placed = zip(group.places, plans, strict=True)
        results = tuple(shape_of(plan.steps[0].target_shape, pairs[at][0].dtype) for at, plan in placed)
    device = held[group.places[0]][1]
    description = f"a redistribution of {text}"
    return Bucket(group, communicator, plans, tuple(members), tuple(transfers), description, results, device)


def _is_plain(step: CompiledStep) -> bool:
    """Whether a step is an exchange into a new tensor, all of which that writes."""
    is_whole = step.piece is None and step.fill is None and step.step.kind != "gather"
    return step.communicator is not None and step.transfer is not None and is_whole


def _merged(steps: Sequence[CompiledStep], own: int, description: str) -> Transfer:
    """The transfers of single tensors as one, with one message per peer; `own` is this rank's place."""
    single = [step.transfer for step in steps if step.transfer is not None]
    exchanges: list[Exchange] = [transfer.exchange for transfer in single]
    return Transfer(
        exchange=merge(exchanges, own, [transfer.dtypes[0].itemsize for transfer in single]),
        source_blocks=tuple(transfer.source_blocks[0] for transfer in single),
        target_blocks=tuple(transfer.target_blocks[0] for transfer in single),
        dtypes=tuple(transfer.dtypes[0] for transfer in single),
        reductions=tuple(transfer.reductions[0] for transfer in single),
        fingerprint=exchange_fingerprint(" ".join(str(transfer.fingerprint) for transfer in single)),
        description=description,
        device=single[0].device,
    )


identity.on_end(compiled_list.cache_clear)
identity.on_end(groups_of.cache_clear)
