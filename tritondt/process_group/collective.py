"""Collectives as values: what one rank sends to every rank and receives of it, in spans of bytes of its tensors.

A description says what is to be where, once for all transports; each has a compiler of it to what it runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

# A tensor by its number among sources or targets, its first byte, and bytes.
Span = tuple[int, int, int]
PeerSpan = tuple[int, Span]
# Terms that a rank receives of others, in bytes, up to which a reduction over sockets is one exchange, not two. A
# further exchange takes some 50 us, in which a link of 10 Gbit/s carries as much.
SHORT_BYTES = 64 << 10


class Reduction(NamedTuple):
    """A reduction as its carrier names it, the extension or NCCL: of elements of `itemsize` bytes, divided once."""

    dtype: str
    op: Any
    divisor: int
    itemsize: int


class Collective(NamedTuple):
    """One rank's side of a collective of `size` ranks, of which it is number `own`.

    `sends` are of sources, to ranks, and `receives` of targets, from ranks, in their order, this rank's own among them.
    With a `reduction` what all ranks send is reduced in their order, term by term, to one target; else it is copied.
    Any rank sends at most `most_spans` different spans to others. Where it `is_for_all`, every rank has one span at
    most, which all receive, and knows the lengths of all.
    """

    own: int
    size: int
    sends: tuple[PeerSpan, ...]
    receives: tuple[PeerSpan, ...]
    most_spans: int = 1
    reduction: Reduction | None = None
    is_for_all: bool = False

    @property
    def leaving(self) -> list[PeerSpan]:
        """Spans for other ranks."""
        return [each for each in self.sends if each[0] != self.own]

    @property
    def coming(self) -> list[PeerSpan]:
        """Spans of other ranks."""
        return [each for each in self.receives if each[0] != self.own]

    @property
    def keeps(self) -> list[tuple[Span, Span]]:
        """Spans that stay on this rank, with bytes: a source's and a target's."""
        sent = [span for peer, span in self.sends if peer == self.own]
        received = [span for peer, span in self.receives if peer == self.own]
        return [pair for pair in zip(sent, received, strict=True) if pair[0][2]]

    @property
    def root(self) -> int:
        """The one rank that has the result of a reduction; -1 where all have one.

        >>> reduce(0, 3, 12, Reduction("float32", "sum", 1, 4), 2).root
        2
        """
        return self.sends[0][0] if len(self.sends) == 1 < self.size else -1

    @property
    def pieces(self) -> list[Span]:
        """The spans that are reduced, by the rank that has the result; several, or all ranks have the same one."""
        return [span for _, span in self.sends]

    @property
    def result(self) -> Span:
        """Where this rank has its piece of a reduction whose pieces are the ranks' own."""
        return self.receives[0][1]

    @property
    def is_of_all(self) -> bool:
        """Whether every rank has the reduction of the same span."""
        return self.root < 0 and len(set(self.pieces)) == 1


class Arrival(NamedTuple):
    """A part of term number `term` that a rank sends: so many bytes, from byte `start` of the span that is reduced."""

    peer: int
    term: int
    start: int
    num_bytes: int


class TermExchange(NamedTuple):
    """One rank's side of an exchange of terms, of which `num_terms` are reduced in their order where they arrive.

    Term number `own` is here, at `source`, and the result goes to `target`; the others' parts are the `arrivals`, one
    of each rank at most. A rank that reduces nothing has a source of no bytes.
    """

    sends: tuple[PeerSpan, ...]
    arrivals: tuple[Arrival, ...]
    source: Span
    target: Span
    own: int
    num_terms: int
    reduction: Reduction


def all_gather(own: int, size: int, sizes: Sequence[int]) -> Collective:
    """Every rank's tensor, of so many bytes, to a tensor for each."""
    sends = tuple((rank, (0, 0, sizes[own])) for rank in range(size) if sizes[own])
    receives = tuple((rank, (rank, 0, num)) for rank, num in enumerate(sizes) if num)
    return Collective(own, size, sends, receives, is_for_all=True)


def all_gather_into(own: int, size: int, num_bytes: int) -> Collective:
    """Every rank's tensor, end to end, to one."""
    sends = tuple((rank, (0, 0, num_bytes)) for rank in range(size))
    receives = tuple((rank, (0, rank * num_bytes, num_bytes)) for rank in range(size))
    return Collective(own, size, sends, receives, is_for_all=True)


