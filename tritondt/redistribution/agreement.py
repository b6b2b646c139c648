"""Checks that all ranks mean one and the same tensor, before they build on it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

import torch

from tritondt.errors import MismatchError, mark_told
from tritondt.redistribution.run import check_address, redistribute_local
from tritondt.redistribution.send import distribute_from
from tritondt.sharding.layout import Layout
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta

Result = TypeVar("Result")

# What a rank says about itself: a digest of all of it, and as much of the text as an error can show.
_DIGEST_BYTES, _TEXT_BYTES = 16, 496


def agreed(
    mesh: Mesh, call: str, prepare: Callable[[], tuple[str, Result]], mismatch: type[MismatchError] = MismatchError
) -> Result:
    """Second result of `prepare` where its first, a text of the arguments of `call`, is alike on all ranks.

    A collective call. Where `prepare` raises on some ranks, these raise what it raised, and the others `mismatch` with
    its text; nothing else has been sent, and the world goes on.
    """
    try:
        text, result = prepare()
    except Exception as error:
        refuse_agreement(mesh, call, error)
        raise
    try:
        check_agreed(mesh, call, text)
    except MismatchError as error:
        if type(error) is mismatch:
            raise
        raise mismatch(str(error)) from None
    return result


def check_agreed(mesh: Mesh, call: str, text: str) -> None:
    """Refuses on all ranks alike where `text`, which describes the arguments of `call`, differs between ranks.

    A collective call. MismatchError names the first rank of the mesh and the first that differs.
    """
    if len(mesh.ranks) == 1 or mesh.coordinate is None:
        return
    content = text.encode()
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
    own = bytearray(digest + content[:_TEXT_BYTES].ljust(_TEXT_BYTES))
    summaries = [bytes(row) for row in _rows_of_all(mesh, torch.frombuffer(own, dtype=torch.uint8))]
    for rank, summary in zip(mesh.ranks, summaries, strict=True):
        if summary[:_DIGEST_BYTES] != summaries[0][:_DIGEST_BYTES]:
            raise MismatchError(
                f"{call} was called with {_text_of(summaries[0])} on rank {mesh.ranks[0]}, but with "
                f"{_text_of(summary)} on rank {rank}; all ranks must call it for the same tensor"
            )


def _text_of(summary: bytes) -> str:
    return summary[_DIGEST_BYTES:].decode(errors="replace").rstrip()


def agreed_local(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Local tensor after a collective check that all ranks gave equal global shape, dtype and placements.

    Replicas take the values of the first coordinate. MismatchError on every rank, naming two that differ; also where
    the values of a first coordinate have no memory, whose rank raises LocalTensorError.
    """

    def prepare() -> tuple[str, None]:
        if spec.layout.axes_where(Replicate) and _is_first_replica(spec):
            check_address(local, spec)
        return f"a part of {spec}", None

    agreed(spec.mesh, "from_local", prepare)
    return local if spec.mesh.coordinate is None else _from_first_replica(local, spec)


def _is_first_replica(spec: DTensorSpec) -> bool:
    """Whether this rank is at coordinate 0 of each replicated axis."""
    coordinate = spec.mesh.coordinate
    return coordinate is not None and not any(coordinate[axis] for axis in spec.layout.axes_where(Replicate))


def refuse_agreement(mesh: Mesh, call: str, error: Exception) -> None:
    """Takes part in the check of `call` for a rank whose own arguments were refused; the others raise."""
    try:
        mark_told(error)
        check_agreed(mesh, call, f"what it refused ({error})")
    except MismatchError as others:
        error.__context__ = others  # the rank at fault raises its own error, to which this is added


def _from_first_replica(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Local tensor with the values that coordinate 0 of each replicated axis holds; coordinate 0 keeps its own
    tensor.
    """
    replicated = [placement.is_replicate() for placement in spec.placements]
    mesh, layout = spec.mesh, spec.layout
    if not any(size > 1 and whole for size, whole in zip(mesh.shape, replicated, strict=True)):
        return local
    # Terms of a reduction are pieces of one more dim here, so that nothing is reduced.
    order = [axis for axis in spec.order if spec.placements[axis].is_partial()]
    order += [axis for axis in spec.order if not spec.placements[axis].is_partial()]
    num_terms = prod(mesh.shape[axis] for axis in layout.axes_where(Partial))
    shape = (num_terms, *spec.shape)
    placements = [_below_terms(placement) for placement in spec.placements]
    target = DTensorSpec(mesh, placements, TensorMeta.contiguous(shape, spec.dtype), order)
    senders = [0 if whole else slice(None) for whole in replicated]
    positions = torch.arange(layout.num_ranks).reshape(mesh.shape)[tuple(senders)].reshape(-1).tolist()
    cut = [axis for axis, whole in enumerate(replicated) if not whole]
    source = Layout(
        [mesh.shape[axis] for axis in cut] or [1],
        [placements[axis] for axis in cut] or [Replicate()],
        shape,
        [cut.index(axis) for axis in order if axis in cut] or None,
    )
    given = local.unsqueeze(0) if _is_first_replica(spec) else local.new_empty(0)  # torch takes no view of freed memory
    return distribute_from(given, source, tuple(positions), target, in_place=True).squeeze(0)


def _below_terms(placement: Placement) -> Placement:
    """Placement for the tensor with one more dim in front, which terms cut."""
    if isinstance(placement, Partial):
        return Shard(0)
    return replace(placement, dim=placement.dim + 1) if isinstance(placement, Shard) else placement


def lengths_on_all(mesh: Mesh, own: Sequence[int]) -> list[list[int]]:
    """Numbers of every rank of the mesh, by mesh position, on all of its ranks; equally many of each.

    A collective call. A rank outside the mesh gets its own in place of all.
    """
    if mesh.coordinate is None:
        return [list(own)] * len(mesh.ranks)
    return _rows_of_all(mesh, torch.tensor(list(own), dtype=torch.int64))


def texts_on_all(mesh: Mesh, own: str) -> list[str]:
    """Texts of every rank of the mesh, by mesh position, on all of its ranks; of any lengths.

    A collective call. A rank outside the mesh gets its own in place of all.
    """
    content = own.encode()
    lengths = [length for (length,) in lengths_on_all(mesh, [len(content)])]
    if mesh.coordinate is None or not max(lengths):
        return [own] * len(mesh.ranks)
    row = torch.frombuffer(bytearray(content.ljust(max(lengths))), dtype=torch.uint8)
    rows = zip(_rows_of_all(mesh, row), lengths, strict=True)
    return [bytes(found[:length]).decode() for found, length in rows]


def _rows_of_all(mesh: Mesh, own: torch.Tensor) -> list[list[int]]:
    """Equally long one-dimensional tensors of all ranks of the mesh, by mesh position; a collective call of its
    ranks.
    """
    placements: list[Placement] = [Shard(0)] * mesh.ndim
    rows = DTensorSpec(mesh, placements, TensorMeta.contiguous((len(mesh.ranks), len(own)), own.dtype))
    local = own.to(mesh.device_type).unsqueeze(0)
    found: list[list[int]] = redistribute_local(local, rows, rows.with_placements([Replicate()] * mesh.ndim)).tolist()
    return found
