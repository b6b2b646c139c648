"""The collectives of torch.distributed as calls of NCCL, straight from and into tensors that are given by number.

Elements that are only moved are moved as bytes, so that any dtype can be. Parts of different lengths become one
call for each part, all in one group. The calls follow from lengths alone, which all ranks know alike: where tensors of
one length do not lie end to end on a rank, as NCCL has them, that rank stages them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritondt.process_group.naming import reduced
from tritondt.process_group.operation import Call, Staging, TensorOffset

Tensors = Sequence[torch.Tensor]


class Numbered(NamedTuple):
    """A tensor and its number among those of an operation."""

    number: int
    tensor: torch.Tensor

    @property
    def start(self) -> TensorOffset:
        """The first byte of the tensor."""
        return TensorOffset(self.number)


def numbered(tensors: Tensors, first: int = 0) -> list[Numbered]:
    """Tensors with their numbers, which begin with `first`."""
    return [Numbered(number, tensor) for number, tensor in enumerate(tensors, first)]


class GroupRank(NamedTuple):
    """A rank of a process group, and the number of its ranks."""

    rank: int
    size: int


def all_reduce(tensors: Sequence[Numbered], op: Any) -> list[Call]:
    """Every tensor reduced, in place, on all ranks."""
    return [call for each in tensors for call in _reducing("all_reduce", each, each, each, op)]


def broadcast(tensors: Sequence[Numbered], root: int) -> list[Call]:
    """Every tensor of the root, to all."""
    return _moving("broadcast", tensors, root)


def reduce(tensor: Numbered, op: Any, root: int) -> list[Call]:
    """The reduction, in place, on the root."""
    return _reducing("reduce", tensor, tensor, tensor, op, root)


class Staged(NamedTuple):
    """Calls, and the staging that they need."""

    calls: list[Call]
    staging: Staging | None = None


def all_gather(own: GroupRank, outputs: Sequence[Numbered], given: Numbered, memory: int) -> Staged:
    """Every rank's tensor, to all; `outputs` have the sizes of the ranks' tensors, `memory` would stage them."""
    whole = _whole(outputs, memory)
    if whole is None:
        calls = _moving("broadcast", outputs)
        return Staged([call._replace(source=given.start) if call.peer == own.rank else call for call in calls])
    return Staged(all_gather_into(whole, given), _staging(whole, outputs, is_before=False))


def all_gather_into(output: Numbered, given: Numbered) -> list[Call]:
    """Every rank's tensor, end to end, to all."""
    num_bytes = given.tensor.nbytes
    return [Call("all_gather", given.start, output.start, num_bytes)] if num_bytes else []


def reduce_scatter(own: GroupRank, output: Numbered, given: Sequence[Numbered], op: Any, memory: int) -> Staged:
    """The reduction of the ranks' lists, tensor by tensor, each to its rank; `memory` would stage the tensors."""
    whole = _whole(given, memory)
    if whole is None:
        reductions = [
            call
            for rank, part in enumerate(given)
            for call in _reducing("reduce", part, output if rank == own.rank else part, part, op, rank)
        ]
        return Staged(reductions)
    return Staged(reduce_scatter_into(output, whole, op), _staging(whole, given, is_before=True))


def reduce_scatter_into(output: Numbered, whole: Numbered, op: Any) -> list[Call]:
    """The reduction of the ranks' tensors, cut into equal parts, one to each rank."""
    return _reducing("reduce_scatter", whole, output, output, op)


def all_to_all(outputs: Sequence[Numbered], given: Sequence[Numbered]) -> list[Call]:
    """A tensor to every rank and one from every rank."""
    return [*_moving("send", given), *_moving("recv", outputs)]


def all_to_all_parts(
    output: Numbered, given: Numbered, output_sizes: Sequence[int], input_sizes: Sequence[int]
) -> list[Call]:
    """Parts of one tensor to every rank and from every rank, of the given numbers of elements."""
    return [*_parts("send", given, input_sizes), *_parts("recv", output, output_sizes)]


def gather(given: Numbered, outputs: Sequence[Numbered], root: int) -> list[Call]:
    """Every rank's tensor, to the root; elsewhere `outputs` is empty."""
    return [*_moving("send", [given], root), *_moving("recv", outputs)]


def scatter(output: Numbered, given: Sequence[Numbered], root: int) -> list[Call]:
    """A tensor of the root to every rank; elsewhere `given` is empty."""
    return [*_moving("send", given), *_moving("recv", [output], root)]


def message(kind: str, tensors: Sequence[Numbered], peer: int) -> list[Call]:
    """Tensors to a peer ("send") or from one ("recv")."""
    return _moving(kind, tensors, peer)


def _whole(parts: Sequence[Numbered], memory: int) -> Numbered | None:
    """The beginning of parts of one length, end to end: their first, or `memory`; None where lengths differ."""
    first = parts[0]
    if any(part.tensor.numel() != first.tensor.numel() for part in parts):
        return None
    return first if lie_end_to_end([part.tensor for part in parts]) else Numbered(memory, first.tensor)


def _staging(whole: Numbered, parts: Sequence[Numbered], *, is_before: bool) -> Staging | None:
    return None if whole is parts[0] else Staging(tuple(part.number for part in parts), is_before)


def lie_end_to_end(tensors: Tensors) -> bool:
    """Whether tensors are equal parts of one run of memory."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return False  # they will be refused
    first, num_bytes = tensors[0].data_ptr(), tensors[0].nbytes
    return all(
        tensor.nbytes == num_bytes and tensor.data_ptr() == first + place * num_bytes
        for place, tensor in enumerate(tensors)
    )


def _moving(kind: str, tensors: Sequence[Numbered], peer: int | None = None) -> list[Call]:
    """A call for each tensor, with one peer, or with the rank of the tensor's place in the list."""
    return [
        Call(kind, each.start, each.start, each.tensor.nbytes, peer=place if peer is None else peer)
        for place, each in enumerate(tensors)
        if each.tensor.numel()
    ]


def _parts(kind: str, given: Numbered, sizes: Sequence[int]) -> list[Call]:
    calls, start = [], 0
    for peer, num_elements in enumerate(sizes):
        num_bytes = num_elements * given.tensor.element_size()
        if num_bytes:
            offset = TensorOffset(given.number, start)
            calls.append(Call(kind, offset, offset, num_bytes, peer=peer))
        start += num_bytes
    return calls


def _reducing(kind: str, source: Numbered, target: Numbered, counted: Numbered, op: Any, root: int = 0) -> list[Call]:
    """A reduction of as many elements as `counted` has; of none there is no call, but its op is refused as any."""
    dtype, num, known = reduced(source.tensor.dtype, op)
    num_elements = counted.tensor.numel() * num
    return [Call(kind, source.start, target.start, num_elements, dtype, known, root)] if num_elements else []
