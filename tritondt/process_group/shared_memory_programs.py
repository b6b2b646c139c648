"""The compiler of collectives for ranks that read each other's memory: programs of the extension.

Each message goes through the slots in chunks, a round for each, so that tensors of any length pass, and what is packed
is unpacked while it is in the cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tritondt._C import ArenaProgram, ByteMoves, OneShotReduction, PiecewiseReduction, Reducer
from tritondt.comm.packing.arena_transfer import ArenaTransfer
from tritondt.planning import slots
from tritondt.process_group.collective import Collective, Span, cut

# Terms that a rank reads of others, in bytes, up to which all ranks reduce all of them: one round instead of two.
ONE_SHOT_BYTES = 256 << 10


class Members(NamedTuple):
    """The ranks of a group by their places in its communicator: slots of `slot_bytes` each, on `num_cores`."""

    places: tuple[int, ...]
    slot_bytes: int
    num_cores: int

    def chunk_bytes(self, num_messages: int) -> int:
        """Bytes of each of so many messages that a rank packs in a round, alike on all ranks.

        >>> Members((0, 1), 4096, 2).chunk_bytes(3)
        1344
        """
        return slots.chunk_bytes(num_messages + 1, self.slot_bytes)

    def is_past_cache(self, num_bytes: int) -> bool:
        """Whether results of so many bytes on every rank are written past the cache."""
        return slots.goes_past_cache(num_bytes, len(self.places), self.num_cores)


def compiled(collective: Collective, members: Members) -> ArenaTransfer:
    """One rank's side of a collective as a program."""
    reduction = collective.reduction
    if reduction is None:
        return _moves(collective, members)
    if not collective.is_of_all and collective.root < 0:
        return _piecewise(collective, members, collective.pieces, [collective.result])
    num_bytes = collective.pieces[0][2]
    if collective.root >= 0 or num_bytes * (collective.size - 1) <= ONE_SHOT_BYTES:
        return _one_shot(collective, members)
    pieces = cut(num_bytes, collective.size, reduction.itemsize)
    return _piecewise(collective, members, pieces, pieces)


def _moves(collective: Collective, members: Members) -> ArenaTransfer:
    places = members.places
    leaving = [(places[peer], span) for peer, span in collective.leaving]
    coming = [(places[peer], span) for peer, span in collective.coming]
    native = ByteMoves(
        chunk_bytes=members.chunk_bytes(collective.most_spans),
        sends=leaving,
        receives=coming,
        keeps=collective.keeps,
        is_past_cache=members.is_past_cache(sum(span[2] for _, span in collective.receives)),
    )
    peers = tuple(dict.fromkeys(peer for peer, _ in (*leaving, *coming)))
    return _program(native, peers, [span[2] for _, span in leaving], [span[2] for _, span in coming])


def _one_shot(collective: Collective, members: Members) -> ArenaTransfer:
    """A reduction of one tensor whose terms the root reads, or all."""
    own, root, whole = collective.own, collective.root, collective.pieces[0]
    reducer = _reducer(collective, members, members.chunk_bytes(1))
    native = OneShotReduction(reducer, source=whole, target=whole, root=root)
    others = [rank for rank in range(collective.size) if rank != own]
    sent = [whole[2] for other in others if root in (-1, other)]
    received = [whole[2] for _ in others if root in (-1, own)]
    peers = [members.places[other] for other in others if root in (-1, other, own)]
    return _program(native, peers, sent, received)


def _piecewise(
    collective: Collective, members: Members, pieces: Sequence[Span], results: Sequence[Span]
) -> ArenaTransfer:
    own_bytes = pieces[collective.own][2]
    others = [rank for rank in range(collective.size) if rank != collective.own]
    reducer = _reducer(collective, members, members.chunk_bytes(max(len(others), 1)))
    past_cache = members.is_past_cache(sum(span[2] for span in results))
    native = PiecewiseReduction(reducer, pieces=pieces, results=results, is_past_cache=past_cache)
    sent, received = [pieces[other][2] for other in others], [own_bytes] * len(others)
    if len(results) > 1:
        sent, received = sent + received, received + sent
    return _program(native, [members.places[other] for other in others], sent, received)


def _reducer(collective: Collective, members: Members, chunk_bytes: int) -> Reducer:
    reduction = collective.reduction
    assert reduction is not None, "a collective that moves bytes has no reducer"
    return Reducer(
        dtype=reduction.dtype,
        op=reduction.op,
        divisor=reduction.divisor,
        places=members.places,
        own=collective.own,
        chunk_bytes=chunk_bytes,
    )


def _program(native: ArenaProgram, peers: Sequence[int], sent: Sequence[int], received: Sequence[int]) -> ArenaTransfer:
    return ArenaTransfer(native, tuple(peers), sum(sent), sum(received), len(sent), len(received), 0)