def broadcast(own: int, size: int, num_bytes: int, root: int) -> Collective:
    """The root's tensor, to all; in place.

    >>> broadcast(1, 3, 8, 0)[:4], broadcast(0, 3, 8, 0)[:4]
    ((1, 3, (), ((0, (0, 0, 8)),)), (0, 3, ((1, (0, 0, 8)), (2, (0, 0, 8))), ()))
    """
    whole = (0, 0, num_bytes)
    if own != root:
        return Collective(own, size, (), ((root, whole),), is_for_all=True)
    return Collective(own, size, tuple((rank, whole) for rank in range(size) if rank != own), (), is_for_all=True)


def gather(own: int, size: int, num_bytes: int, sizes: Sequence[int], root: int) -> Collective:
    """Every rank's tensor, of `num_bytes` here, to the root's tensors, of `sizes` bytes there."""
    receives = tuple((rank, (rank, 0, num)) for rank, num in enumerate(sizes))
    return Collective(own, size, ((root, (0, 0, num_bytes)),), receives)


def scatter(own: int, size: int, num_bytes: int, sizes: Sequence[int], root: int) -> Collective:
    """A tensor of the root's, of `sizes` bytes there, to every rank, where it has `num_bytes`."""
    sends = tuple((rank, (rank, 0, num)) for rank, num in enumerate(sizes))
    return Collective(own, size, sends, ((root, (0, 0, num_bytes)),), max(size - 1, 1))


def all_to_all(own: int, size: int, leaving: Sequence[PeerSpan], coming: Sequence[PeerSpan]) -> Collective:
    """A span to every rank and one of every rank; both sides of a message know that it is empty."""
    sends, receives = (tuple(each for each in spans if each[1][2]) for spans in (leaving, coming))
    return Collective(own, size, sends, receives, max(size - 1, 1))


def all_to_all_even(own: int, size: int, num_bytes: int) -> Collective:
    """So many bytes of one tensor to every rank, and of every rank to one tensor."""
    spans = [(rank, (0, rank * num_bytes, num_bytes)) for rank in range(size)]
    return all_to_all(own, size, spans, spans)


def nothing(own: int, size: int) -> Collective:
    """The side of a rank that has no elements: it counts, and sends no message."""
    return Collective(own, size, (), ())


def barrier(own: int, size: int) -> Collective:
    """A message without bytes to every other rank."""
    signals = tuple((rank, (0, 0, 0)) for rank in range(size) if rank != own)
    return Collective(own, size, signals, signals)


def all_reduce(own: int, size: int, num_bytes: int, reduction: Reduction) -> Collective:
    """The reduction of every rank's tensor, on all."""
    spans = tuple((rank, (0, 0, num_bytes)) for rank in range(size))
    return Collective(own, size, spans, spans, 1, reduction)


def reduce(own: int, size: int, num_bytes: int, reduction: Reduction, root: int) -> Collective:
    """The reduction of every rank's tensor, on the root."""
    whole = (0, 0, num_bytes)
    receives = tuple((rank, whole) for rank in range(size)) if own == root else ()
    return Collective(own, size, ((root, whole),), receives, 1, reduction)


def reduce_scatter(own: int, size: int, pieces: Sequence[Span], reduction: Reduction) -> Collective:
    """The reduction of every rank's pieces, each to its rank."""
    receives = tuple((rank, (0, 0, pieces[own][2])) for rank in range(size))
    return Collective(own, size, tuple(enumerate(pieces)), receives, max(size - 1, 1), reduction)


def reduce_scatter_even(own: int, size: int, num_bytes: int, reduction: Reduction) -> Collective:
    """The reduction of every rank's tensor, `num_bytes` of it to each."""
    return reduce_scatter(own, size, [(0, rank * num_bytes, num_bytes) for rank in range(size)], reduction)


def is_short(num_bytes: int, size: int) -> bool:
    """Whether a reduction over sockets of so many bytes on each rank is one exchange."""
    return num_bytes * (size - 1) <= SHORT_BYTES


def rows_of_ranks(counts: Sequence[int], itemsize: int) -> tuple[PeerSpan, ...]:
    """Parts of one tensor, end to end, by rank, of so many elements.

    >>> rows_of_ranks([1, 2], 4)
    ((0, (0, 0, 4)), (1, (0, 4, 8)))
    """
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return tuple(
        (number, (0, start * itemsize, count * itemsize))
        for number, (start, count) in enumerate(zip(starts, counts, strict=True))
    )


def cut(num_bytes: int, size: int, itemsize: int) -> list[Span]:
    """Pieces of tensor number 0, one for each rank, whose numbers of elements differ by 1 at most.

    >>> cut(40, 4, 4)
    [(0, 0, 12), (0, 12, 12), (0, 24, 8), (0, 32, 8)]
    """
    each, longer = divmod(num_bytes // itemsize, size)
    counts = [(each + (rank < longer)) * itemsize for rank in range(size)]
    return [(0, sum(counts[:rank]), count) for rank, count in enumerate(counts)]
