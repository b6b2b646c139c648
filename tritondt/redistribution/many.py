"""Redistribution of a list of tensors in few exchanges: a pack, an exchange and an unpack for each bucket of them."""

from collections.abc import Sequence

import torch

from tritondt.comm.work import Work
from tritondt.errors import LocalTensorError, PeerError, TransportError
from tritondt.events import subscribers
from tritondt.kernels.memory import allocate, allocate_all, has_memory
from tritondt.redistribution.buckets import BUCKET_BYTES, Bucket, Pairs, compiled_list, groups_of
from tritondt.redistribution.refusals import refuse_each
from tritondt.redistribution.run import (
    check_local,
    emit_issued,
    redistribute_local,
    run_step,
    target_of,
    with_memory,
)


class _Run:
    """One run of a bucket: where each of its tensors has got to."""

    def __init__(self, bucket: Bucket, locals_: Sequence[torch.Tensor]) -> None:
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
        bucket = self.bucket
        carriers = bucket.group.carriers
        for number, (members, transfer) in enumerate(zip(bucket.members, bucket.transfers, strict=True)):
            operands = [self._prepared(index) for index in members]
            try:
                carriers[number].exchange([source for source, _ in operands], [into for _, into in operands], transfer)
            except PeerError as error:
                refuse_each(carriers[number + 1 :], error)
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


def redistribute_locals(locals_: Sequence[torch.Tensor], pairs: Pairs, bucket_bytes: int | None) -> list[torch.Tensor]:
    """Local tensors, parts of the firsts of their pairs, under the seconds, in the order of the list.

    Not differentiable. A collective call of all ranks of all meshes in it, with one list. `bucket_bytes` bounds the
    bytes that tensors of a bucket take on any rank, at least one tensor each. Raises as `redistribute_local` does, for
    any tensor of the list.
    """
    found, buckets = _prepare(locals_, pairs, (), bucket_bytes)
    for place, bucket in enumerate(buckets):
        given = [found[index] for index in bucket.group.places]
        if subscribers:
            for plan in bucket.plans:
                emit_issued(plan.steps)
        try:
            made = _run_bucket(bucket, given)
        except PeerError as error:
            for later in buckets[place + 1 :]:
                refuse_each(later.group.carriers, error)
            raise
        for index, local in zip(bucket.group.places, made, strict=True):
            found[index] = local
    return found


def _run_bucket(bucket: Bucket, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a bucket under their targets."""
    if bucket.results is None:
        run = _Run(bucket, given)
        bucket.communicator.in_order(run, bucket.description)
        return run.current
    made = allocate_all(bucket.results, bucket.device)
    bucket.communicator.exchange(given, made, bucket.transfers[0])
    return made


def redistribute_locals_async(
    locals_: Sequence[torch.Tensor], pairs: Pairs, befores: Sequence[Work | None], bucket_bytes: int | None
) -> tuple[list[torch.Tensor], list[Work | None]]:
    """Tensors that will hold the results, and the Work of each, one for a bucket; None where the result is there.

    Local tensors are read until then. The Work in `befores` that fills one of them is waited for at once where it runs
    elsewhere.
    """
    # Small ones, as the tensors of a bucket are there together.
    asked = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    found, buckets = _prepare(locals_, pairs, befores, asked)
    works: list[Work | None] = [None] * len(locals_)
    for bucket in buckets:
        places, communicator = bucket.group.places, bucket.communicator
        before = [work for index in places if (work := befores[index]) is not None]
        for work in before:
            if not communicator.has_issued(work):
                work.wait()
        held = [found[index] for index in places]
        run = _Run(bucket, held)
        results = run.allocate_results()
        if subscribers:
            for plan in bucket.plans:
                emit_issued(plan.steps)
        ready = not any(communicator.has_issued(work) for work in before)
        issued = communicator.issue(run, bucket.description, held, sources_ready=ready)
        for index, local in zip(places, results, strict=True):
            found[index], works[index] = local, issued
    return found, works


def _prepare(
    locals_: Sequence[torch.Tensor], pairs: Pairs, befores: Sequence[Work | None], bucket_bytes: int | None
) -> tuple[list[torch.Tensor], Sequence[Bucket]]:
    """Results of the tensors that are in no bucket, others with the memory that is read, and the buckets."""
    if bucket_bytes is not None and bucket_bytes < 1:
        raise TransportError(f"bucket_bytes={bucket_bytes} was asked for; allowed is a number of bytes above 0")
    _check_or_refuse(locals_, pairs, bucket_bytes)
    held = tuple([(local.stride(), local.device) for local in locals_])  # a generator takes a call for each
    found = [with_memory(local) if local.is_neg() or local.is_conj() else local for local in locals_]
    alone, buckets = compiled_list(pairs, held, bucket_bytes)
    for place in alone:
        if befores and (before := befores[place]) is not None:
            before.wait()
        found[place] = redistribute_local(locals_[place], *pairs[place])
    return found, buckets


def _check_or_refuse(locals_: Sequence[torch.Tensor], pairs: Pairs, bucket_bytes: int | None) -> None:
    try:
        for local, (source, _) in zip(locals_, pairs, strict=True):
            # What `check_local` asks of a plain tensor, without its calls.
            if (
                type(local) is torch.Tensor
                and local.shape == source.local_shape
                and local.dtype is source.tensor_meta.dtype
                and local.is_cpu
                and local.layout is torch.strided
                and local.data_ptr()
                and source.mesh.device_type == "cpu"
            ):
                continue
            if not has_memory(local):
                raise TransportError(
                    "redistribute_many was called in a graph that torch traces; call it outside of torch.compile, or "
                    "x.redistribute(placements=...) for each tensor"
                )
            check_local(local, source)
    except (LocalTensorError, TransportError) as error:
        refuse_many(pairs, error, bucket_bytes)
        raise


def refuse_many(pairs: Pairs, error: Exception, bucket_bytes: int | None = None) -> None:
    """Tells the others why this rank takes part in no exchange of a list of redistributions."""
    for group in groups_of(pairs, bucket_bytes):
        refuse_each(group.carriers, error)
