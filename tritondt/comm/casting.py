"""A transfer whose messages hold a narrower dtype than its tensors: packs cast to it, unpacks cast back.

Everything takes the way through the wire dtype, what stays on its rank too, so that a value is the same on all ranks
that hold it. A part that several peers receive is packed once.
"""

from collections.abc import Iterator, Sequence

import torch

from tritondt.comm.communicator import Transfer
from tritondt.comm.packing import Arrival, Blocks, Casting, PackedTransfer, Slice, Term, moves, reduce_tables
from tritondt.kernels.boxes import CastBox
from tritondt.kernels.tables import Table, cast_table
from tritondt.planning.exchange import Message, Part
from tritondt.planning.geometry import joint_boxes, message_block


class _Buffer:
    """Parts one after another, without padding; equal lists of parts have one place. Starts count elements."""

    def __init__(self) -> None:
        self.held: list[Arrival] = []
        self.numel = 0
        self._starts: dict[tuple[Part, ...], int] = {}

    def place(self, parts: tuple[Part, ...]) -> int:
        """Where the parts begin."""
        found = self._starts.get(parts)
        if found is None:
            found = self._starts[parts] = self.numel
            for part in parts:
                self.held.append(Arrival(part, self.numel))
                self.numel += part.numel
        return found


def casting_transfer(transfer: Transfer, wire_dtype: torch.dtype) -> PackedTransfer:
    """Everything about a transfer in `wire_dtype` that does not change from call to call."""
    (dtype,) = set(transfer.dtypes)
    leaving, landing, widened = _Buffer(), _Buffer(), _Buffer()
    sends, receives = (
        _slices(buffer, messages, wire_dtype)
        for buffer, messages in ((leaving, transfer.exchange.sends), (landing, transfer.exchange.receives))
    )
    kept = [Arrival(part, leaving.place((part,))) for part in transfer.exchange.keeps]
    packs = [box for found in leaving.held for box in _packed(transfer, found)]
    keeps = [box for found in kept if moves(transfer, found.part) for box in _unpacked(transfer, found)]
    unpacks = [box for found in landing.held if moves(transfer, found.part) for box in _unpacked(transfer, found)]
    terms, widens = list[Term](), list[CastBox]()
    for source, arrivals in enumerate((landing.held, kept)):
        for part, start in arrivals:
            if not moves(transfer, part):
                place = widened.place((part,))
                widens.append(CastBox(source, 0, start, place, (part.numel,), (1,), (1,)))
                terms.append(Term(part, len(transfer.source_blocks), (message_block(part.region, place),)))
    return PackedTransfer(
        sends,
        receives,
        sum(found.num_bytes for found in sends),
        sum(found.num_bytes for found in receives),
        leaving.numel * wire_dtype.itemsize,
        landing.numel * wire_dtype.itemsize,
        _table(transfer, packs, dtype, wire_dtype),
        _table(transfer, keeps, wire_dtype, dtype),
        _table(transfer, unpacks, wire_dtype, dtype),
        reduce_tables(transfer, terms),
        Casting(_table(transfer, widens, wire_dtype, dtype), widened.numel * dtype.itemsize),
    )


def _slices(buffer: _Buffer, messages: Sequence[Message], wire_dtype: torch.dtype) -> tuple[Slice, ...]:
    size = wire_dtype.itemsize
    return tuple(Slice(each.peer, None, buffer.place(each.parts) * size, each.numel * size) for each in messages)


def _packed(transfer: Transfer, found: Arrival) -> Iterator[CastBox]:
    tensor = found.part.tensor
    return _casts(found.part, (transfer.source_blocks[tensor], _in_buffer(found)), (tensor, 0))


def _unpacked(transfer: Transfer, found: Arrival) -> Iterator[CastBox]:
    tensor = found.part.tensor
    return _casts(found.part, (_in_buffer(found), transfer.target_blocks[tensor]), (0, tensor))


def _in_buffer(found: Arrival) -> Blocks:
    return (message_block(found.part.region, found.start),)


def _casts(part: Part, sides: Sequence[Blocks], places: tuple[int, int]) -> Iterator[CastBox]:
    """The cast of a part from the first side to the second, which are tensors number `places`."""
    for lengths, ((source_offset, source_strides), (target_offset, target_strides)) in joint_boxes(sides, part.region):
        yield CastBox(*places, source_offset, target_offset, lengths, source_strides, target_strides)


def _table(transfer: Transfer, boxes: Sequence[CastBox], source: torch.dtype, target: torch.dtype) -> Table | None:
    if not boxes:
        return None
    before, after = (str(dtype).removeprefix("torch.") for dtype in (source, target))
    return cast_table(boxes, before, after, transfer.device)
