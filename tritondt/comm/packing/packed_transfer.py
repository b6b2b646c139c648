"""Transfers compiled to messages, slices of tensors or buffers, and to the tables that fill and empty the buffers.

Everything here is made once per transfer. A message that is one run of a tensor's memory is that run; the
others get consecutive places in a buffer, without padding between their parts. Where a transport moves bytes faster
from aligned addresses, its `Alignment` says where messages start in the buffer, and which go by it all the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from tritondt.comm.communicator import Reduction, Transfer
from tritondt.comm.packing.messages import Slice, Slices
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.signals import SlotTensors
from tritondt.kernels.tables import Table, copy_table, reduce_table
from tritondt.planning.alignment import DENSE, STAGING_ALIGNMENT, Alignment
from tritondt.planning.collectives import CollectiveKind
from tritondt.planning.exchange import Message, Part
from tritondt.planning.storage import Block, contiguous_offset, joint_boxes, message_block
from tritondt.sharding.placement import ReduceOp

Blocks = Sequence[Block]


class Program(Protocol):
    """A transfer as a communicator has compiled it: what of it this rank sends and receives."""

    @property
    def sends(self) -> Slices:
        """Messages that leave, where they are known one by one."""
        ...

    @property
    def receives(self) -> Slices:
        """Messages that arrive, where they are known one by one."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of all messages that leave."""
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes of all messages that arrive."""
        ...

    @property
    def num_sent(self) -> int:
        """Number of messages that leave."""
        ...

    @property
    def num_received(self) -> int:
        """Number of messages that arrive."""
        ...


class PackedTransfer(NamedTuple):
    """A transfer compiled to messages and tables.

    `pack` fills the send buffer from the sources, `keep` moves what stays, `unpack` moves what arrived in the
    receive buffer to the targets, `reduces` reduce sources and receive buffer (the last of their inputs). `casting` is
    there with a wire dtype, and changes what `keep` and `reduces` read. Where there is a `collective`, `sends` and
    `receives` only say who takes part. Where `joint` names a table, that one moves what stays too, and there is no
    `keep`: "pack" writes the send buffer and then the targets, "unpack" reads the receive buffer and then the sources.
    """

    sends: Slices
    receives: Slices
    sent_bytes: int
    received_bytes: int
    packed_bytes: int
    staged_bytes: int
    pack: Table | None
    keep: Table | None
    unpack: Table | None
    reduces: tuple[Table, ...]
    casting: "Casting | None" = None
    collective: "CollectiveCall | None" = None
    joint: Literal["pack", "unpack"] | None = None

    @property
    def num_sent(self) -> int:
        """Number of messages that leave."""
        return len(self.sends)

    @property
    def num_received(self) -> int:
        """Number of messages that arrive."""
        return len(self.receives)


class Casting(NamedTuple):
    """The part of a packed transfer that only one with a wire dtype has.

    Parts that stay on the rank are packed as well, and `keep` takes them from the send buffer. `widen` casts the terms
    of reductions, from receive buffer and send buffer, into a buffer of `widened_bytes`, which `reduces` take for the
    receive buffer.
    """

    widen: Table | None
    widened_bytes: int


class CollectiveCall(NamedTuple):
    """A call of a collective on one tensor: it reads the send buffer, or the source from byte `source_start`.

    It writes the receive buffer where that `is_staged`, else the target from byte `target_start`, whose sum it divides
    by `divisor`. `num_elements` are of `dtype`, as NCCL counts: for all_gather those that a rank has, for
    reduce_scatter those that it gets. With `registered_bytes` both buffers are in the memory of so many bytes that all
    ranks have registered.
    """

    kind: CollectiveKind
    num_elements: int
    dtype: str
    op: ReduceOp
    divisor: int
    source_start: int | None
    target_start: int
    is_staged: bool
    registered_bytes: int = 0


class Arrival(NamedTuple):
    """A part in a buffer, and the byte at which it starts."""

    part: Part
    start: int


class Term(NamedTuple):
    """A term of a reduction: a part, the number of the input that holds it, and the blocks where it lies there."""

    part: Part
    source: int
    stored: Blocks


class TensorStarts(NamedTuple):
    """Bytes by which a transfer's tensors start behind multiples of an alignment; empty where all start at some."""

    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()


ALIGNED = TensorStarts()


