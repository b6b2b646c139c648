"""Exchange between two lists of boxes: any number of boxes to a rank, of any sizes, before and after.

A layout says in closed form what a coordinate holds; here it is listed, box by box, for every position of a group.
Boxes of the source are disjoint over all positions; those of the target are disjoint within a position.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tritondt.planning.exchange import Exchange, Message, Part
from tritondt.sharding.intervals import Box, Region

# Boxes of every position of a group, in the order in which a rank stores them.
Boxes = tuple[tuple[Box, ...], ...]


class BoxExchange(NamedTuple):
    """One rank's side of an exchange of boxes.

    Tensor number k of the exchange reads the own source box `pairs[k][0]` and writes the own target box `pairs[k][1]`;
    either may be None.
    """

    exchange: Exchange
    pairs: tuple[tuple[int | None, int | None], ...]


class _Common(NamedTuple):
    """The region that a source box and a target box have in common, with the numbers of both in their ranks' lists."""

    region: Region
    source: int
    target: int


def exchange_boxes(source: Boxes, target: Boxes, own: int) -> BoxExchange:
    """Sends, receives and keeps of position `own`, one message to a peer; peers are positions.

    >>> source, target = ((((0, 3),),), (((3, 4),),)), ((((0, 2),),), (((2, 4),),))
    >>> found = exchange_boxes(source, target, 1)
    >>> [(message.peer, message.parts[0].region) for message in found.exchange.receives]
    [(0, (((2, 3),),))]
    """
    num_sources, num_targets = len(source[own]), len(target[own])
    pairs: list[tuple[int | None, int | None]] = [
        (number if number < num_sources else None, number if number < num_targets else None)
        for number in range(max(num_sources, num_targets))
    ]
    keeps = []
    for found in _common(source[own], target[own]):
        pair = found.source, found.target
        if pair not in pairs:
            pairs.append(pair)
        keeps.append(Part(found.region, tensor=pairs.index(pair)))
    sends: list[Message] = []
    receives: list[Message] = []
    for peer in _around(own, len(source)):
        leaving = [Part(found.region, tensor=found.source) for found in _common(source[own], target[peer])]
        arriving = [Part(found.region, tensor=found.target) for found in _common(source[peer], target[own])]
        sends += _message(peer, leaving)
        receives += _message(peer, arriving)
    return BoxExchange(
        Exchange(tuple(sends), tuple(receives), tuple(sorted(keeps, key=_place)), (1,) * len(pairs)), tuple(pairs)
    )


def _common(sources: Sequence[Box], targets: Sequence[Box]) -> Iterator[_Common]:
    for source_number, source in enumerate(sources):
        for target_number, target in enumerate(targets):
            box = [(max(left[0], right[0]), min(left[1], right[1])) for left, right in zip(source, target, strict=True)]
            if all(start < stop for start, stop in box):
                yield _Common(tuple((interval,) for interval in box), source_number, target_number)


def _around(own: int, count: int) -> Iterable[int]:
    """The other positions in the order own + 1, own + 2, ... around, so that no rank is the first peer of all."""
    return ((own + step) % count for step in range(1, count))


def _message(peer: int, parts: list[Part]) -> tuple[Message, ...]:
    """The message of these parts, in an order that both sides know; none where there are no parts."""
    return (Message(peer, tuple(sorted(parts, key=_place))),) if parts else ()


def _place(part: Part) -> Region:
    return part.region


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Numbers of two boxes that share an element, None where no two do; a sweep along the dim with most starts.

    >>> first_overlap([((0, 2), (0, 4)), ((2, 4), (0, 4)), ((1, 3), (3, 5))])
    (0, 2)
    """
    filled = [number for number, box in enumerate(boxes) if all(start < stop for start, stop in box)]
    if not filled or not boxes[filled[0]]:
        return (filled[0], filled[1]) if len(filled) > 1 else None
    dims = range(len(boxes[filled[0]]))
    along = max(dims, key=lambda dim: len({boxes[number][dim][0] for number in filled}))
    filled.sort(key=lambda number: boxes[number][along])
    for place, number in enumerate(filled):
        for other in filled[place + 1 :]:
            if boxes[other][along][0] >= boxes[number][along][1]:
                break
            if next(_common([boxes[number]], [boxes[other]]), None) is not None:
                return (number, other) if number < other else (other, number)
    return None
