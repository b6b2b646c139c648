"""Transfers whose messages for ranks of the same host are packed into those ranks' memory, where they unpack them.

A message that does not fit a slot, or is for another host's rank, goes as `packed_transfer` has it: both of its sides
decide alike, by its bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.messages import Slice, Slices
from tritondt.comm.packing.packed_transfer import (
    ALIGNED,
    Arrival,
    TensorStarts,
    kept,
    moves,
    packed,
    part_bytes,
    reduce_tables,
    slices_of,
    terms_of,
    unpacked,
)
from tritondt.kernels.signals import SlotSignals, SlotTensors
from tritondt.kernels.tables import Table, copy_table
from tritondt.planning.alignment import DENSE, Alignment
from tritondt.planning.exchange import Message
from tritondt.planning.slots import DeviceSlots

# A kernel takes the slots of 30 peers beside a target and this rank's own term: more terms than these are NCCL's.
_MOST_ADDED = 31


class PeerMemory(Protocol):
    """Arenas of the ranks of a host that this rank has mapped: `places` in the communicator, ascending, its own too."""

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the ranks whose arenas are mapped."""
        ...

    @property
    def slots(self) -> DeviceSlots:
        """Layout of every arena."""
        ...

    def slots_at(self, place: int) -> int:
        """Address of this rank's first slot in the arena of the rank at `place`."""
        ...

    def slots_of(self, place: int) -> int:
        """Address of the first slot of the rank at `place` in this rank's own arena."""
        ...

    def leaving(self, targets: Sequence[int], fingerprint: int) -> SlotSignals:
        """Signals of what packs for `targets`: it awaits slots that may be written to, and tells when it has."""
        ...

    def arriving(self, sources: Sequence[int], fingerprint: int) -> SlotSignals:
        """Signals of what unpacks what `sources` have packed: it awaits that, and says that it has been read."""
        ...


class PlacedTransfer(NamedTuple):
    """A transfer compiled to slots, messages and tables.

    `pack` writes the send buffer, and this rank's slots in others' arenas, the first of which lie at `slots`. It awaits
    that those have been read, and says when they are packed. Then go the messages that are left to the transport:
    `far_sends` and `far_receives` of all `sends` and `receives`. `unpack` and `reduces` await the peers of the host,
    and say when all is read: `unpack` has the receive buffer, the sources' slots in this rank's arena, `own_slots`, and
    the tensors, of which it moves what stays, for sources; `reduces` have the tensors, receive buffer and slots.
    """

    sends: Slices
    receives: Slices
    sent_bytes: int
    received_bytes: int
    packed_bytes: int
    staged_bytes: int
    far_sends: Slices
    far_receives: Slices
    slots: tuple[int, ...]
    own_slots: tuple[int, ...]
    pack: Table | None
    unpack: Table | None
    reduces: tuple[Table, ...]

    @property
    def num_sent(self) -> int:
        """Number of messages that leave."""
        return len(self.sends)

    @property
    def num_received(self) -> int:
        """Number of messages that arrive."""
        return len(self.receives)


class _Side(NamedTuple):
    """Messages of one side: the peers of those through slots, and the others as slices.

    `buffers` has all parts that lie in the buffer, number 0, or in slots, numbered from 1 on as the peers are.
    """

    near: tuple[int, ...]
    far: Slices
    far_bytes: int
    buffers: list[tuple[Arrival, int]]
    all: Slices


def placed_transfer(
    transfer: Transfer, memory: PeerMemory, alignment: Alignment = DENSE, starts: TensorStarts = ALIGNED
) -> PlacedTransfer | None:
    """A transfer compiled for slots of `memory`; None where none of its messages goes through one.

    `alignment` and `starts` are those of the messages that do not.
    """
    is_sum = any(transfer.reductions)
    if is_sum and len(memory.places) > _MOST_ADDED:  # all of the host know it alike
        return None
    exchange, fingerprint = transfer.exchange, transfer.fingerprint
    leaving = _side(transfer, exchange.sends, memory, alignment, starts.sources, landing=False)
    arriving = _side(transfer, exchange.receives, memory, alignment, starts.targets, landing=True)
    if not leaving.near and not arriving.near:
        return None
    packs = [box for found, buffer in leaving.buffers for box in packed(transfer, found, buffer)]
    unpacks = [
        box
        for found, buffer in arriving.buffers
        if moves(transfer, found.part)
        for box in unpacked(transfer, found, buffer)
    ]
    num_sources, num_slots, num_tensors = len(arriving.near), 1 + len(arriving.near), len(transfer.source_blocks)
    unpacks += [box._replace(source=box.source + num_slots) for box in kept(transfer)]
    terms = list(terms_of(transfer, arriving.buffers))
    of_pack = of_unpack = of_reduces = None
    if leaving.near:
        tensors = tuple(range(1, 1 + len(leaving.near)))
        of_pack = SlotTensors(memory.leaving(tuple(leaving.near), fingerprint), tensors, are_targets=True)
    if arriving.near:
        signals = memory.arriving(tuple(arriving.near), fingerprint)
        tensors = tuple(range(1, 1 + num_sources))
        of_unpack = SlotTensors(signals, tensors, are_targets=False, publishes=not terms)
        tensors = tuple(number + num_tensors for number in tensors)
        of_reduces = SlotTensors(signals, tensors, are_targets=False, awaits=not unpacks)
    return PlacedTransfer(
        leaving.all,
        arriving.all,
        sum(found.num_bytes for found in leaving.all),
        sum(found.num_bytes for found in arriving.all),
        leaving.far_bytes,
        arriving.far_bytes,
        leaving.far,
        arriving.far,
        tuple(map(memory.slots_at, leaving.near)),
        tuple(map(memory.slots_of, arriving.near)),
        copy_table(packs, transfer.device, of_pack) if packs else None,
        copy_table(unpacks, transfer.device, of_unpack) if unpacks else None,
        reduce_tables(transfer, terms, of_reduces),
    )


def _side(
    transfer: Transfer,
    messages: Sequence[Message],
    memory: PeerMemory,
    alignment: Alignment,
    starts: Sequence[int],
    *,
    landing: bool,
) -> _Side:
    """One side's messages; those through slots begin where a slot does."""
    sizes = [sum(part_bytes(transfer, part) for part in message.parts) for message in messages]
    placed, others = dict[int, list[Arrival]](), list[Message]()
    for message, num_bytes in zip(messages, sizes, strict=True):
        if message.peer not in memory.places or num_bytes > memory.slots.slot_bytes:
            others.append(message)
            continue
        start = 0
        placed[message.peer] = found = list[Arrival]()
        for part in message.parts:
            found.append(Arrival(part, start))
            start += part_bytes(transfer, part)
    stored = transfer.target_blocks if landing else transfer.source_blocks
    far, far_bytes, buffered = slices_of(transfer, others, stored, alignment, starts, landing=landing)
    named = Slices(Slice(message.peer, None, 0, num_bytes) for message, num_bytes in zip(messages, sizes, strict=True))
    buffers = [(found, 0) for found in buffered]
    buffers += [(found, number) for number, of_peer in enumerate(placed.values(), 1) for found in of_peer]
    return _Side(tuple(placed), far, far_bytes, buffers, named)