def packed_transfer(
    transfer: Transfer, alignment: Alignment = DENSE, starts: TensorStarts = ALIGNED, joint_bytes: int = 0
) -> PackedTransfer:
    """A transfer compiled to messages and tables, which do not change from call to call on tensors that start alike.

    Unless `joint_bytes` is 0, what stays is moved by the table that unpacks, or up to so many bytes by the packing one.
    """
    exchange = transfer.exchange
    sends, packed_bytes, leaving = slices_of(
        transfer, exchange.sends, transfer.source_blocks, alignment, starts.sources, landing=False
    )
    receives, staged_bytes, arrived = slices_of(
        transfer, exchange.receives, transfer.target_blocks, alignment, starts.targets, landing=True
    )
    packs = [box for found in leaving for box in packed(transfer, found)]
    keeps = list(kept(transfer))
    unpacks = [box for found in arrived if moves(transfer, found.part) for box in unpacked(transfer, found)]
    joint: Literal["pack", "unpack"] | None = None
    if joint_bytes and keeps and unpacks:
        unpacks, keeps, joint = [*unpacks, *(box._replace(source=box.source + 1) for box in keeps)], [], "unpack"
    elif keeps and packs and _kept_bytes(transfer) <= joint_bytes:
        packs, keeps, joint = [*packs, *(box._replace(target=box.target + 1) for box in keeps)], [], "pack"
    pack, keep, unpack = (copy_table(boxes, transfer.device) if boxes else None for boxes in (packs, keeps, unpacks))
    return PackedTransfer(
        sends,
        receives,
        sum(found.num_bytes for found in sends),
        sum(found.num_bytes for found in receives),
        packed_bytes,
        staged_bytes,
        pack,
        keep,
        unpack,
        reduce_tables(transfer, terms_of(transfer, ((found, 0) for found in arrived))),
        joint=joint,
    )


def moves(transfer: Transfer, part: Part) -> bool:
    """Whether a part is copied to its target; a term of a reduction is not."""
    return transfer.reductions[part.tensor] is None


def buffer_places(staged_bytes: int, packed_bytes: int, casting: Casting | None) -> tuple[int, int, int]:
    """Bytes at which packed and widened bytes begin behind the received ones in one block of memory, and its length."""
    packed_at = (staged_bytes + STAGING_ALIGNMENT - 1) & -STAGING_ALIGNMENT if packed_bytes else staged_bytes
    num_bytes = widened_at = packed_at + packed_bytes
    if casting is not None:
        widened_at = (widened_at + STAGING_ALIGNMENT - 1) & -STAGING_ALIGNMENT
        num_bytes = widened_at + casting.widened_bytes
    return packed_at, widened_at, num_bytes


def slices_of(
    transfer: Transfer,
    messages: Sequence[Message],
    stored: Sequence[Blocks],
    alignment: Alignment = DENSE,
    starts: Sequence[int] = (),
    *,
    landing: bool,
) -> tuple[Slices, int, list[Arrival]]:
    """Slices of all messages, the buffer's size in bytes, and the parts that lie in the buffer."""
    itemsize = max((dtype.itemsize for dtype in transfer.dtypes), default=1)
    slices, buffered, filled = [], list[Arrival](), 0
    for message in messages:
        num_bytes = sum(part_bytes(transfer, part) for part in message.parts)
        part = message.parts[0]
        if len(message.parts) == 1 and (not landing or moves(transfer, part)):
            offset = contiguous_offset(stored[part.tensor], part.region)
            start = 0 if offset is None else offset * transfer.dtypes[part.tensor].itemsize
            behind = starts[part.tensor] if starts else 0
            if offset is not None and alignment.keeps_in_place(behind + start, num_bytes):
                slices.append(Slice(message.peer, part.tensor, start, num_bytes))
                continue
        filled = alignment.start(filled, itemsize)
        slices.append(Slice(message.peer, None, filled, num_bytes))
        for part in message.parts:
            buffered.append(Arrival(part, filled))
            filled += part_bytes(transfer, part)
    return Slices(slices), filled, buffered


def part_bytes(transfer: Transfer, part: Part) -> int:
    """Bytes of a part."""
    return part.numel * transfer.dtypes[part.tensor].itemsize


def _kept_bytes(transfer: Transfer) -> int:
    return sum(part_bytes(transfer, part) for part in transfer.exchange.keeps if moves(transfer, part))


