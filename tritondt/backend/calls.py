"""The collectives of torch.distributed as calls of NCCL, straight from and into tensors that are given by number.

What is only moved is moved as bytes, so that any dtype is. Parts of different lengths, and lists of tensors that do not
lie end to end, become one call for each part, all in one group.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritondt.backend.elements import reduced
from tritondt.backend.operation import Call, Spot

Tensors = Sequence[torch.Tensor]


class Numbered(NamedTuple):
    """A tensor and its number among those of an operation."""

    number: int
    tensor: torch.Tensor

    @property
    def spot(self) -> Spot:
        """Where it begins."""
        return Spot(self.number)


def numbered(tensors: Tensors, first: int = 0) -> list[Numbered]:
    """Tensors with their numbers, which begin with `first`."""
    return [Numbered(number, tensor) for number, tensor in enumerate(tensors, first)]


class Place(NamedTuple):
    """A rank of a group."""

    rank: int
    size: int


def all_reduce(tensors: Sequence[Numbered], op: Any) -> list[Call]:
    """Every tensor reduced, in place, on all ranks."""
    return [_reducing("all_reduce", each, each, each, op) for each in tensors if each.tensor.numel()]


def broadcast(tensors: Sequence[Numbered], root: int) -> list[Call]:
    """Every tensor of the root, to all."""
    return _moving("broadcast", tensors, root)


def reduce(tensor: Numbered, op: Any, root: int) -> list[Call]:
    """The reduction, in place, on the root."""
    return [_reducing("reduce", tensor, tensor, tensor, op, root)] if tensor.tensor.numel() else []


def all_gather(place: Place, outputs: Sequence[Numbered], given: Numbered) -> list[Call]:
    """Every rank's tensor, to all; `outputs` are of the sizes of the ranks' tensors."""
    if lie_end_to_end([output.tensor for output in outputs]):
        return all_gather_into(outputs[0], given)
    calls = _moving("broadcast", outputs)
    return [call._replace(source=given.spot) if call.peer == place.rank else call for call in calls]


def all_gather_into(output: Numbered, given: Numbered) -> list[Call]:
    """Every rank's tensor, end to end, to all."""
    num_bytes = given.tensor.nbytes
    return [Call("all_gather", given.spot, output.spot, num_bytes)] if num_bytes else []


def reduce_scatter(place: Place, output: Numbered, given: Sequence[Numbered], op: Any) -> list[Call]:
    """The reduction of the ranks' lists, tensor by tensor, each to its rank."""
    if lie_end_to_end([part.tensor for part in given]):
        return reduce_scatter_into(output, given[0], op)
    return [
        _reducing("reduce", part, output if rank == place.rank else part, part, op, rank)
        for rank, part in enumerate(given)
        if part.tensor.numel()
    ]


def reduce_scatter_into(output: Numbered, whole: Numbered, op: Any) -> list[Call]:
    """The reduction of the ranks' tensors, cut into equal parts, one to each rank."""
    return [_reducing("reduce_scatter", whole, output, output, op)] if output.tensor.numel() else []


def all_to_all(outputs: Sequence[Numbered], given: Sequence[Numbered]) -> list[Call]:
    """A tensor to every rank and one from every rank."""
    return [*_moving("send", given), *_moving("recv", outputs)]


def all_to_all_parts(
    output: Numbered, given: Numbered, output_sizes: Sequence[int], input_sizes: Sequence[int]
) -> list[Call]:
    """The same of parts of one tensor, of so many elements."""
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


def lie_end_to_end(tensors: Tensors) -> bool:
    """Whether they are equal parts of one run of memory."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return False  # they will be refused
    first, num_bytes = tensors[0].data_ptr(), tensors[0].nbytes
    return all(
        tensor.nbytes == num_bytes and tensor.data_ptr() == first + place * num_bytes
        for place, tensor in enumerate(tensors)
    )


def _moving(kind: str, tensors: Sequence[Numbered], peer: int | None = None) -> list[Call]:
    """A call for each tensor, with one peer or each with the rank of its place in the list."""
    return [
        Call(kind, each.spot, each.spot, each.tensor.nbytes, peer=place if peer is None else peer)
        for place, each in enumerate(tensors)
        if each.tensor.numel()
    ]


def _parts(kind: str, given: Numbered, sizes: Sequence[int]) -> list[Call]:
    calls, start = [], 0
    for peer, num_elements in enumerate(sizes):
        num_bytes = num_elements * given.tensor.element_size()
        if num_bytes:
            spot = Spot(given.number, start)
            calls.append(Call(kind, spot, spot, num_bytes, peer=peer))
        start += num_bytes
    return calls


def _reducing(kind: str, source: Numbered, target: Numbered, counted: Numbered, op: Any, root: int = 0) -> Call:
    """NCCL counts the elements of `counted`."""
    dtype, num, known = reduced(source.tensor.dtype, op)
    return Call(kind, source.spot, target.spot, counted.tensor.numel() * num, dtype, known, root)
