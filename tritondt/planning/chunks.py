"""Division of an exchange into smaller ones, which run one after the other while something else is computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from tritondt.planning.exchange import Exchange, Message, Part
from tritondt.sharding import intervals as regions


def by_distance(exchange: Exchange, own: int, num_ranks: int) -> tuple[Exchange, ...]:
    """Exchanges by distance d, each sending to place `own` + d and receiving from `own` - d, modulo `num_ranks`.

    At every distance a rank has one peer to send to and one to receive from, so that no rank is everybody's.

    >>> exchange = Exchange((Message(1, ()), Message(2, ())), (Message(1, ()), Message(2, ())), ())
    >>> [[message.peer for message in found.receives] for found in by_distance(exchange, 0, 3)]
    [[], [2], [1]]
    """
    return tuple(
        replace(
            exchange,
            sends=tuple(message for message in exchange.sends if (message.peer - own) % num_ranks == distance),
            receives=tuple(message for message in exchange.receives if (own - message.peer) % num_ranks == distance),
            keeps=() if distance else exchange.keeps,
        )
        for distance in range(num_ranks)
    )


def in_pieces(exchange: Exchange, dim: int, shares: Sequence[int]) -> tuple[Exchange, ...]:
    """Exchanges of pieces: every part is cut along `dim` in proportion to `shares`, and piece i is in exchange i.

    >>> part = Part((((2, 7),), ((0, 4),)))
    >>> [found.keeps[0].region[0] for found in in_pieces(Exchange((), (), (part,)), 0, (1, 1))]
    [((2, 4),), ((4, 7),)]
    """
    ends = list(accumulate(shares))

    def piece(number: int, part: Part) -> Part:
        length = regions.total(part.region[dim])
        start, stop = (end * length // ends[-1] for end in (ends[number] - shares[number], ends[number]))
        intervals = regions.at_positions(part.region[dim], start, stop)
        return replace(part, region=(*part.region[:dim], intervals, *part.region[dim + 1 :]))

    return tuple(_mapped(exchange, partial(piece, number)) for number in range(len(shares)))


def _mapped(exchange: Exchange, change: Callable[[Part], Part]) -> Exchange:
    """The exchange with changed parts, without empty parts and empty messages."""

    def changed(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(found for found in map(change, parts) if found.numel)

    def messages(before: tuple[Message, ...]) -> tuple[Message, ...]:
        found = (Message(message.peer, changed(message.parts)) for message in before)
        return tuple(message for message in found if message.parts)

    return replace(
        exchange, sends=messages(exchange.sends), receives=messages(exchange.receives), keeps=changed(exchange.keeps)
    )