def in_buffer(transfer: Transfer, found: Arrival) -> Blocks:
    """Blocks of a part where it lies in a buffer."""
    return (message_block(found.part.region, found.start // transfer.dtypes[found.part.tensor].itemsize),)


def part_copies(transfer: Transfer, part: Part, sides: Sequence[Blocks], places: tuple[int, int]) -> Iterator[CopyBox]:
    """The copy of a part from the first side to the second, which are tensors number `places`."""
    for lengths, ((source_offset, source_strides), (target_offset, target_strides)) in joint_boxes(sides, part.region):
        yield CopyBox(
            source=places[0],
            target=places[1],
            source_offset=source_offset,
            target_offset=target_offset,
            itemsize=transfer.dtypes[part.tensor].itemsize,
            lengths=lengths,
            source_strides=source_strides,
            target_strides=target_strides,
        )


def packed(transfer: Transfer, found: Arrival, buffer: int = 0) -> Iterator[CopyBox]:
    """The copy of a part from its tensor to where it leaves from, which is in target number `buffer`."""
    tensor = found.part.tensor
    sides = (transfer.source_blocks[tensor], in_buffer(transfer, found))
    return part_copies(transfer, found.part, sides, (tensor, buffer))


def unpacked(transfer: Transfer, found: Arrival, buffer: int = 0) -> Iterator[CopyBox]:
    """The copy of a part to its tensor from where it has arrived, which is in source number `buffer`."""
    tensor = found.part.tensor
    sides = (in_buffer(transfer, found), transfer.target_blocks[tensor])
    return part_copies(transfer, found.part, sides, (buffer, tensor))


def kept(transfer: Transfer) -> Iterator[CopyBox]:
    """The copies of the parts that stay on this rank."""
    for part in transfer.exchange.keeps:
        if moves(transfer, part):
            sides = (transfer.source_blocks[part.tensor], transfer.target_blocks[part.tensor])
            yield from part_copies(transfer, part, sides, (part.tensor, part.tensor))


def terms_of(transfer: Transfer, arrived: Iterable[tuple[Arrival, int]]) -> Iterator[Term]:
    """All terms of reductions: in the tensors, and behind these in the buffers with numbers from 0 on."""
    for found, buffer in arrived:
        if not moves(transfer, found.part):
            yield Term(found.part, len(transfer.source_blocks) + buffer, in_buffer(transfer, found))
    for part in transfer.exchange.keeps:
        if not moves(transfer, part):
            yield Term(part, part.tensor, transfer.source_blocks[part.tensor])


def reduce_tables(transfer: Transfer, terms: Iterable[Term], slots: SlotTensors | None = None) -> tuple[Table, ...]:
    """One table per dtype and reduction; a box's slots are its terms in coordinate order.

    With `slots` some terms lie in peers' slots.
    """
    of_region: dict[tuple[int, object], list[Term]] = defaultdict(list)
    for term in terms:
        of_region[term.part.tensor, term.part.region].append(term)
    boxes = (box for found in of_region.values() for box in _reduced_boxes(transfer, found))
    return tables_of_sums(transfer, boxes, slots)


def tables_of_sums(
    transfer: Transfer, boxes: Iterable[ReduceBox], slots: SlotTensors | None = None
) -> tuple[Table, ...]:
    """Boxes of sums in one table per dtype and reduction; the first awaits peers of `slots`, the last tells them."""
    tables: dict[tuple[str, Reduction], list[ReduceBox]] = defaultdict(list)
    for box in boxes:
        reduction = transfer.reductions[box.target]
        assert reduction is not None, f"tensor {box.target} of {transfer.description} is not reduced"
        tables[str(transfer.dtypes[box.target]).removeprefix("torch."), reduction].append(box)
    last = len(tables) - 1
    return tuple(
        reduce_table(
            *(found, reduction.op, dtype, reduction.divisor, transfer.device),
            slots and slots._replace(awaits=slots.awaits and number == 0, publishes=slots.publishes and number == last),
        )
        for number, ((dtype, reduction), found) in enumerate(tables.items())
    )


def _reduced_boxes(transfer: Transfer, terms: Iterable[Term]) -> Iterator[ReduceBox]:
    terms = sorted(terms, key=lambda term: term.part.contribution)
    part = terms[0].part
    check_contributions(transfer, [term.part for term in terms])
    sides = (transfer.target_blocks[part.tensor], *(term.stored for term in terms))
    for lengths, ((target_offset, target_strides), *places) in joint_boxes(sides, part.region):
        slots = tuple(Slot(term.source, offset, strides) for term, (offset, strides) in zip(terms, places, strict=True))
        yield ReduceBox(part.tensor, target_offset, lengths, target_strides, slots)


def check_contributions(transfer: Transfer, terms: Sequence[Part]) -> None:
    """Asserts that all terms of a sum are there, in the order of their numbers."""
    found, part = [term.contribution for term in terms], terms[0]
    expected = list(range(transfer.exchange.contributions[part.tensor] or len(found)))
    assert found == expected, f"{transfer.description} has terms {found} for {part.region}, expected {expected}"
