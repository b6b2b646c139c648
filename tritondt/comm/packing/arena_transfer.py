"""Transfers compiled for ranks that read messages where their senders have packed them.

Every round of an exchange packs a chunk of each message into one slot of this rank's arena, one that several peers
receive only once; receivers unpack, or reduce, from there, while it is in the cache.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tritondt._C import ArenaPlan, ArenaProgram, ArenaRound, CopyTable
from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.packed_transfer import PackedTransfer, moves, part_bytes
from tritondt.comm.packing.piece_boxes import Held, PieceBoxes
from tritondt.kernels.boxes import CopyBox
from tritondt.planning.exchange import Message, Part
from tritondt.planning.rounds import Piece, Round, last_rounds, pieces, rounds, staged_terms
from tritondt.planning.slots import goes_past_cache, in_lines


class ArenaTransfer(NamedTuple):
    """A transfer compiled to a program of the extension, and the places of its peers.

    Staged are terms that wait for those of later rounds.
    """

    native: ArenaProgram
    peers: tuple[int, ...]
    sent_bytes: int
    received_bytes: int
    num_sent: int
    num_received: int
    staged_bytes: int
    packed_bytes: int = 0
    casting: None = None


@dataclass(frozen=True, eq=False)
class ProgramTransfer(Transfer):
    """A transfer of whole tensors that is made as a program, or as messages: it has no boxes."""

    plan: ArenaTransfer | PackedTransfer | None = None


class _Peer(NamedTuple):
    """A peer and what each round moves of the message with it."""

    place: int
    rounds: list[Round]


class _Packed(NamedTuple):
    """What a round sends to a peer, in the slot from the byte `start` on."""

    peer: int
    pieces: Round
    start: int
    num_bytes: int


def arena_transfer(transfer: Transfer, num_ranks: int, chunk_bytes: int, num_cores: int) -> ArenaTransfer:
    """A transfer among `num_ranks` of `num_cores` compiled for their arenas, `chunk_bytes` of a message in a round."""
    written_bytes = max(_written_bytes(transfer), transfer.result_bytes)
    is_past_cache = goes_past_cache(written_bytes, num_ranks, num_cores)
    native, staged_bytes = _Compilation(transfer, num_ranks, chunk_bytes, is_past_cache).run()
    sends, receives = transfer.exchange.sends, transfer.exchange.receives
    return ArenaTransfer(
        native,
        tuple(dict.fromkeys(found.peer for found in (*sends, *receives))),
        sum(part_bytes(transfer, part) for found in sends for part in found.parts),
        sum(part_bytes(transfer, part) for found in receives for part in found.parts),
        len(sends),
        len(receives),
        staged_bytes,
    )


def _written_bytes(transfer: Transfer) -> int:
    """Bytes that a transfer copies to its targets."""
    exchange = transfer.exchange
    parts = (*exchange.keeps, *(part for found in exchange.receives for part in found.parts))
    return sum(part_bytes(transfer, part) for part in parts if moves(transfer, part))


class _Compilation:
    """Rounds of one transfer as tables of boxes."""

    def __init__(self, transfer: Transfer, num_ranks: int, chunk_bytes: int, is_past_cache: bool) -> None:
        self.transfer, self.num_ranks, self.chunk_bytes = transfer, num_ranks, chunk_bytes
        self.is_past_cache = is_past_cache
        self.itemsizes = [dtype.itemsize for dtype in transfer.dtypes]
        self.boxes = PieceBoxes(transfer)
        self.sends = self._peers(transfer.exchange.sends)
        self.receives = self._peers(transfer.exchange.receives)
        self.last = last_rounds((each.rounds for each in self.receives), self._moves)
        self.staged: dict[tuple[int, int | None, Piece], Held] = {}

    def run(self) -> tuple[ArenaPlan, int]:
        """The program, and the bytes of terms that wait for those of later rounds."""
        num_rounds = max(len(each.rounds) for each in (*self.sends, *self.receives))
        staged_bytes = self._place_staged()
        waiting: list[list[Held]] = [[] for _ in range(num_rounds)]
        for (_, _, piece), held in self.staged.items():
            waiting[self.last[piece.reduced]].append(held)
        kept = self._kept_terms(num_rounds)
        keeps = [box for part in self.transfer.exchange.keeps if self._moves(part) for box in self.boxes.keeps(part)]
        found = [
            self._round(number, [] if number else keeps, of_round, waited)
            for number, (of_round, waited) in enumerate(zip(kept, waiting, strict=True))
        ]
        return ArenaPlan(tuple(found)), staged_bytes

    def _peers(self, messages: Sequence[Message]) -> list[_Peer]:
        return [_Peer(message.peer, rounds(message, self.itemsizes, self.chunk_bytes)) for message in messages]

    def _moves(self, part: Part) -> bool:
        return moves(self.transfer, part)

    def _num_bytes(self, found: Iterable[Piece]) -> int:
        return sum(piece.numel * self.itemsizes[piece.part.tensor] for piece in found)

    def _place_staged(self) -> int:
        """Finds places of terms that wait for later rounds'; the bytes of all of them."""
        filled = 0
        for key in staged_terms(((each.place, each.rounds) for each in self.receives), self._moves):
            self.staged[key] = Held(self.num_ranks, key[2], filled)
            filled += in_lines(self._num_bytes([key[2]]))
        return filled

    def _kept_terms(self, num_rounds: int) -> list[list[Piece]]:
        """Terms of sums that this rank has itself, round by round: with the last one of a peer's."""
        found: list[list[Piece]] = [[] for _ in range(num_rounds)]
        for part in self.transfer.exchange.keeps:
            if not self._moves(part):
                for piece in pieces(part, self.itemsizes, self.chunk_bytes):
                    found[self.last.get(piece.reduced, 0)].append(piece)
        return found

    def _round(
        self, number: int, keeps: Sequence[CopyBox], kept: Sequence[Piece], waited: Sequence[Held]
    ) -> ArenaRound:
        """Round `number`, in which `keeps` are copied; terms `kept`, and `waited` since earlier ones, are reduced."""
        packed, arrived = self._placed(number), self._arrived(number)
        once = {found.start: found.pieces for found in packed}
        packing = [held for start, found in once.items() for held in self._in_order(None, found, start)]
        packs = [box for held in packing for box in self.boxes.packs(held)]
        unpacks, terms = list[CopyBox](), list[Held]()
        for held in arrived:
            place = self.staged.get((number, held.source, held.piece)) if self.staged else None  # a hash takes 2 us
            if place is not None:
                unpacks.append(self.boxes.stages(held, place))
            elif self._moves(held.piece.part):
                unpacks += self.boxes.unpacks(held)
            else:
                terms.append(held)
        return ArenaRound(
            sends=[(found.peer, found.start, found.num_bytes) for found in packed],
            receives=[
                (each.place, 0, self._num_bytes(each.rounds[number]))
                for each in self.receives
                if number < len(each.rounds)
            ],
            pack=CopyTable(packs, is_past_cache=False) if packs else None,
            keep=CopyTable(keeps, self.is_past_cache) if keeps else None,
            unpack=CopyTable(unpacks, self.is_past_cache) if unpacks else None,
            reduces=self.boxes.reduces([*terms, *waited], kept),  # type: ignore[arg-type]  # tables of the CPU
        )

    def _placed(self, number: int) -> list[_Packed]:
        """What a round sends, with places in the slot, equal messages with the same."""
        placed, starts, filled = list[_Packed](), dict[Round, int](), 0
        for peer in self.sends:
            if number >= len(peer.rounds):
                continue
            found = peer.rounds[number]
            num_bytes = self._num_bytes(found)
            start = starts.setdefault(found, filled)
            if start == filled:
                filled += in_lines(num_bytes)
            placed.append(_Packed(peer.place, found, start, num_bytes))
        return placed

    def _arrived(self, number: int) -> list[Held]:
        return [
            held
            for peer in self.receives
            if number < len(peer.rounds)
            for held in self._in_order(peer.place, peer.rounds[number], 0)
        ]

    def _in_order(self, source: int | None, found: Round, start: int) -> list[Held]:
        """Pieces one after the other, from the byte `start` on."""
        placed = list[Held]()
        for piece in found:
            placed.append(Held(source, piece, start))
            start += self._num_bytes([piece])
        return placed
