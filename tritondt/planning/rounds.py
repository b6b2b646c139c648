"""Rounds of an exchange through slots: which pieces of which parts each round moves.

A part is cut by its region alone, and a message's pieces fill its rounds one after the other: sender and receiver find
the same rounds, and all terms of a reduction the same pieces, without a word about either.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TypeAlias

from tritondt.planning.exchange import Message, Part
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Region

Moves: TypeAlias = Callable[[Part], bool]
# A piece of a tensor's target whose terms are reduced, whichever rank they come from.
Reduced: TypeAlias = tuple[int, Region]


def cut(region: Region, num_elements: int) -> list[Region]:
    """Pieces of at most `num_elements`, about equal, which make up a region one after the other in row-major order.

    >>> cut((((0, 3),), ((0, 2), (8, 10))), 8)
    [(((0, 1),), ((0, 2), (8, 10))), (((1, 3),), ((0, 2), (8, 10)))]
    """
    if regions.numel(region) <= num_elements:
        return [region]
    first, rest = region[0], region[1:]
    length, inner = regions.total(first), prod(regions.total(intervals) for intervals in rest)
    if inner > num_elements:
        rows = [((row, row + 1),) for start, stop in first for row in range(start, stop)]
        of_row = cut(rest, num_elements)
        return [(row, *piece) for row in rows for piece in of_row]
    num_pieces = -(-length // (num_elements // inner))
    bounds = [length * number // num_pieces for number in range(num_pieces + 1)]
    return [(regions.at_positions(first, *ends), *rest) for ends in pairwise(bounds)]


def pieces(part: Part, itemsizes: Sequence[int], chunk_bytes: int) -> list[Part]:
    """Pieces of a part of at most `chunk_bytes`; `itemsizes` are the tensors'."""
    found = cut(part.region, chunk_bytes // itemsizes[part.tensor])
    return [part] if len(found) == 1 else [replace(part, region=region) for region in found]


def rounds(message: Message, itemsizes: Sequence[int], chunk_bytes: int) -> list[Message]:
    """What each round moves of a message, at most `chunk_bytes`.

    >>> part = Part((((0, 4),), ((0, 3),)))
    >>> [each.numel for each in rounds(Message(1, (part, part)), [4], 24)]
    [6, 6, 6, 6]
    """
    found, room = list[list[Part]](), 0
    for piece in (each for part in message.parts for each in pieces(part, itemsizes, chunk_bytes)):
        num_bytes = piece.numel * itemsizes[piece.tensor]
        if not found or num_bytes > room:
            found.append([])
            room = chunk_bytes
        found[-1].append(piece)
        room -= num_bytes
    return [Message(message.peer, tuple(each)) for each in found]


def last_rounds(receives: Iterable[Sequence[Message]], moves: Moves) -> dict[Reduced, int]:
    """The round in which the last term of each reduced piece arrives; `receives` are messages, round by round."""
    found = dict[Reduced, int]()
    for messages in receives:
        for number, message in enumerate(messages):
            for part in message.parts:
                if not moves(part):
                    key = part.tensor, part.region
                    found[key] = max(found.get(key, 0), number)
    return found


def staged_terms(receives: Iterable[Sequence[Message]], moves: Moves) -> list[tuple[int, int, Part]]:
    """Terms that wait for a later round's in memory of the receiver's own: their round, peer and part.

    None where all senders of a reduced piece have it in the same round, as in a redistribution of one tensor.
    """
    messages = list(receives)
    last = last_rounds(messages, moves)
    return [
        (number, message.peer, part)
        for each in messages
        for number, message in enumerate(each)
        for part in message.parts
        if not moves(part) and number < last[part.tensor, part.region]
    ]
