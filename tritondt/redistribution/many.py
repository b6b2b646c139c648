"""Redistribution of a list of tensors in few exchanges: one pack, one exchange and one unpack for each bucket of them.

Plans of single tensors are made as ever. Tensors whose plans run on one communicator share its exchanges, in the order
of the list, as many of them as a bucket holds: first steps with first steps, second ones with second ones.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from tritondt.comm import registry, world
from tritondt.comm.communicator import Communicator, Transfer
from tritondt.comm.work import Work
from tritondt.errors import LocalTensorError, PeerError, TransportError
from tritondt.events import subscribers
from tritondt.kernels.memory import allocate
from tritondt.planning.exchange import Exchange, merge
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.redistribution.compile import compile_plan, exchanging_ranks
from tritondt.redistribution.compiled_step import CompiledPlan, CompiledStep
from tritondt.redistribution.run import (
    check_local,
    emit_issued,
    has_memory,
    redistribute_local,
    refuse_exchanges,
    run_step,
    target_of,
    with_memory,
)
from tritondt.sharding.coordinates import ranks_text
from tritondt.sharding.spec import DTensorSpec


class LocalMove(NamedTuple):
    """Local tensor of this rank, what it is part of, what is wanted, and the work that fills it, if any."""

    local: torch.Tensor
    source: DTensorSpec
    target: DTensorSpec
    before: Work | None = None


class _Group(NamedTuple):
    """Tensors of one bucket, by place in the list, the ranks that share their exchanges, and how many there are."""

    places: tuple[int, ...]
    ranks: tuple[int, ...]
    device_type: str
    num_exchanges: int

    @property
    def communicator(self) -> Communicator:
        """The communicator of the exchanges."""
        return world.current().communicator(self.ranks, self.device_type)


_Pairs = tuple[tuple[DTensorSpec, DTensorSpec], ...]


@lru_cache(maxsize=256)
def _groups(pairs: _Pairs, bucket_bytes: int) -> tuple[_Group, ...]:
    """Buckets of a list of sources and targets, equal on all ranks of each; tensors that move nothing are in none."""
    closed, filling = list[_Group](), dict[tuple[tuple[int, ...], str], tuple[_Group, int]]()
    for place, (source, target) in enumerate(pairs):
        if source is target or (source.coordinate is None and target.coordinate is None):
            continue
        ranks, num_exchanges = exchanging_ranks(source, target, in_messages=True)
        if not num_exchanges:
            continue
        key = ranks, source.mesh.device_type
        num_bytes = max(source.layout.max_local_numel, target.layout.max_local_numel) * source.dtype.itemsize
        group, filled = filling.get(key, (_Group((), *key, 0), 0))
        if group.places and filled + num_bytes > bucket_bytes:
            closed.append(group)
            group, filled = _Group((), *key, 0), 0
        group = group._replace(places=(*group.places, place), num_exchanges=max(group.num_exchanges, num_exchanges))
        filling[key] = group, filled + num_bytes
    # In an order that all ranks share: that of the first tensor in each.
    return tuple(sorted((*closed, *(group for group, _ in filling.values()))))


class _Bucket(NamedTuple):
    """Plans of the tensors of a group and, per exchange, the tensors in it, by place in the group, and the transfer."""

    group: _Group
    communicator: Communicator
    plans: tuple[CompiledPlan, ...]
    members: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]
    description: str


_Held = tuple[tuple[tuple[int, ...], torch.device], ...]


@lru_cache(maxsize=256)
def _compiled(pairs: _Pairs, held: _Held, bucket_bytes: int) -> tuple[_Bucket, ...]:
    """Buckets of a list on this rank, whose local tensors have these strides and devices."""
    return tuple(_bucket(group, pairs, held) for group in _groups(pairs, bucket_bytes))


def _bucket(group: _Group, pairs: _Pairs, held: _Held) -> _Bucket:
    plans = tuple(compile_plan(*pairs[place], *held[place], None, True) for place in group.places)
    exchanging = [[step for step in plan.steps if step.communicator is not None] for plan in plans]
    communicator = group.communicator
    members, transfers = [], []
    num_bytes = sum(pairs[place][0].layout.numel * pairs[place][0].dtype.itemsize for place in group.places)
    text = f"{len(plans)} tensors of {num_bytes} bytes among ranks {ranks_text(group.ranks)}"
    own = communicator.ranks.index(pairs[0][0].mesh.identity.rank)
    for number in range(group.num_exchanges):
        here = tuple(index for index, steps in enumerate(exchanging) if number < len(steps))
        members.append(here)
        description = f"exchange {number + 1} of {group.num_exchanges} of {text}"
        transfers.append(_merged([exchanging[index][number] for index in here], own, description))
    return _Bucket(group, communicator, plans, tuple(members), tuple(transfers), f"a redistribution of {text}")


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


class _Run:
    """One run of a bucket: where each of its tensors has got to."""

    def __init__(self, bucket: _Bucket, locals_: Sequence[torch.Tensor]) -> None:
        self.bucket = bucket
        self.current, self.whole = list(locals_), list(locals_)  # the tensors around flat pieces are in `whole`
        self._next = [0] * len(locals_)
        self._into: list[torch.Tensor | None] = [None] * len(locals_)

    def allocate_results(self) -> list[torch.Tensor]:
        """The tensors that the run will fill."""
        made = [
            allocate(plan.steps[plan.last].target_shape, local.dtype, local.device)
            for plan, local in zip(self.bucket.plans, self.current, strict=True)
        ]
        self._into = list(made)
        return made

    def __call__(self) -> None:
        """Runs all exchanges, and the steps of single tensors between them."""
        communicator, bucket = self.bucket.communicator, self.bucket
        for number, (members, transfer) in enumerate(zip(bucket.members, bucket.transfers, strict=True)):
            operands = [self._prepared(index) for index in members]
            try:
                communicator.exchange([source for source, _ in operands], [into for _, into in operands], transfer)
            except PeerError as error:
                refuse_exchanges(communicator, len(bucket.transfers) - number - 1, error)
                raise
        for index in range(len(self.current)):
            self._run_alone(index)

    def _prepared(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensor that the next exchange of a tensor reads, and the one it writes."""
        self._run_alone(index)
        source, around = self.current[index], self.whole[index]
        step = self.bucket.plans[index].steps[self._next[index]]
        if step.step.kind == "gather":
            self.current[index], into = around, around.view(-1)
        else:
            into, self.whole[index] = target_of(step, source, self._at(index))
            self.current[index] = into
        self._next[index] += 1
        return source, into

    def _at(self, index: int) -> torch.Tensor | None:
        """The result of a tensor where its next step writes that."""
        return self._into[index] if self._next[index] == self.bucket.plans[index].last else None

    def _run_alone(self, index: int) -> None:
        """Runs the next steps of a tensor as far as they exchange nothing."""
        steps = self.bucket.plans[index].steps
        while self._next[index] < len(steps) and steps[self._next[index]].communicator is None:
            step = steps[self._next[index]]
            self.current[index], self.whole[index] = run_step(
                step, self.current[index], self.whole[index], self._at(index)
            )
            self._next[index] += 1


