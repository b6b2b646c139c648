"""Rounds of an exchange through slots: which pieces of which parts each round moves.

A part is cut by its region alone, and a message's pieces fill its rounds one after the other: sender and receiver find
the same rounds, and all terms of a reduction the same pieces, without a word about either.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from tritondt.planning.exchange import Message, Part
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Region

Moves: TypeAlias = Callable[[Part], bool]
# Positions [start, stop) in each dim of a part, whose indices are numbered without the gaps between them.
Bounds: TypeAlias = tuple[tuple[int, int], ...]
# A piece of a tensor's target whose terms are reduced, whichever rank they come from: tensor, region, first element.
Reduced: TypeAlias = tuple[int, Region, int]


class Piece(NamedTuple):
    """The `numel` elements of a part from number `start` on, in its order, which are all at the positions `bounds`."""

    part: Part
    start: int
    numel: int
    bounds: Bounds

    @property
    def reduced(self) -> Reduced:
        """What a term of a sum has in common with the others."""
        return self.part.tensor, self.part.region, self.start


# What a round moves of a message.
Round: TypeAlias = tuple[Piece, ...]


@lru_cache(maxsize=64)
def cut(lengths: tuple[int, ...], num_elements: int) -> tuple[Bounds, ...]:
    """Boxes of at most `num_elements`, about equal, which make up one of `lengths` one after the other in its order.

    >>> cut((3, 4), 8)
    (((0, 1), (0, 4)), ((1, 3), (0, 4)))
    >>> cut((2, 4), 2)[1:3]
    (((0, 1), (2, 4)), ((1, 2), (0, 2)))
    """
    if prod(lengths) <= num_elements:
        return (tuple((0, length) for length in lengths),)
    first, rest = lengths[0], lengths[1:]
    inner = prod(rest)
    if inner > num_elements:
        of_row = cut(rest, num_elements)
        return tuple(((row, row + 1), *bounds) for row in range(first) for bounds in of_row)
    num_pieces = -(-first // (num_elements // inner))
    whole = tuple((0, length) for length in rest)
    ends = (first * number // num_pieces for number in range(num_pieces + 1))
    return tuple((bounds, *whole) for bounds in pairwise(ends))


def pieces(part: Part, itemsizes: Sequence[int], chunk_bytes: int) -> Iterator[Piece]:
    """Pieces of a part of at most `chunk_bytes`; `itemsizes` are the tensors'."""
    lengths, start = tuple(map(regions.total, part.region)), 0
    for bounds in cut(lengths, chunk_bytes // itemsizes[part.tensor]):
        numel = prod(last - first for first, last in bounds)
        yield Piece(part, start, numel, bounds)
        start += numel


def rounds(message: Message, itemsizes: Sequence[int], chunk_bytes: int) -> list[Round]:
    """What each round moves of a message, at most `chunk_bytes`.

    >>> part = Part((((0, 4),), ((0, 3),)))
    >>> [[piece.numel for piece in each] for each in rounds(Message(1, (part, part)), [4], 36)]
    [[6], [6], [6], [6]]
    """
    found, room = list[list[Piece]](), 0
    for piece in chain.from_iterable(pieces(part, itemsizes, chunk_bytes) for part in message.parts):
        num_bytes = piece.numel * itemsizes[piece.part.tensor]
        if not found or num_bytes > room:
            found.append([])
            room = chunk_bytes
        found[-1].append(piece)
        room -= num_bytes
    return [tuple(each) for each in found]


def last_rounds(receives: Iterable[Sequence[Round]], moves: Moves) -> dict[Reduced, int]:
    """The round in which the last term of each reduced piece arrives; `receives` are messages, round by round."""
    found = dict[Reduced, int]()
    for message in receives:
        for number, arriving in enumerate(message):
            for piece in arriving:
                if not moves(piece.part):
                    found[piece.reduced] = max(found.get(piece.reduced, 0), number)
    return found


def staged_terms(receives: Iterable[tuple[int, Sequence[Round]]], moves: Moves) -> list[tuple[int, int, Piece]]:
    """Terms that wait for a later round's in memory of the receiver's own: their round, peer and piece.

    None where all senders of a reduced piece have it in the same round, as in a redistribution of one tensor.
    `receives` are the peers' messages, round by round.
    """
    messages = list(receives)
    last = last_rounds((message for _, message in messages), moves)
    return [
        (number, peer, piece)
        for peer, message in messages
        for number, arriving in enumerate(message)
        for piece in arriving
        if not moves(piece.part) and number < last[piece.reduced]
    ]
