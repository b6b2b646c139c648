"""Messages of one exchange, as transports are given them."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch

from tritondt._C import MessageSlices


class Slice(NamedTuple):
    """Bytes of a message for `peer`: in tensor `tensor`, or in the buffer where that is None."""

    peer: int
    tensor: int | None
    start: int
    num_bytes: int


class Slices(tuple[Slice, ...]):
    """The messages of an exchange to peers, or from them."""

    @cached_property
    def native(self) -> MessageSlices:
        """The slices as the transports in C++ take them."""
        return MessageSlices(self)


NO_SLICES = Slices()


class MessageBuffers(NamedTuple):
    """Messages that go to peers, or come from them: slices of tensors, or of the buffer in `memory` at an address."""

    slices: Slices
    tensors: Sequence[torch.Tensor]
    pointers: Sequence[int]
    memory: torch.Tensor
    buffer: int

    def parts(self) -> list[tuple[int, torch.Tensor]]:
        """Peer and bytes of each message, as tensors that share the memory."""
        flat: dict[int | None, torch.Tensor] = {None: self.memory[self.buffer - self.memory.data_ptr() :]}
        for tensor in {place for _, place, _, _ in self.slices if place is not None}:
            flat[tensor] = _memory(self.tensors[tensor])
        return [(peer, flat[tensor][start : start + num_bytes]) for peer, tensor, start, num_bytes in self.slices]


# The same from a tuple, in half of the time: a named tuple's own constructor is a function of Python.
message_buffers: Callable[[tuple[Slices, Sequence[torch.Tensor], Sequence[int], torch.Tensor, int]], MessageBuffers] = (
    partial(tuple.__new__, MessageBuffers)
)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor's elements span, from the first to the last, as bytes."""
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).view(torch.uint8)
