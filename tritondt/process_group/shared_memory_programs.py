"""Collectives between ranks that read each other's memory, as programs of the extension.

Tensors are of bytes or elements without gaps, by their number in a list. Each message goes through the slots in chunks,
a round for each, so that tensors of any length pass, and what is packed is unpacked while it is in the cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tritondt._C import ArenaProgram, ByteMoves, OneShotReduction, PiecewiseReduction, Reducer
from tritondt.comm.packing.arena_transfer import ArenaTransfer
from tritondt.planning import slots

# Terms that a rank reads of others, in bytes, up to which all ranks reduce all of them: one round instead of two.
ONE_SHOT_BYTES = 256 << 10

Span = tuple[int, int, int]


class Members(NamedTuple):
    """The ranks of a group by their places in its communicator, of which this one is number `own`.

    They have slots of `slot_bytes` and run on `num_cores`.
    """

    places: tuple[int, ...]
    own: int
    slot_bytes: int
    num_cores: int

    @property
    def others(self) -> list[int]:
        """Numbers of the other ranks."""
        return [number for number in range(len(self.places)) if number != self.own]

    def chunk_bytes(self, num_messages: int) -> int:
        """Bytes of each of so many messages that a rank packs in a round, alike on all ranks.

        >>> Members((0, 1), 0, 4096, 2).chunk_bytes(3)
        1344
        """
        return slots.chunk_bytes(num_messages + 1, self.slot_bytes)

    def is_past_cache(self, num_bytes: int) -> bool:
        """Whether results of so many bytes on every rank are written past the cache."""
        return slots.goes_past_cache(num_bytes, len(self.places), self.num_cores)


class Reduction(NamedTuple):
    """A reduction as the extension names it: of elements of `itemsize` bytes, divided once."""

    dtype: str
    op: str
    divisor: int
    itemsize: int


def byte_moves(
    members: Members, sends: Sequence[tuple[int, Span]], receives: Sequence[tuple[int, Span]], num_packed: int
) -> ArenaTransfer:
    """Bytes of sources to ranks and bytes of ranks to targets, by number, this rank's own too.

    `num_packed` is the most different spans that any rank sends to others.
    """
    own, places = members.own, members.places
    leaving = [(places[peer], span) for peer, span in sends if peer != own]
    coming = [(places[peer], span) for peer, span in receives if peer != own]
    kept = [span for peer, span in sends if peer == own], [span for peer, span in receives if peer == own]
    keeps = [pair for pair in zip(*kept, strict=True) if pair[0][2]]
    native = ByteMoves(
        chunk_bytes=members.chunk_bytes(num_packed),
        sends=leaving,
        receives=coming,
        keeps=keeps,
        is_past_cache=members.is_past_cache(sum(span[2] for _, span in receives)),
    )
    peers = tuple(dict.fromkeys(peer for peer, _ in (*leaving, *coming)))
    return _compiled(native, peers, [span[2] for _, span in leaving], [span[2] for _, span in coming])


def all_reduce(members: Members, numel: int, reduction: Reduction) -> ArenaTransfer:
    """A reduction of one tensor in place: of all of it on every rank if short, else in pieces that are gathered."""
    size = len(members.places)
    num_bytes = numel * reduction.itemsize
    if num_bytes * (size - 1) <= ONE_SHOT_BYTES:
        return one_shot(members, numel, reduction, -1)
    pieces = [(0, start * reduction.itemsize, count * reduction.itemsize) for start, count in _cut(numel, size)]
    return _piecewise(members, reduction, pieces, pieces)


def reduce_scatter(members: Members, pieces: Sequence[Span], reduction: Reduction) -> ArenaTransfer:
    """A reduction of a piece for every rank, by number, to this rank's target."""
    return _piecewise(members, reduction, pieces, [(0, 0, pieces[members.own][2])])


def reduce_scatter_even(members: Members, num_bytes: int, reduction: Reduction) -> ArenaTransfer:
    """A reduction of pieces of one tensor, `num_bytes` for every rank, to this rank's target."""
    pieces = [(0, number * num_bytes, num_bytes) for number in range(len(members.places))]
    return reduce_scatter(members, pieces, reduction)


def one_shot(members: Members, numel: int, reduction: Reduction, root: int) -> ArenaTransfer:
    """A reduction of one tensor whose terms the rank with the number `root` reads, or all where that is -1."""
    whole = (0, 0, numel * reduction.itemsize)
    reducer = _reducer(members, reduction, members.chunk_bytes(1))
    native = OneShotReduction(reducer, source=whole, target=whole, root=root)
    others = members.others
    sent = [whole[2] for other in others if root in (-1, other)]
    received = [whole[2] for _ in others if root in (-1, members.own)]
    peers = [members.places[other] for other in others if root in (-1, other, members.own)]
    return _compiled(native, peers, sent, received)


def _piecewise(
    members: Members, reduction: Reduction, pieces: Sequence[Span], results: Sequence[Span]
) -> ArenaTransfer:
    others, own_bytes = members.others, pieces[members.own][2]
    reducer = _reducer(members, reduction, members.chunk_bytes(max(len(others), 1)))
    past_cache = members.is_past_cache(sum(span[2] for span in results))
    native = PiecewiseReduction(reducer, pieces=pieces, results=results, is_past_cache=past_cache)
    sent, received = [pieces[other][2] for other in others], [own_bytes] * len(others)
    if len(results) > 1:
        sent, received = sent + received, received + sent
    return _compiled(native, [members.places[other] for other in others], sent, received)


def _reducer(members: Members, reduction: Reduction, chunk_bytes: int) -> Reducer:
    return Reducer(
        dtype=reduction.dtype,
        op=reduction.op,
        divisor=reduction.divisor,
        places=members.places,
        own=members.own,
        chunk_bytes=chunk_bytes,
    )


def _cut(numel: int, size: int) -> list[tuple[int, int]]:
    """The first element of each of `size` pieces, and how many it has, whose numbers differ by 1 at most.

    >>> _cut(10, 4)
    [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    each, longer = divmod(numel, size)
    return [(number * each + min(number, longer), each + (number < longer)) for number in range(size)]


def _compiled(
    native: ArenaProgram, peers: Sequence[int], sent: Sequence[int], received: Sequence[int]
) -> ArenaTransfer:
    return ArenaTransfer(native, tuple(peers), sum(sent), sum(received), len(sent), len(received), 0)
