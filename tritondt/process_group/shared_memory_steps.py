"""Steps of collectives between ranks that read each other's memory, and their tensors as memory without gaps.

How a tensor lies in memory is a rank's own affair: one with gaps, or whose dims are in another order there, is read
from a copy or written by one, so that all ranks run the same collective.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tritondt.comm.packing.direct_transfer import DirectTransfer
from tritondt.process_group.shared_memory_programs import Members

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
NewCopies = list[tuple[torch.Tensor, torch.Tensor]]


class Step(NamedTuple):
    """One exchange and its tensors.

    `key` is what its program is made by: a function, a part that only tells texts apart, and the function's arguments.
    `copies` are pairs of a tensor and what is copied to it after the exchange.
    """

    key: tuple[Any, ...]
    sources: Tensors
    targets: Tensors
    copies: Copies = ()

    def program(self, members: Members) -> DirectTransfer:
        """The program, which equal keys may share."""
        make, _, *arguments = self.key
        made: DirectTransfer = make(members, *arguments)
        return made


class Call(NamedTuple):
    """A collective: its exchanges, one after the other, and the tensors that it writes."""

    steps: Sequence[Step]
    results: Tensors


Find = Callable[..., Call | None]  # of this rank's number, the group's size and torch's arguments


def call_of(steps: Sequence[Step | None], results: Tensors) -> Call | None:
    """The steps as one collective; None where Gloo is to run one of them, or refuse it, or there are none."""
    found = [step for step in steps if step is not None]
    return Call(found, results) if found and len(found) == len(steps) else None


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Memory that holds the elements of a tensor in the order of its dims, its own or a copy; None off the CPU.

    >>> readable(torch.arange(6).view(2, 3).t()[1:]).tolist()
    [[1, 4], [2, 5]]
    """
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        return None
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor, copies: NewCopies) -> torch.Tensor | None:
    """Memory for the elements of a tensor in the order of its dims, its own or to be copied to it; None off the CPU."""
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        return None
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copies.append((tensor, found))
    return found


def in_place(tensor: torch.Tensor, copies: NewCopies) -> torch.Tensor | None:
    """Memory that is read and written; None off the CPU."""
    found = readable(tensor)
    if found is not None and found is not tensor:
        copies.append((tensor, found))
    return found


def all_readable(tensors: Tensors) -> list[torch.Tensor] | None:
    """`readable` of each; None where it is None of one."""
    found = []
    for tensor in tensors:
        memory = readable(tensor)
        if memory is None:
            return None
        found.append(memory)
    return found


def all_writable(tensors: Tensors, copies: NewCopies) -> list[torch.Tensor] | None:
    """`writable` of each; None where it is None of one."""
    found = []
    for tensor in tensors:
        memory = writable(tensor, copies)
        if memory is None:
            return None
        found.append(memory)
    return found


def meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors without gaps share memory.

    >>> whole = torch.zeros(4)
    >>> meet(whole[:3], whole[2:]), meet(whole[:2], whole[2:])
    (True, False)
    """
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
