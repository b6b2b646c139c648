"""The collectives of torch.distributed as calls of NCCL, straight from and into the tensors given.

What is only moved is moved as bytes, so that any dtype is. Parts of different lengths, and lists of tensors that do not
lie end to end, become one call for each part, all in one group.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritondt.backend.elements import reduced
from tritondt.backend.operation import Call

Tensors = Sequence[torch.Tensor]


class Place(NamedTuple):
    """A rank of a group."""

    rank: int
    size: int


def all_reduce(tensors: Tensors, op: Any) -> list[Call]:
    """Every tensor reduced, in place, on all ranks."""
    return [_reducing("all_reduce", tensor, tensor, tensor, op) for tensor in tensors if tensor.numel()]


def broadcast(tensors: Tensors, root: int) -> list[Call]:
    """Every tensor of the root, to all."""
    return _moving("broadcast", tensors, root)


def reduce(tensor: torch.Tensor, op: Any, root: int) -> list[Call]:
    """The reduction, in place, on the root."""
    return [_reducing("reduce", tensor, tensor, tensor, op, root)] if tensor.numel() else []


def all_gather(place: Place, outputs: Tensors, given: torch.Tensor) -> list[Call]:
    """Every rank's tensor, to all; `outputs` are of the sizes of the ranks' tensors."""
    if _lie_end_to_end(outputs):
        return _all_gather(outputs[0], given)
    calls = _moving("broadcast", outputs)
    own = given.data_ptr()
    return [call._replace(source=own) if call.peer == place.rank else call for call in calls]


def all_gather_into(outputs: Tensors, given: Tensors) -> list[Call]:
    """Every rank's tensor, end to end, to all; for each pair of tensors."""
    return [call for output, own in zip(outputs, given, strict=True) for call in _all_gather(output, own)]


def reduce_scatter(place: Place, output: torch.Tensor, given: Tensors, op: Any) -> list[Call]:
    """The reduction of the ranks' lists, tensor by tensor, each to its rank."""
    if _lie_end_to_end(given):
        return [_reducing("reduce_scatter", given[0], output, output, op)] if output.numel() else []
    return [
        _reducing("reduce", part, output if rank == place.rank else part, part, op, rank)
        for rank, part in enumerate(given)
        if part.numel()
    ]


def reduce_scatter_into(outputs: Tensors, given: Tensors, op: Any) -> list[Call]:
    """The reduction of the ranks' tensors, cut into equal parts, one to each rank; for each pair of tensors."""
    pairs = zip(outputs, given, strict=True)
    return [_reducing("reduce_scatter", whole, output, output, op) for output, whole in pairs if output.numel()]


def all_to_all(outputs: Tensors, given: Tensors) -> list[Call]:
    """A tensor to every rank and one from every rank."""
    return [*_moving("send", given), *_moving("recv", outputs)]


def all_to_all_parts(
    output: torch.Tensor, given: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
) -> list[Call]:
    """The same of parts of one tensor, of so many elements."""
    return [*_parts("send", given, input_sizes), *_parts("recv", output, output_sizes)]


def gather(given: torch.Tensor, outputs: Tensors, root: int) -> list[Call]:
    """Every rank's tensor, to the root; elsewhere `outputs` is empty."""
    return [*_moving("send", [given], root), *_moving("recv", outputs)]


def scatter(output: torch.Tensor, given: Tensors, root: int) -> list[Call]:
    """A tensor of the root to every rank; elsewhere `given` is empty."""
    return [*_moving("send", given), *_moving("recv", [output], root)]


def message(kind: str, tensors: Tensors, peer: int) -> list[Call]:
    """Tensors to a peer ("send") or from one ("recv")."""
    return _moving(kind, tensors, peer)


def _moving(kind: str, tensors: Tensors, peer: int | None = None) -> list[Call]:
    """A call for each tensor, with one peer or each with the rank of its place in the list."""
    return [
        Call(kind, tensor.data_ptr(), tensor.data_ptr(), tensor.nbytes, peer=place if peer is None else peer)
        for place, tensor in enumerate(tensors)
        if tensor.numel()
    ]


def _parts(kind: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[Call]:
    calls, address = [], tensor.data_ptr()
    for peer, num_elements in enumerate(sizes):
        num_bytes = num_elements * tensor.element_size()
        if num_bytes:
            calls.append(Call(kind, address, address, num_bytes, peer=peer))
        address += num_bytes
    return calls


def _reducing(
    kind: str, source: torch.Tensor, target: torch.Tensor, counted: torch.Tensor, op: Any, root: int = 0
) -> Call:
    """NCCL counts the elements of `counted`."""
    dtype, num, known = reduced(source.dtype, op)
    return Call(kind, source.data_ptr(), target.data_ptr(), counted.numel() * num, dtype, known, root)


def _all_gather(output: torch.Tensor, given: torch.Tensor) -> list[Call]:
    return [Call("all_gather", given.data_ptr(), output.data_ptr(), given.nbytes)] if given.numel() else []


def _lie_end_to_end(tensors: Tensors) -> bool:
    """Whether they are equal parts of one run of memory."""
    first, num_bytes = tensors[0].data_ptr(), tensors[0].nbytes
    return all(
        tensor.nbytes == num_bytes and tensor.data_ptr() == first + place * num_bytes
        for place, tensor in enumerate(tensors)
    )