def redistribute_locals(moves: Sequence[LocalMove], bucket_bytes: int) -> list[torch.Tensor]:
    """Local tensors under their targets, in the order of the list; not differentiable.

    A collective call of all ranks of all meshes in it, with one list. `bucket_bytes` bounds the bytes that tensors of a
    bucket take on any rank, at least one tensor each. Raises as `redistribute_local` does, for any tensor of the list.
    """
    found, buckets = _prepare(moves, bucket_bytes)
    for place, bucket in enumerate(buckets):
        run = _Run(bucket, [with_memory(moves[index].local) for index in bucket.group.places])
        if subscribers:
            for plan in bucket.plans:
                emit_issued(plan.steps, bucket.communicator)
        try:
            bucket.communicator.in_order(run, bucket.description)
        except PeerError as error:
            for later in buckets[place + 1 :]:
                refuse_exchanges(later.communicator, len(later.transfers), error)
            raise
        for index, local in zip(bucket.group.places, run.current, strict=True):
            found[index] = local
    return found


def redistribute_locals_async(
    moves: Sequence[LocalMove], bucket_bytes: int
) -> tuple[list[torch.Tensor], list[Work | None]]:
    """Tensors that will hold the results, and the Work of each, one for a bucket; None where the result is there.

    Local tensors are read until then. What fills one of them is waited for at once where it runs elsewhere.
    """
    found, buckets = _prepare(moves, bucket_bytes)
    works: list[Work | None] = [None] * len(moves)
    for bucket in buckets:
        places, communicator = bucket.group.places, bucket.communicator
        before = [work for index in places if (work := moves[index].before) is not None]
        for work in before:
            if not communicator.has_issued(work):
                work.wait()
        held = [with_memory(moves[index].local) for index in places]
        run = _Run(bucket, held)
        results = run.allocate_results()
        if subscribers:
            for plan in bucket.plans:
                emit_issued(plan.steps, communicator)
        ready = not any(communicator.has_issued(work) for work in before)
        issued = communicator.issue(run, bucket.description, held, sources_ready=ready)
        for index, local in zip(places, results, strict=True):
            found[index], works[index] = local, issued
    return found, works


def _prepare(moves: Sequence[LocalMove], bucket_bytes: int) -> tuple[list[torch.Tensor], list[_Bucket]]:
    """Results of the tensors that are in no bucket, others as they were given, and the buckets."""
    if bucket_bytes < 1:
        raise TransportError(f"bucket_bytes={bucket_bytes} was asked for; allowed is a number of bytes above 0")
    pairs = tuple((move.source, move.target) for move in moves)
    groups = _groups(pairs, bucket_bytes)
    _check_or_refuse(moves, groups)
    found = [move.local for move in moves]
    shared = {place for group in groups for place in group.places}
    for place, move in enumerate(moves):
        if place not in shared:
            if move.before is not None:
                move.before.wait()
            found[place] = redistribute_local(move.local, move.source, move.target)
    held = tuple((move.local.stride(), move.local.device) for move in moves)
    return found, list(_compiled(pairs, held, bucket_bytes)) if groups else []


def _check_or_refuse(moves: Sequence[LocalMove], groups: Sequence[_Group]) -> None:
    try:
        for move in moves:
            if not has_memory(move.local):
                raise TransportError(
                    "redistribute_many was called in a graph that torch traces; call it outside of torch.compile, or "
                    "x.redistribute(placements=...) for each tensor"
                )
            check_local(move.local, move.source)
    except (LocalTensorError, TransportError) as error:
        for group in groups:
            refuse_exchanges(group.communicator, group.num_exchanges, error)
        raise


registry.on_end(_compiled.cache_clear)
