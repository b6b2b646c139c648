"""Transfers compiled for ranks that read messages where their senders have packed them.

Every round of an exchange packs a chunk of each message into one slot of this rank's arena, one that several peers
receive only once; receivers unpack, or reduce, from there, while it is in the cache.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tritondt._C import CopyTable, DirectPlan, DirectProgram, DirectRound, ReduceTable
from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.packed_transfer import (
    Arrival,
    Term,
    in_buffer,
    moves,
    part_bytes,
    part_copies,
    reduce_tables,
)
from tritondt.kernels.boxes import CopyBox
from tritondt.planning.exchange import Message, Part
from tritondt.planning.rounds import Reduced, last_rounds, pieces, rounds, staged_terms
from tritondt.planning.slots import in_lines


class DirectTransfer(NamedTuple):
    """A transfer compiled to a program of the extension; staged are terms that wait for those of later rounds."""

    native: DirectProgram
    sent_bytes: int
    received_bytes: int
    num_sent: int
    num_received: int
    staged_bytes: int
    packed_bytes: int = 0
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


class _Held(NamedTuple):
    """A part that has arrived, in the input number `source` after the tensors: of a peer's place, or the staging."""

    source: int
    arrival: Arrival


def direct_transfer(transfer: Transfer, num_ranks: int, chunk_bytes: int) -> DirectTransfer:
    """A transfer among `num_ranks` compiled for their arenas, `chunk_bytes` of a message in a round."""
    exchange, itemsizes = transfer.exchange, [dtype.itemsize for dtype in transfer.dtypes]
    sends = [rounds(message, itemsizes, chunk_bytes) for message in exchange.sends]
    receives = [rounds(message, itemsizes, chunk_bytes) for message in exchange.receives]
    num_rounds = max(len(each) for each in (*sends, *receives))
    staged, staged_bytes = _staged(transfer, receives, num_ranks)
    last = last_rounds(receives, lambda part: moves(transfer, part))
    keeps = _keeps_of_rounds(transfer, itemsizes, chunk_bytes, last, num_rounds)
    ready: list[list[_Held]] = [[] for _ in range(num_rounds)]
    for (_, _, part), held in staged.items():
        ready[last[part.tensor, part.region]].append(held)
    native = DirectPlan(
        tuple(
            _round(transfer, number, (_of_round(sends, number), _of_round(receives, number)), kept, staged, waited)
            for number, (kept, waited) in enumerate(zip(keeps, ready, strict=True))
        )
    )
    return DirectTransfer(
        native,
        sum(_num_bytes(transfer, found) for found in exchange.sends),
        sum(_num_bytes(transfer, found) for found in exchange.receives),
        len(exchange.sends),
        len(exchange.receives),
        staged_bytes,
    )


def _of_round(messages: Iterable[Sequence[Message]], number: int) -> list[Message]:
    return [each[number] for each in messages if number < len(each)]


_Staged = dict[tuple[int, int, Part], _Held]


def _staged(transfer: Transfer, receives: Sequence[Sequence[Message]], num_ranks: int) -> tuple[_Staged, int]:
    """Places of terms that wait for later rounds', by round, peer and part; and the bytes of all of them."""
    found, filled = _Staged(), 0
    for key in staged_terms(receives, lambda part: moves(transfer, part)):
        found[key] = _Held(num_ranks, Arrival(key[2], filled))
        filled += in_lines(part_bytes(transfer, key[2]))
    return found, filled


def _keeps_of_rounds(
    transfer: Transfer, itemsizes: Sequence[int], chunk_bytes: int, last: Mapping[Reduced, int], num_rounds: int
) -> list[list[Part]]:
    """What stays on this rank, round by round: copies before anything is unpacked, terms with their last peer's."""
    found: list[list[Part]] = [[] for _ in range(num_rounds)]
    for part in transfer.exchange.keeps:
        if moves(transfer, part):
            found[0].append(part)
            continue
        for piece in pieces(part, itemsizes, chunk_bytes):
            found[last.get((piece.tensor, piece.region), 0)].append(piece)
    return found


