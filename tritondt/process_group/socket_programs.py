"""The compiler of collectives for ranks that are connected by sockets: messages, and reductions on arrival.

Messages go straight from the tensors of one rank to those of another; only terms of a reduction wait in a buffer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tritondt._C import Reducer, SpanReduction
from tritondt.comm.communicator import CPU
from tritondt.comm.packing.messages import Slice, Slices
from tritondt.comm.packing.packed_transfer import PackedTransfer
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.tables import Table, copy_table
from tritondt.planning.slots import in_lines
from tritondt.process_group.collective import Arrival, Collective, PeerSpan, Span, TermExchange, cut, is_short


class Exchange(NamedTuple):
    """One exchange of a collective; `reads_targets` where it sends what an earlier one has written."""

    plan: PackedTransfer
    reads_targets: bool = False


def compiled(collective: Collective, places: Sequence[int]) -> list[Exchange]:
    """One rank's side of a collective among ranks at these places of a communicator: equally many on all ranks."""
    if collective.reduction is None:
        return [Exchange(_moved(collective, places))]
    if not collective.is_of_all and collective.root < 0:
        return [Exchange(_reduced(collective, places, collective.pieces, collective.result))]
    own, root, whole = collective.own, collective.root, collective.pieces[0]
    if is_short(whole[2], collective.size):
        pieces = [whole if root in (-1, rank) else _NONE for rank in range(collective.size)]
        return [Exchange(_reduced(collective, places, pieces, whole))]
    pieces = cut(whole[2], collective.size, collective.reduction.itemsize)
    readers = range(collective.size) if root < 0 else [root]
    sends = [(rank, pieces[own]) for rank in readers if rank != own]
    receives = [(rank, piece) for rank, piece in enumerate(pieces) if rank != own and own in readers]
    # Whoever does not want the result has it nowhere: its piece is reduced in its own term's place.
    gathered = Collective(own, collective.size, _with_bytes(sends), _with_bytes(receives))
    return [
        Exchange(_reduced(collective, places, pieces, pieces[own])),
        Exchange(_moved(gathered, places), reads_targets=True),
    ]


_NONE: Span = (0, 0, 0)


def _with_bytes(spans: Sequence[PeerSpan]) -> tuple[PeerSpan, ...]:
    return tuple(each for each in spans if each[1][2])


def _moved(collective: Collective, places: Sequence[int]) -> PackedTransfer:
    keeps = [
        CopyBox(
            source=source,
            target=target,
            source_offset=source_start,
            target_offset=target_start,
            itemsize=1,
            lengths=(num_bytes,),
            source_strides=(1,),
            target_strides=(1,),
        )
        for (source, source_start, num_bytes), (target, target_start, _) in collective.keeps
    ]
    sends, receives = (
        # Messages without bytes are of no tensor: there may be none.
        Slices(Slice(places[peer], tensor if num else None, start, num) for peer, (tensor, start, num) in spans)
        for spans in (collective.leaving, collective.coming)
    )
    return _plan(sends, receives, keep=copy_table(keeps, CPU) if keeps else None)


def _reduced(collective: Collective, places: Sequence[int], pieces: Sequence[Span], target: Span) -> PackedTransfer:
    """The exchange of a piece for each rank, this rank's of which is reduced to `target`."""
    own, reduction, own_bytes = collective.own, collective.reduction, pieces[collective.own][2]
    assert reduction is not None, "a collective that moves bytes reduces nothing"
    others = [rank for rank in range(collective.size) if rank != own]
    sends = tuple((rank, pieces[rank]) for rank in others if pieces[rank][2])
    arrivals = tuple(Arrival(rank, rank, 0, own_bytes) for rank in others if own_bytes)
    return of_terms(TermExchange(sends, arrivals, pieces[own], target, own, collective.size, reduction), places)


def of_terms(exchange: TermExchange, places: Sequence[int]) -> PackedTransfer:
    """One rank's side of an exchange of terms among ranks at these places: others' terms wait in a buffer, in rows."""
    sends = Slices(Slice(places[rank], *span) for rank, span in exchange.sends)
    num_bytes, own, reduction = exchange.source[2], exchange.own, exchange.reduction
    if not num_bytes:
        return _plan(sends, Slices())
    stride = in_lines(num_bytes)
    receives = Slices(
        Slice(places[each.peer], None, (each.term - (each.term > own)) * stride + each.start, each.num_bytes)
        for each in exchange.arrivals
    )
    reducer = Reducer(
        dtype=reduction.dtype,
        op=reduction.op,
        divisor=reduction.divisor,
        places=tuple(range(exchange.num_terms)),
        own=own,
        chunk_bytes=stride,
    )
    table = SpanReduction(reducer, source=exchange.source, target=exchange.target, stride=stride)
    return _plan(sends, receives, staged_bytes=stride * (exchange.num_terms - 1), reduces=(table,))


def _plan(
    sends: Slices,
    receives: Slices,
    *,
    staged_bytes: int = 0,
    keep: Table | None = None,
    reduces: tuple[Table, ...] = (),
) -> PackedTransfer:
    sent, received = (sum(each.num_bytes for each in slices) for slices in (sends, receives))
    return PackedTransfer(sends, receives, sent, received, 0, staged_bytes, None, keep, None, reduces)
