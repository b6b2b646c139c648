"""The compiler of collectives to calls of NCCL, straight from and into tensors that are given by number.

Elements that are only moved are moved as bytes, so that any dtype can be. Parts of different lengths become one
call for each part, all in one group. The calls follow from lengths alone, which all ranks know alike: where tensors of
one length do not lie end to end on a rank, as NCCL has them, that rank stages them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tritondt.process_group.collective import Collective, Reduction, Span
from tritondt.process_group.operation import Call, Staging, TensorOffset


class GroupRank(NamedTuple):
    """A rank of a process group, and the number of its ranks."""

    rank: int
    size: int


class Numbers(NamedTuple):
    """Numbers of a collective's tensors among those of an operation, and of memory that would stage one for each rank.

    The memory is none where these lie end to end.
    """

    sources: Sequence[int]
    targets: Sequence[int]
    memory: int | None = None

    def source(self, span: Span) -> TensorOffset:
        """The first byte of a source's span."""
        return TensorOffset(self.sources[span[0]], span[1])

    def target(self, span: Span) -> TensorOffset:
        """The first byte of a target's span."""
        return TensorOffset(self.targets[span[0]], span[1])


class Staged(NamedTuple):
    """Calls, and the staging that they need."""

    calls: list[Call]
    staging: Staging | None = None


def compiled(collective: Collective, numbers: Numbers) -> Staged:
    """One rank's side of a collective as calls of NCCL.

    >>> from tritondt.process_group.collective import all_gather_into, broadcast
    >>> compiled(broadcast(1, 2, 8, 0), Numbers([0], [0])).calls[0][:4]
    ('broadcast', TensorOffset(tensor=0, start=0), TensorOffset(tensor=0, start=0), 8)
    >>> [call.kind for call in compiled(all_gather_into(1, 2, 8), Numbers([0], [1])).calls]
    ['all_gather']
    """
    if collective.reduction is not None:
        return _reduced(collective, collective.reduction, numbers)
    if collective.is_for_all:
        return _spread(collective, numbers)
    sends = [("send", numbers.source(span), peer, span[2]) for peer, span in collective.sends]
    receives = [("recv", numbers.target(span), peer, span[2]) for peer, span in collective.receives]
    return Staged([Call(kind, at, at, num, peer=peer) for kind, at, peer, num in (*sends, *receives) if num])


def _spread(collective: Collective, numbers: Numbers) -> Staged:
    """Spans that all ranks receive: gathered where every rank has one of the same length, or else broadcast."""
    parts = [span for _, span in collective.receives]
    source = numbers.source(collective.sends[0][1]) if collective.sends else None
    if source is not None and len(parts) == collective.size and _are_alike(parts):
        whole, staging = _whole(parts, numbers.targets, numbers.memory, is_before=False)
        return Staged([Call("all_gather", source, whole, parts[0][2])] if parts[0][2] else [], staging)
    spans = [(rank, span, numbers.target(span)) for rank, span in collective.receives]
    if source is not None and not spans:  # the root of a broadcast, in place
        spans = [(collective.own, collective.sends[0][1], source)]
    return Staged(
        [
            Call("broadcast", source if source is not None and rank == collective.own else at, at, span[2], peer=rank)
            for rank, span, at in spans
            if span[2]
        ]
    )


def _reduced(collective: Collective, reduction: Reduction, numbers: Numbers) -> Staged:
    own, pieces = collective.own, collective.pieces
    results = [numbers.target(span) for _, span in collective.receives[:1]]

    def call(kind: str, span: Span, source: TensorOffset, target: TensorOffset, root: int = 0) -> list[Call]:
        num_elements = span[2] // reduction.itemsize
        return [Call(kind, source, target, num_elements, reduction.dtype, reduction.op, root)] if num_elements else []

    first = numbers.source(pieces[0])
    if collective.is_of_all:
        return Staged(call("all_reduce", pieces[0], first, results[0]))
    if collective.root >= 0:
        return Staged(call("reduce", pieces[0], first, results[0] if results else first, collective.root))
    if _are_alike(pieces):
        whole, staging = _whole(pieces, numbers.sources, numbers.memory, is_before=True)
        return Staged(call("reduce_scatter", collective.result, whole, results[0]), staging)
    made = []
    for rank, piece in enumerate(pieces):
        at = numbers.source(piece)
        made += call("reduce", piece, at, results[0] if rank == own else at, rank)
    return Staged(made)


def _are_alike(spans: Sequence[Span]) -> bool:
    return all(span[2] == spans[0][2] for span in spans)


def _whole(
    parts: Sequence[Span], tensors: Sequence[int], memory: int | None, *, is_before: bool
) -> tuple[TensorOffset, Staging | None]:
    """The first byte of parts of one length, end to end: of the first, or of memory that stages them."""
    if memory is None or not parts[0][2]:
        return TensorOffset(tensors[parts[0][0]], parts[0][1]), None
    return TensorOffset(memory), Staging(tuple(tensors[tensor] for tensor, _, _ in parts), is_before)


def lie_end_to_end(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are equal parts of one run of memory."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return False  # they will be refused
    first, num_bytes = tensors[0].data_ptr(), tensors[0].nbytes
    return all(
        tensor.nbytes == num_bytes and tensor.data_ptr() == first + place * num_bytes
        for place, tensor in enumerate(tensors)
    )
