"""Transfers compiled for ranks that read messages where their senders have packed them.

All messages to a peer that fit are packed into one slot of this rank's arena, one that several peers receive only once;
receivers unpack, or reduce, from there. Longer ones travel as between other ranks: both sides see which by the length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tritondt._C import CopyTable, DirectPlan, DirectProgram, ReduceTable
from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.packed_transfer import (
    Arrival,
    Term,
    in_buffer,
    moves,
    part_bytes,
    part_copies,
    reduce_tables,
    slices_of,
)
from tritondt.kernels.boxes import CopyBox
from tritondt.planning.exchange import Message, Part
from tritondt.planning.slots import ALIGNMENT, longest_message


class DirectTransfer(NamedTuple):
    """A transfer compiled to a program of the extension; buffers are of messages that go over sockets."""

    native: DirectProgram
    sent_bytes: int
    received_bytes: int
    num_sent: int
    num_received: int
    packed_bytes: int
    staged_bytes: int
    casting: None = None


@dataclass(frozen=True, eq=False)
class ProgramTransfer(Transfer):
    """A transfer of whole tensors that is made as a program: it has no boxes."""

    plan: DirectTransfer | None = None


class _Packed(NamedTuple):
    """A message in the slot, from the byte `start` on."""

    peer: int
    parts: tuple[Part, ...]
    start: int
    num_bytes: int


def direct_transfer(transfer: Transfer, num_ranks: int, slot_bytes: int) -> DirectTransfer:
    """A transfer among `num_ranks`, whose arenas have slots of `slot_bytes`, compiled for them."""
    exchange = transfer.exchange
    limit = longest_message(num_ranks, slot_bytes)
    near, far = _split(transfer, exchange.sends, limit)
    arriving, far_arriving = _split(transfer, exchange.receives, limit)
    packed = _placed(transfer, near)
    sends, packed_bytes, leaving = slices_of(transfer, far, transfer.source_blocks, landing=False)
    receives, staged_bytes, arrived = slices_of(transfer, far_arriving, transfer.target_blocks, landing=True)
    held = [(found.peer, arrival) for found in arriving for arrival in _arrivals(transfer, found.parts)]
    held += [(num_ranks, arrival) for arrival in arrived]
    packs = _packs(transfer, packed)
    packs += [box for found in leaving for box in _pack(transfer, found, 1)]
    keeps = [box for part in exchange.keeps if moves(transfer, part) for box in _keep(transfer, part)]
    unpacks = [box for source, found in held if moves(transfer, found.part) for box in _unpack(transfer, found, source)]
    native = DirectPlan(
        sends=[(found.peer, found.start, found.num_bytes) for found in packed],
        receives=[(found.peer, 0, _num_bytes(transfer, found)) for found in arriving],
        socket_sends=sends.native,
        socket_receives=receives.native,
        has_sockets=bool(sends or receives),
        pack=_table(packs),
        keep=_table(keeps),
        unpack=_table(unpacks),
        reduces=_reduces(transfer, held),
    )
    return DirectTransfer(
        native,
        sum(_num_bytes(transfer, found) for found in exchange.sends),
        sum(_num_bytes(transfer, found) for found in exchange.receives),
        len(exchange.sends),
        len(exchange.receives),
        packed_bytes,
        staged_bytes,
    )


def _split(transfer: Transfer, messages: Sequence[Message], limit: int) -> tuple[list[Message], list[Message]]:
    """Messages of at most `limit` bytes, and the others."""
    near, far = list[Message](), list[Message]()
    for message in messages:
        (near if _num_bytes(transfer, message) <= limit else far).append(message)
    return near, far


def _num_bytes(transfer: Transfer, message: Message) -> int:
    return sum(part_bytes(transfer, part) for part in message.parts)


def _placed(transfer: Transfer, messages: Sequence[Message]) -> list[_Packed]:
    """Messages with their places in the slot, equal ones with the same."""
    placed, starts, filled = list[_Packed](), dict[tuple[Part, ...], int](), 0
    for message in messages:
        num_bytes = _num_bytes(transfer, message)
        start = starts.setdefault(message.parts, filled)
        if start == filled:
            filled += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        placed.append(_Packed(message.peer, message.parts, start, num_bytes))
    return placed


def _arrivals(transfer: Transfer, parts: Sequence[Part], start: int = 0) -> list[Arrival]:
    """Parts of a message one after the other, from the byte `start` on."""
    found = list[Arrival]()
    for part in parts:
        found.append(Arrival(part, start))
        start += part_bytes(transfer, part)
    return found


def _packs(transfer: Transfer, packed: Sequence[_Packed]) -> list[CopyBox]:
    """Copies into the slot; what several peers receive is copied once."""
    once = {found.start: found.parts for found in packed}
    arrivals = [arrival for start, parts in once.items() for arrival in _arrivals(transfer, parts, start)]
    return [box for arrival in arrivals for box in _pack(transfer, arrival, 0)]


def _pack(transfer: Transfer, found: Arrival, buffer: int) -> list[CopyBox]:
    tensor = found.part.tensor
    sides = (transfer.source_blocks[tensor], in_buffer(transfer, found))
    return list(part_copies(transfer, found.part, sides, (tensor, buffer)))


def _keep(transfer: Transfer, part: Part) -> list[CopyBox]:
    tensor = part.tensor
    sides = (transfer.source_blocks[tensor], transfer.target_blocks[tensor])
    return list(part_copies(transfer, part, sides, (tensor, tensor)))


def _unpack(transfer: Transfer, found: Arrival, source: int) -> list[CopyBox]:
    tensor = found.part.tensor
    sides = (in_buffer(transfer, found), transfer.target_blocks[tensor])
    return list(part_copies(transfer, found.part, sides, (source, tensor)))


def _reduces(transfer: Transfer, held: Sequence[tuple[int, Arrival]]) -> tuple[ReduceTable, ...]:
    """Reductions of terms from tensors, which come first among the inputs, messages and the receive buffer."""
    num_tensors = len(transfer.source_blocks)
    terms = [
        Term(found.part, num_tensors + source, in_buffer(transfer, found))
        for source, found in held
        if not moves(transfer, found.part)
    ]
    terms += [
        Term(part, part.tensor, transfer.source_blocks[part.tensor])
        for part in transfer.exchange.keeps
        if not moves(transfer, part)
    ]
    return reduce_tables(transfer, terms)  # type: ignore[return-value]


def _table(boxes: list[CopyBox]) -> CopyTable | None:
    return CopyTable(boxes) if boxes else None
