"""An exchange taken apart into smaller ones, which run one after the other while something else is computed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tritondt import region as regions
from tritondt.planning.exchange import Exchange, Message, Part


def by_distance(exchange: Exchange, own: int, num_ranks: int) -> tuple[Exchange, ...]:
    """Number d is what goes to place `own` + d and comes from place `own` - d, modulo `num_ranks`; 0 is what stays.

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


def in_pieces(exchange: Exchange, dim: int, num_pieces: int) -> tuple[Exchange, ...]:
    """Every part cut into so many pieces along `dim`, as even as they go, number i of all of them in exchange i.

    >>> part = Part((((2, 7),), ((0, 4),)))
    >>> [found.keeps[0].region[0] for found in in_pieces(Exchange((), (), (part,)), 0, 2)]
    [((2, 4),), ((4, 7),)]
    """

    def piece(number: int, part: Part) -> Part:
        length = regions.total(part.region[dim])
        bounds = number * length // num_pieces, (number + 1) * length // num_pieces
        intervals = regions.at_positions(part.region[dim], *bounds)
        return replace(part, region=(*part.region[:dim], intervals, *part.region[dim + 1 :]))

    return tuple(_mapped(exchange, partial(piece, number)) for number in range(num_pieces))


def _mapped(exchange: Exchange, change: Callable[[Part], Part]) -> Exchange:
    """The exchange of changed parts, without those that are empty and messages of nothing."""

    def changed(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(found for found in map(change, parts) if found.numel)

    def messages(before: tuple[Message, ...]) -> tuple[Message, ...]:
        found = (Message(message.peer, changed(message.parts)) for message in before)
        return tuple(message for message in found if message.parts)

    return replace(
        exchange, sends=messages(exchange.sends), receives=messages(exchange.receives), keeps=changed(exchange.keeps)
    )
