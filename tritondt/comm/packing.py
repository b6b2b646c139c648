"""A transfer turned into bytes: which slice of which memory is each message, and the tables that fill and empty them.

Everything here is made once per transfer. A message that is one run of a tensor's memory is that run; the
others get consecutive places in a buffer, without padding between their parts.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tritondt.comm.communicator import Reduction, Transfer
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.tables import Table, copy_table, reduce_table
from tritondt.planning.exchange import Message, Part
from tritondt.planning.geometry import Block, contiguous_offset, joint_boxes, message_block

Blocks = Sequence[Block]


class Slice(NamedTuple):
    """Bytes of a message for `peer`: in tensor `tensor`, or in the buffer where that is None."""

    peer: int
    tensor: int | None
    start: int
    num_bytes: int


class PackedTransfer(NamedTuple):
    """A transfer in bytes.

    `pack` fills the send buffer from the sources, `keep` moves what stays, `unpack` moves what arrived in the
    receive buffer to the targets, `reduces` reduce sources and receive buffer (the last of their inputs).
    """

    sends: tuple[Slice, ...]
    receives: tuple[Slice, ...]
    sent_bytes: int
    received_bytes: int
    packed_bytes: int
    staged_bytes: int
    pack: Table | None
    keep: Table | None
    unpack: Table | None
    reduces: tuple[Table, ...]


class _Arrival(NamedTuple):
    """A part in a buffer, and the byte at which it starts."""

    part: Part
    start: int


def packed_transfer(transfer: Transfer) -> PackedTransfer:
    """Everything about a transfer that does not change from call to call."""
    exchange = transfer.exchange
    sends, packed_bytes, leaving = _slices(transfer, exchange.sends, transfer.source_blocks, landing=False)
    receives, staged_bytes, arrived = _slices(transfer, exchange.receives, transfer.target_blocks, landing=True)
    packs = [box for found in leaving for box in _pack(transfer, found)]
    keeps = [box for part in exchange.keeps if _moves(transfer, part) for box in _keep(transfer, part)]
    unpacks = [box for found in arrived if _moves(transfer, found.part) for box in _unpack(transfer, found)]
    pack, keep, unpack = (copy_table(boxes, transfer.device) if boxes else None for boxes in (packs, keeps, unpacks))
    return PackedTransfer(
        sends,
        receives,
        sum(found.num_bytes for found in sends),
        sum(found.num_bytes for found in receives),
        packed_bytes,
        staged_bytes,
        pack,
        keep,
        unpack,
        _reduce_tables(transfer, arrived),
    )


def _moves(transfer: Transfer, part: Part) -> bool:
    return transfer.reductions[part.tensor] is None


def _slices(
    transfer: Transfer, messages: Sequence[Message], stored: Sequence[Blocks], *, landing: bool
) -> tuple[tuple[Slice, ...], int, list[_Arrival]]:
    """Where each message lies, the buffer's size, and the parts that lie in the buffer."""
    alignment = max((dtype.itemsize for dtype in transfer.dtypes), default=1)
    slices, buffered, filled = [], list[_Arrival](), 0
    for message in messages:
        num_bytes = sum(_num_bytes(transfer, part) for part in message.parts)
        part = message.parts[0]
        if len(message.parts) == 1 and (not landing or _moves(transfer, part)):
            offset = contiguous_offset(stored[part.tensor], part.region)
            if offset is not None:
                start = offset * transfer.dtypes[part.tensor].itemsize
                slices.append(Slice(message.peer, part.tensor, start, num_bytes))
                continue
        filled = -(-filled // alignment) * alignment
        slices.append(Slice(message.peer, None, filled, num_bytes))
        for part in message.parts:
            buffered.append(_Arrival(part, filled))
            filled += _num_bytes(transfer, part)
    return tuple(slices), filled, buffered


def _num_bytes(transfer: Transfer, part: Part) -> int:
    return part.numel * transfer.dtypes[part.tensor].itemsize


def _in_buffer(transfer: Transfer, found: _Arrival) -> Blocks:
    return (message_block(found.part.region, found.start // transfer.dtypes[found.part.tensor].itemsize),)


def _copies(transfer: Transfer, part: Part, sides: Sequence[Blocks], places: tuple[int, int]) -> Iterator[CopyBox]:
    """The copy of a part from the first side to the second, which are tensors number `places`."""
    for lengths, ((source_offset, source_strides), (target_offset, target_strides)) in joint_boxes(sides, part.region):
        yield CopyBox(
            source=places[0],
            target=places[1],
            source_offset=source_offset,
            target_offset=target_offset,
            itemsize=transfer.dtypes[part.tensor].itemsize,
            lengths=lengths,
            source_strides=source_strides,
            target_strides=target_strides,
        )


def _pack(transfer: Transfer, found: _Arrival) -> Iterator[CopyBox]:
    tensor = found.part.tensor
    return _copies(transfer, found.part, (transfer.source_blocks[tensor], _in_buffer(transfer, found)), (tensor, 0))


def _keep(transfer: Transfer, part: Part) -> Iterator[CopyBox]:
    tensor = part.tensor
    return _copies(transfer, part, (transfer.source_blocks[tensor], transfer.target_blocks[tensor]), (tensor, tensor))


def _unpack(transfer: Transfer, found: _Arrival) -> Iterator[CopyBox]:
    tensor = found.part.tensor
    return _copies(transfer, found.part, (_in_buffer(transfer, found), transfer.target_blocks[tensor]), (0, tensor))


def _reduce_tables(transfer: Transfer, arrived: Sequence[_Arrival]) -> tuple[Table, ...]:
    """One table per dtype and reduction; a box's slots are its terms in coordinate order."""
    terms: dict[tuple[int, object], list[tuple[int, int, Blocks]]] = defaultdict(list)
    regions = {}
    buffer = len(transfer.source_blocks)
    for found in arrived:
        if not _moves(transfer, found.part):
            key = (found.part.tensor, found.part.region)
            regions[key] = found.part
            terms[key].append((found.part.contribution, buffer, _in_buffer(transfer, found)))
    for part in transfer.exchange.keeps:
        if not _moves(transfer, part):
            key = (part.tensor, part.region)
            regions[key] = part
            terms[key].append((part.contribution, part.tensor, transfer.source_blocks[part.tensor]))
    tables: dict[tuple[str, Reduction], list[ReduceBox]] = defaultdict(list)
    for key, part in regions.items():
        reduction = transfer.reductions[part.tensor]
        assert reduction is not None, f"tensor {part.tensor} of {transfer.description} is not reduced"
        dtype = str(transfer.dtypes[part.tensor]).removeprefix("torch.")
        tables[dtype, reduction] += _reduced_boxes(transfer, part, sorted(terms[key], key=lambda term: term[0]))
    return tuple(
        reduce_table(boxes, reduction.op, dtype, reduction.divisor, transfer.device)
        for (dtype, reduction), boxes in tables.items()
    )


def _reduced_boxes(transfer: Transfer, part: Part, terms: Sequence[tuple[int, int, Blocks]]) -> Iterator[ReduceBox]:
    expected = list(range(transfer.exchange.contributions[part.tensor]))
    assert [term[0] for term in terms] == expected, (
        f"{transfer.description} has terms {[term[0] for term in terms]} for {part.region}, expected {expected}"
    )
    sides = (transfer.target_blocks[part.tensor], *(stored for _, _, stored in terms))
    for lengths, ((target_offset, target_strides), *places) in joint_boxes(sides, part.region):
        slots = tuple(
            Slot(source, offset, strides) for (_, source, _), (offset, strides) in zip(terms, places, strict=True)
        )
        yield ReduceBox(part.tensor, target_offset, lengths, target_strides, slots)