def _round(
    transfer: Transfer,
    number: int,
    messages: tuple[Sequence[Message], Sequence[Message]],
    kept: Sequence[Part],
    staged: _Staged,
    waited: Sequence[_Held],
) -> DirectRound:
    """Round `number`: messages that leave and that arrive; `waited` are terms of earlier rounds that it reduces."""
    leaving, arriving = messages
    packed = _placed(transfer, leaving)
    arrived = [_Held(message.peer, arrival) for message in arriving for arrival in _arrivals(transfer, message.parts)]
    unpacks, terms = list[CopyBox](), list[_Held]()
    for held in arrived:
        part, waiting = held.arrival.part, staged.get((number, held.source, held.arrival.part))
        if waiting is not None:
            unpacks += _stage(transfer, held, waiting)
        elif moves(transfer, part):
            unpacks += _unpack(transfer, held)
        else:
            terms.append(held)
    terms += waited
    keeps = [box for part in kept if moves(transfer, part) for box in _keep(transfer, part)]
    return DirectRound(
        sends=[(found.peer, found.start, found.num_bytes) for found in packed],
        receives=[(found.peer, 0, _num_bytes(transfer, found)) for found in arriving],
        pack=_table(_packs(transfer, packed)),
        keep=_table(keeps),
        unpack=_table(unpacks),
        reduces=_reduces(transfer, terms, [part for part in kept if not moves(transfer, part)]),
    )


def _num_bytes(transfer: Transfer, message: Message) -> int:
    return sum(part_bytes(transfer, part) for part in message.parts)


def _placed(transfer: Transfer, messages: Sequence[Message]) -> list[_Packed]:
    """Messages with their places in the slot, equal ones with the same."""
    placed, starts, filled = list[_Packed](), dict[tuple[Part, ...], int](), 0
    for message in messages:
        num_bytes = _num_bytes(transfer, message)
        start = starts.setdefault(message.parts, filled)
        if start == filled:
            filled += in_lines(num_bytes)
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
    return [box for arrival in arrivals for box in _pack(transfer, arrival)]


def _pack(transfer: Transfer, found: Arrival) -> list[CopyBox]:
    tensor = found.part.tensor
    sides = (transfer.source_blocks[tensor], in_buffer(transfer, found))
    return list(part_copies(transfer, found.part, sides, (tensor, 0)))


def _keep(transfer: Transfer, part: Part) -> list[CopyBox]:
    tensor = part.tensor
    sides = (transfer.source_blocks[tensor], transfer.target_blocks[tensor])
    return list(part_copies(transfer, part, sides, (tensor, tensor)))


def _unpack(transfer: Transfer, held: _Held) -> list[CopyBox]:
    part = held.arrival.part
    sides = (in_buffer(transfer, held.arrival), transfer.target_blocks[part.tensor])
    return list(part_copies(transfer, part, sides, (held.source, part.tensor)))


def _stage(transfer: Transfer, held: _Held, waiting: _Held) -> list[CopyBox]:
    """The copy of a term out of the slot into the staging, which comes behind the targets."""
    sides = (in_buffer(transfer, held.arrival), in_buffer(transfer, waiting.arrival))
    return list(part_copies(transfer, held.arrival.part, sides, (held.source, len(transfer.target_blocks))))


def _reduces(transfer: Transfer, held: Sequence[_Held], kept: Sequence[Part]) -> tuple[ReduceTable, ...]:
    """Reductions of terms from tensors, which come first among the inputs, from messages and the staging."""
    num_tensors = len(transfer.source_blocks)
    terms = [Term(found.arrival.part, num_tensors + found.source, in_buffer(transfer, found.arrival)) for found in held]
    terms += [Term(part, part.tensor, transfer.source_blocks[part.tensor]) for part in kept]
    return reduce_tables(transfer, terms)  # type: ignore[return-value]


def _table(boxes: list[CopyBox]) -> CopyTable | None:
    return CopyTable(boxes) if boxes else None
