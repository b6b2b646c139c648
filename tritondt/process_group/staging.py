"""Tensors as memory without gaps: what every collective on the CPU, through shared memory or on Gloo, reads and writes.

How a tensor lies in memory is a rank's own affair: one with gaps, or whose dims are in another order there, is read
from a copy or written by one, so that all ranks run the same collective.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
NewCopies = list[tuple[torch.Tensor, torch.Tensor]]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its elements as they are, in the order of its dims and without gaps."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that holds the elements of a tensor in the order of its dims, its own or a copy.

    >>> readable(torch.arange(6).view(2, 3).t()[1:]).tolist()
    [[1, 4], [2, 5]]
    """
    if is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor, copies: NewCopies) -> torch.Tensor:
    """Memory for the elements of a tensor in the order of its dims, its own or to be copied to it."""
    if is_plain(tensor):
        return tensor
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copies.append((tensor, found))
    return found


def in_place(tensor: torch.Tensor, copies: NewCopies) -> torch.Tensor:
    """Memory that is read and written."""
    found = readable(tensor)
    if found is not tensor:
        copies.append((tensor, found))
    return found


def as_bytes(memory: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps.

    >>> as_bytes(torch.tensor(1, dtype=torch.int16)).tolist()
    [1, 0]
    """
    return memory.detach().reshape(-1).view(torch.uint8)


def all_readable(tensors: Tensors) -> list[torch.Tensor]:
    """`readable` of each."""
    return [readable(tensor) for tensor in tensors]


def all_writable(tensors: Tensors, copies: NewCopies) -> list[torch.Tensor]:
    """`writable` of each."""
    return [writable(tensor, copies) for tensor in tensors]


def staged(arguments: Sequence[Any], copies: NewCopies | None) -> tuple[Any, ...]:
    """Arguments of a call of torch.distributed with plain memory for their tensors.

    The first ones are written, but where `copies` is None.

    >>> copies = []
    >>> whole = torch.zeros(2, 4)
    >>> (memory,), given = staged(([whole[:, ::2]], torch.ones(3)), copies)
    >>> memory.is_contiguous(), copies[0][0] is whole, given.shape
    (True, False, torch.Size([3]))
    """
    written, *others = arguments
    return _with_memory(written, copies), *(_with_memory(each, None) for each in others)


def _with_memory(found: Any, copies: NewCopies | None) -> Any:
    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        return readable(tensor) if copies is None else in_place(tensor, copies)

    return _mapped(with_memory, found)


def as_real(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of a call of torch.distributed, their complex tensors, without gaps, as real ones.

    >>> as_real(([torch.ones(2, dtype=torch.complex64)], 3))[0][0].shape
    torch.Size([2, 2])
    """
    return tuple(_mapped(lambda each: torch.view_as_real(each.detach()) if each.is_complex() else each, arguments))


def flattened(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of a call of torch.distributed, their tensors, without gaps, as ones of one dim.

    >>> flattened((torch.ones(2, 3), 3))[0].shape
    torch.Size([6])
    """
    return tuple(_mapped(lambda each: each.detach().view(-1), arguments))


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], found: Any) -> Any:
    """An argument with other tensors: one, a list or a list of lists; others as they are."""
    if isinstance(found, torch.Tensor):
        return change(found)
    return [_mapped(change, each) for each in found] if isinstance(found, (list, tuple)) else found


def copy_back(copies: Copies) -> None:
    """Copies what was not written in place; torch's RuntimeError where elements of a tensor share memory.

    Where one rank alone cannot write, the others have met it in the operation all the same.
    """
    for target, source in copies:
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(source)
