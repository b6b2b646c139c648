"""Steps of collectives between ranks that read each other's memory."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tritondt.comm.packing.arena_transfer import ArenaTransfer
from tritondt.process_group.shared_memory_programs import Members
from tritondt.process_group.staging import Copies

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]


class Step(NamedTuple):
    """One exchange and its tensors.

    `key` is what its program is made by: a function, a part that only tells texts apart, and the function's arguments.
    `copies` are pairs of a tensor and what is copied to it after the exchange.
    """

    key: tuple[Any, ...]
    sources: Tensors
    targets: Tensors
    copies: Copies = ()

    def program(self, members: Members) -> ArenaTransfer:
        """The program, which equal keys may share."""
        make, _, *arguments = self.key
        made: ArenaTransfer = make(members, *arguments)
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


def meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors without gaps share memory.

    >>> whole = torch.zeros(4)
    >>> meet(whole[:3], whole[2:]), meet(whole[:2], whole[2:])
    (True, False)
    """
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
