"""Makes `exchange` out of messages between pairs of ranks: one pack, one group of messages, one unpack.

A message that is one run of a tensor's memory is sent from there, and lands there, without a copy; this is
each rank's own decision and changes no message. All others go through two buffers, one for what is packed
and one for what arrives, that live for the one call.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch

from tritondt.comm.communicator import Traffic, Transfer
from tritondt.comm.packing import PackedTransfer, Slice, packed_transfer
from tritondt.errors import TransportError
from tritondt.memory import allocate

Letter = tuple[int, torch.Tensor]  # a peer, and the bytes that go to it or come from it


class PackedCommunicator(ABC):
    """A communicator whose transport carries bytes from one rank to another."""

    device_types: tuple[str, ...] = ("cpu",)

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._traffic = Traffic()
        self.sequence = 0  # exchanges so far, those without a message of ours included
        self._packed: WeakKeyDictionary[Transfer, PackedTransfer] = WeakKeyDictionary()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world's ranks in this communicator, ascending."""
        return self._ranks

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages so far."""
        return self._traffic

    @abstractmethod
    def carry(
        self,
        transfer: Transfer,
        receives: Sequence[Letter],
        packed: Callable[[], Sequence[Letter]],
        meanwhile: Callable[[], None],
    ) -> None:
        """Posts `receives`, sends what `packed()` returns, calls `meanwhile`, and waits for all messages."""

    def exchange(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer) -> None:
        """Runs this rank's side of `transfer`; see `tritondt.comm.communicator.Communicator`."""
        plan = self._packed.get(transfer)
        if plan is None:
            plan = self._packed[transfer] = packed_transfer(transfer)
        self._check_devices(sources)
        source_pointers = [tensor.data_ptr() for tensor in sources]
        target_pointers = [tensor.data_ptr() for tensor in targets]
        threads = torch.get_num_threads()
        staging = _buffer(plan.staged_bytes)

        def packed() -> Sequence[Letter]:
            buffer = _buffer(plan.packed_bytes)
            if plan.pack is not None:
                plan.pack.run(source_pointers, [buffer.data_ptr()], threads)
            return _letters(plan.sends, sources, buffer)

        def keep() -> None:
            if plan.keep is not None:
                plan.keep.run(source_pointers, target_pointers, threads)

        self.sequence += 1
        if plan.sends or plan.receives:
            self._traffic.num_sent += len(plan.sends)
            self._traffic.num_received += len(plan.receives)
            self.carry(transfer, _letters(plan.receives, targets, staging), packed, keep)
        else:
            keep()
        if plan.unpack is not None:
            plan.unpack.run([staging.data_ptr()], target_pointers, threads)
        for table in plan.reduces:
            table.run([*source_pointers, staging.data_ptr()], target_pointers, threads)

    def _check_devices(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type not in self.device_types:
                raise TransportError(
                    f"{type(self).__name__} was given a tensor on {tensor.device}; it carries tensors on "
                    f"{' and '.join(self.device_types)} only"
                )


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def _buffer(num_bytes: int) -> torch.Tensor:
    return allocate((num_bytes,), torch.uint8) if num_bytes else _NO_BYTES


def _letters(slices: Sequence[Slice], tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> list[Letter]:
    found: list[Letter] = []
    flat: dict[int, torch.Tensor] = {}
    for peer, tensor, start, num_bytes in slices:
        if tensor is None:
            memory = buffer
        else:
            memory = flat.get(tensor)  # type: ignore[assignment]
            if memory is None:
                memory = flat[tensor] = _memory(tensors[tensor])
        found.append((peer, memory[start : start + num_bytes]))
    return found


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor's elements span, from the first to the last, as bytes."""
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).view(torch.uint8)
