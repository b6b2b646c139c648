"""Boxes of pieces of parts, in tensors and in messages.

Boxes are found once for a part and clipped to each of its pieces, which takes a fifth of finding them for each.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.packed_transfer import Blocks, check_contributions, part_copies, tables_of_sums
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.tables import Table
from tritondt.planning.exchange import Part
from tritondt.planning.rounds import Piece, Reduced
from tritondt.planning.storage import Joint, clipped, joint_boxes, message_block
from tritondt.sharding.intervals import Region


class Held(NamedTuple):
    """A piece from the byte `start` on in buffer number `source`, the slot of a peer's place or the staging.

    Without a `source` it is in its tensor.
    """

    source: int | None
    piece: Piece
    start: int


class PieceBoxes:
    """Boxes of one transfer's pieces; the boxes of each part are kept."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._itemsizes = [dtype.itemsize for dtype in transfer.dtypes]
        self._of_parts: dict[tuple[str, int, Region], list[Joint]] = {}

    def keeps(self, part: Part) -> Iterator[CopyBox]:
        """Copies of a part that stays, from tensor to tensor."""
        tensor = part.tensor
        sides = (self.transfer.source_blocks[tensor], self.transfer.target_blocks[tensor])
        return part_copies(self.transfer, part, sides, (tensor, tensor))

    def packs(self, held: Held) -> Iterator[CopyBox]:
        """Copies of a piece from its tensor into the slot."""
        tensor, start = held.piece.part.tensor, self._first_element(held)
        found = self._clipped("pack", held.piece, self.transfer.source_blocks[tensor])
        for lengths, ((offset, strides), (in_message, of_message)) in found:
            yield CopyBox(tensor, 0, offset, start + in_message, self._itemsizes[tensor], lengths, strides, of_message)

    def unpacks(self, held: Held) -> Iterator[CopyBox]:
        """Copies of a piece that has arrived into its tensor."""
        assert held.source is not None, f"{held} has not arrived"
        tensor, start = held.piece.part.tensor, self._first_element(held)
        found = self._clipped("unpack", held.piece, self.transfer.target_blocks[tensor])
        for lengths, ((offset, strides), (in_message, of_message)) in found:
            yield CopyBox(
                held.source, tensor, start + in_message, offset, self._itemsizes[tensor], lengths, of_message, strides
            )

    def stages(self, held: Held, place: Held) -> CopyBox:
        """The copy of a term into its place in the staging, which comes behind the targets."""
        assert held.source is not None, f"{held} has not arrived"
        itemsize, to = self._itemsizes[held.piece.part.tensor], len(self.transfer.target_blocks)
        numbers = held.start // itemsize, place.start // itemsize
        return CopyBox(held.source, to, *numbers, itemsize, (held.piece.numel,), (1,), (1,))

    def reduces(self, held: Sequence[Held], kept: Sequence[Piece]) -> tuple[Table, ...]:
        """Tables of the sums of terms in buffers and of those `kept` in this rank's tensors."""
        if not (held or kept):
            return ()
        terms: dict[Reduced, list[Held]] = defaultdict(list)
        for found in (*held, *(Held(None, piece, 0) for piece in kept)):
            terms[found.piece.reduced].append(found)
        return tables_of_sums(self.transfer, (box for of_one in terms.values() for box in self._sums(of_one)))

    def _sums(self, terms: Sequence[Held]) -> Iterator[ReduceBox]:
        """Sums of all terms of one piece, in the order of their numbers."""
        terms = sorted(terms, key=lambda term: term.piece.part.contribution)
        piece = terms[0].piece
        part, tensor = piece.part, piece.part.tensor
        check_contributions(self.transfer, [term.piece.part for term in terms])
        # Without an own term the second place is that of the target again, and no slot's.
        has_own = any(term.source is None for term in terms)
        own = (self.transfer.source_blocks if has_own else self.transfer.target_blocks)[tensor]
        found = self._clipped(f"sum {has_own}", piece, self.transfer.target_blocks[tensor], own)
        num_tensors = len(self.transfer.source_blocks)
        for lengths, ((offset, strides), in_own, (in_message, of_message)) in found:
            slots = tuple(
                Slot(tensor, *in_own)
                if term.source is None
                else Slot(num_tensors + term.source, self._first_element(term) + in_message, of_message)
                for term in terms
            )
            yield ReduceBox(part.tensor, offset, lengths, strides, slots)

    def _first_element(self, held: Held) -> int:
        """Where a piece's part would start in its buffer, in elements, if all of it were there."""
        return held.start // self._itemsizes[held.piece.part.tensor] - held.piece.start

    def _clipped(self, what: str, piece: Piece, *stored: Blocks) -> Iterator[Joint]:
        """Boxes of a piece in storages, and in a message of the whole part."""
        region = piece.part.region
        key = what, piece.part.tensor, region
        joints = self._of_parts.get(key)
        if joints is None:
            joints = self._of_parts[key] = joint_boxes((*stored, (message_block(region),)), region)
        return clipped(joints, piece.start, piece.start + piece.numel, piece.bounds)
