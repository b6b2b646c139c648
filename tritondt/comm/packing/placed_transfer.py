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
from tritondt.kernels.signals import SignalTable
from tritondt.kernels.tables import Table, copy_table, gated_copy_table
from tritondt.planning.alignment import DENSE, Alignment
from tritondt.planning.exchange import Message
from tritondt.planning.slots import DeviceSlots, slot_of


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

    @property
    def gate(self) -> int:
        """Address of the word that signals set where they have been stopped: nothing is packed then."""
        ...

    def slot_at(self, place: int, slot: int) -> int:
        """Address of this rank's slot in the arena of the rank at `place`."""
        ...

    def begin(self, targets: Sequence[int], slot: int) -> SignalTable:
        """Signals that wait until slots for `targets` may be written to."""
        ...

    def meet(self, targets: Sequence[int], sources: Sequence[int], slot: int, fingerprint: int) -> SignalTable:
        """Signals that say to `targets` that their slots are packed, and wait for `sources` to say so."""
        ...


class PlacedTransfer(NamedTuple):
    """A transfer compiled to slots, messages and tables.

    After `begin`, `pack` writes the send buffer, and then this rank's slots in others' arenas, which lie at `slots`.
    Where messages are left to the transport (`far_sends`, `far_receives` of all `sends` and `receives`), `tell` says to
    the others of the host that slots are packed, and those messages go before this rank waits for anybody in `meet`;
    elsewhere `meet` says it too. Then `unpack` reads the receive buffer, this rank's own arena, and the sources, of
    which it moves what stays; `reduces` read sources, receive buffer and arena.
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
    begin: SignalTable
    tell: SignalTable | None
    meet: SignalTable
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
    """Messages of one side: those through slots with their places there, and the others as slices, or in a buffer."""

    near: dict[int, list[Arrival]]
    far: Slices
    far_bytes: int
    buffered: list[Arrival]
    all: Slices


def placed_transfer(
    transfer: Transfer, memory: PeerMemory, alignment: Alignment = DENSE, starts: TensorStarts = ALIGNED
) -> PlacedTransfer | None:
    """A transfer compiled for slots of `memory`; None where none of its messages goes through one.

    `alignment` and `starts` are those of the messages that do not.
    """
    exchange, slot = transfer.exchange, slot_of(transfer.fingerprint)
    # A rank packs into its own slot, in whichever arena that is; what arrives lies in the senders' slots of its own.
    leaving = _side(transfer, exchange.sends, memory, {}, alignment, starts.sources, landing=False)
    begins = {peer: memory.slots.start(number, slot) for number, peer in enumerate(memory.places)}
    arriving = _side(transfer, exchange.receives, memory, begins, alignment, starts.targets, landing=True)
    if not leaving.near and not arriving.near:
        return None
    left = [(found, 0) for found in leaving.buffered]
    left += [(found, number) for number, of_peer in enumerate(leaving.near.values(), 1) for found in of_peer]
    arrived = [(found, 0) for found in arriving.buffered]
    arrived += [(found, 1) for of_peer in arriving.near.values() for found in of_peer]
    packs = [box for found, buffer in left for box in packed(transfer, found, buffer)]
    unpacks = [
        box for found, buffer in arrived if moves(transfer, found.part) for box in unpacked(transfer, found, buffer)
    ]
    unpacks += [box._replace(source=box.source + 2) for box in kept(transfer)]
    targets, sources = tuple(leaving.near), tuple(arriving.near)
    is_told_first = bool(leaving.far or arriving.far)
    tell = memory.meet(targets, (), slot, transfer.fingerprint) if is_told_first else None
    meet = memory.meet(() if is_told_first else targets, sources, slot, transfer.fingerprint)
    return PlacedTransfer(
        leaving.all,
        arriving.all,
        sum(found.num_bytes for found in leaving.all),
        sum(found.num_bytes for found in arriving.all),
        leaving.far_bytes,
        arriving.far_bytes,
        leaving.far,
        arriving.far,
        tuple(memory.slot_at(peer, slot) for peer in leaving.near),
        memory.begin(targets, slot),
        tell,
        meet,
        gated_copy_table(packs, memory.gate, transfer.device) if packs else None,
        copy_table(unpacks, transfer.device) if unpacks else None,
        reduce_tables(transfer, terms_of(transfer, arrived)),
    )


def _side(
    transfer: Transfer,
    messages: Sequence[Message],
    memory: PeerMemory,
    begins: dict[int, int],
    alignment: Alignment,
    starts: Sequence[int],
    *,
    landing: bool,
) -> _Side:
    """One side's messages; those through slots begin at `begins` by their peers, or at 0."""
    sizes = [sum(part_bytes(transfer, part) for part in message.parts) for message in messages]
    placed, others = dict[int, list[Arrival]](), list[Message]()
    for message, num_bytes in zip(messages, sizes, strict=True):
        if message.peer not in memory.places or num_bytes > memory.slots.slot_bytes:
            others.append(message)
            continue
        start = begins.get(message.peer, 0)
        placed[message.peer] = found = list[Arrival]()
        for part in message.parts:
            found.append(Arrival(part, start))
            start += part_bytes(transfer, part)
    stored = transfer.target_blocks if landing else transfer.source_blocks
    far, far_bytes, buffered = slices_of(transfer, others, stored, alignment, starts, landing=landing)
    named = Slices(Slice(message.peer, None, 0, num_bytes) for message, num_bytes in zip(messages, sizes, strict=True))
    return _Side(placed, far, far_bytes, buffered, named)
