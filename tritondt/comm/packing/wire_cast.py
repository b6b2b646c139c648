"""A transfer whose messages hold a narrower dtype than its tensors: packs cast to it, unpacks cast back.

Everything takes the way through the wire dtype, what stays on its rank too, so that a value is the same on all ranks
that hold it. A part that several peers receive is packed once. In fp8 a message begins with a float32 scale for each
box of its parts: a box lies as one in every tensor, so sender and receiver agree on them without a word.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.messages import Slice, Slices
from tritondt.comm.packing.packed_transfer import Blocks, Casting, PackedTransfer, Term, moves, reduce_tables
from tritondt.comm.packing.wire_dtype import is_scaled
from tritondt.kernels.boxes import SCALE_BYTES, CastBox
from tritondt.kernels.scaled_tables import ScalePlace
from tritondt.kernels.tables import Table, cast_table, dequantize_table, quantize_table
from tritondt.planning.alignment import DENSE, Alignment
from tritondt.planning.exchange import Message, Part
from tritondt.planning.storage import joint_boxes, message_block
from tritondt.sharding import intervals as regions


class _Held(NamedTuple):
    """A part in a buffer: the element at which it starts and, in fp8, the byte at which its scale does."""

    part: Part
    start: int
    scale: int


class _Cast(NamedTuple):
    """A box to cast, and the place of its scale, which only casts to or from fp8 have."""

    box: CastBox
    scale: ScalePlace


class _Place(NamedTuple):
    """The elements of a buffer that a message takes, and what lies in them."""

    start: int
    end: int
    held: tuple[_Held, ...]


class _Buffer:
    """A buffer of messages, one after another at multiples of `step`; equal ones have one place. All count elements."""

    def __init__(self, *, has_scales: bool, step: int = 1) -> None:
        self.numel = 0
        self._has_scales, self._step = has_scales, step
        self._places: dict[tuple[Part, ...], _Place] = {}

    @property
    def held(self) -> list[_Held]:
        """All parts that lie in the buffer."""
        return [found for place in self._places.values() for found in place.held]

    def place(self, parts: Sequence[Part]) -> _Place:
        """The place of a message of these parts, a new one where there is none."""
        boxes = tuple(_boxes(parts)) if self._has_scales else tuple(parts)
        found = self._places.get(boxes)
        if found is None:
            self.numel = -(-self.numel // self._step) * self._step
            found = self._places[boxes] = self._placed(boxes)
            self.numel = found.end
        return found

    def _placed(self, boxes: Sequence[Part]) -> _Place:
        filled = self.numel + (len(boxes) * SCALE_BYTES if self._has_scales else 0)
        held = []
        for number, part in enumerate(boxes):
            held.append(_Held(part, filled, self.numel + number * SCALE_BYTES))
            filled += part.numel
        return _Place(self.numel, filled, tuple(held))


def _boxes(parts: Iterable[Part]) -> Iterator[Part]:
    """Parts cut where their indices have a gap: each lies as one strided box in every tensor that holds it."""
    for part in parts:
        for box in regions.boxes(part.region):
            yield replace(part, region=tuple((interval,) for interval in box))


def casting_transfer(transfer: Transfer, wire_dtype: torch.dtype, alignment: Alignment = DENSE) -> PackedTransfer:
    """A transfer in `wire_dtype` compiled to messages and tables, which do not change from call to call."""
    (dtype,) = set(transfer.dtypes)
    has_scales = is_scaled(wire_dtype)
    step = max(alignment.buffered // wire_dtype.itemsize, 1)
    leaving, landing = (_Buffer(has_scales=has_scales, step=step) for _ in range(2))
    widened = _Buffer(has_scales=False)
    sends, receives = (
        _slices(buffer, messages, wire_dtype)
        for buffer, messages in ((leaving, transfer.exchange.sends), (landing, transfer.exchange.receives))
    )
    kept = [found for part in transfer.exchange.keeps for found in leaving.place((part,)).held]
    packs = [cast for found in leaving.held for cast in _packed(transfer, found)]
    keeps = [cast for found in kept if moves(transfer, found.part) for cast in _unpacked(transfer, found)]
    unpacks = [cast for found in landing.held if moves(transfer, found.part) for cast in _unpacked(transfer, found)]
    terms, widens = list[Term](), list[_Cast]()
    for source, arrivals in enumerate((landing.held, kept)):
        for part, start, scale in arrivals:
            if not moves(transfer, part):
                place = widened.place((part,)).start
                box = CastBox(source, 0, start, place, (part.numel,), (1,), (1,))
                widens.append(_Cast(box, ScalePlace(source, scale)))
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


def _slices(buffer: _Buffer, messages: Sequence[Message], wire_dtype: torch.dtype) -> Slices:
    size, slices = wire_dtype.itemsize, list[Slice]()
    for message in messages:
        place = buffer.place(message.parts)
        slices.append(Slice(message.peer, None, place.start * size, (place.end - place.start) * size))
    return Slices(slices)


def _packed(transfer: Transfer, found: _Held) -> Iterator[_Cast]:
    tensor = found.part.tensor
    sides = (transfer.source_blocks[tensor], _in_buffer(found))
    return _casts(found, sides, (tensor, 0))


def _unpacked(transfer: Transfer, found: _Held) -> Iterator[_Cast]:
    tensor = found.part.tensor
    sides = (_in_buffer(found), transfer.target_blocks[tensor])
    return _casts(found, sides, (0, tensor))


def _in_buffer(found: _Held) -> Blocks:
    return (message_block(found.part.region, found.start),)


def _casts(found: _Held, sides: Sequence[Blocks], places: tuple[int, int]) -> Iterator[_Cast]:
    """The cast of a part from the first side to the second, which are tensors number `places`."""
    for lengths, ((source_offset, source_strides), (target_offset, target_strides)) in joint_boxes(
        sides, found.part.region
    ):
        box = CastBox(*places, source_offset, target_offset, lengths, source_strides, target_strides)
        yield _Cast(box, ScalePlace(0, found.scale))


def _table(transfer: Transfer, casts: Sequence[_Cast], source: torch.dtype, target: torch.dtype) -> Table | None:
    if not casts:
        return None
    boxes, scales = [cast.box for cast in casts], [cast.scale for cast in casts]
    before, after = (str(dtype).removeprefix("torch.") for dtype in (source, target))
    if is_scaled(target):
        return quantize_table(boxes, scales, before, after, transfer.device)
    if is_scaled(source):
        return dequantize_table(boxes, scales, before, after, transfer.device)
    return cast_table(boxes, before, after, transfer.device)
