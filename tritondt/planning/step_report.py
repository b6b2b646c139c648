"""Reports of single steps on one rank: messages, bytes, temporary memory and predicted seconds."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tritondt.planning.alignment import DENSE, Alignment
from tritondt.planning.collectives import Collective
from tritondt.planning.cost import CostTable
from tritondt.planning.exchange import Exchange, Message, Part
from tritondt.planning.plan import Step
from tritondt.planning.storage import Block, contiguous_offset
from tritondt.sharding import intervals as regions
from tritondt.sharding.layout import Coordinate


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step on one rank: exact messages and bytes, and the seconds that the cost table predicts for any rank.

    `packed_bytes` and `staged_bytes` are the temporary memory of what is packed before sending and of what
    arrives before it is unpacked or reduced; messages that are one run of memory need neither, unless they hold another
    dtype than the tensor, or start where the transport moves bytes slowly: `aligned_bytes` are of such messages.
    `slot_bytes` are packed in slots of shared memory, chunk by chunk, where peers read them, and `placed_bytes` in
    slots of other ranks' GPUs: neither side has temporary memory for those messages.
    """

    kind: str
    source: str
    target: str
    num_sent: int
    num_received: int
    sent_bytes: int
    received_bytes: int
    packed_bytes: int
    staged_bytes: int
    seconds: float
    slot_bytes: int = 0
    aligned_bytes: int = 0
    placed_bytes: int = 0


class Near(NamedTuple):
    """The ranks of this rank's host, as places among all that exchange, and what fits into their slots on GPUs."""

    first: int
    end: int
    slot_bytes: int

    def takes(self, message: Message, itemsize: int) -> bool:
        """Whether a message, to a rank or from it, is packed where it is unpacked.

        >>> from tritondt.planning.exchange import Message, Part
        >>> message = Message(3, (Part((((0, 8),),)),))
        >>> Near(0, 4, 32).takes(message, 4), Near(0, 3, 32).takes(message, 4), Near(0, 4, 31).takes(message, 4)
        (True, False, False)
        """
        return self.first <= message.peer < self.end and message.numel * itemsize <= self.slot_bytes


def near_ranks(costs: CostTable, num_ranks: int, place: int) -> Near | None:
    """The ranks that share a host with the one at `place` of consecutive ranks; None where they share no GPU memory.

    >>> near_ranks(CostTable(device_arena_bytes=1 << 20, ranks_per_host=4), 8, 5)
    Near(first=4, end=8, slot_bytes=130560)
    >>> near_ranks(CostTable(), 8, 5)
    """
    slot_bytes, first = costs.slot_bytes(num_ranks), place - place % costs.ranks_per_host
    return Near(first, first + costs.ranks_per_host, slot_bytes) if slot_bytes else None


def step_report(
    step: Step,
    found: Exchange,
    stored: tuple[tuple[Block, ...], tuple[Block, ...]],
    itemsize: int,
    seconds: float,
    chunk_bytes: int = 0,
    alignment: Alignment = DENSE,
    near: Near | None = None,
) -> StepReport:
    """Report of a step on a rank that exchanges `found` between the source and target blocks `stored`.

    With `chunk_bytes`, messages go through slots in such chunks, and those that several peers receive are packed once.
    No term of one tensor waits for another one's round. Messages that `near` ranks pack into each other's memory need
    no memory beside that.
    """
    source_blocks, target_blocks = stored
    sent, received = (_num_bytes(each, itemsize) for each in (found.sends, found.receives))
    if chunk_bytes:
        in_slots = sum(message.numel * itemsize for message in {each.parts: each for each in found.sends}.values())
        return _step_report(step, found, _Bytes(sent, received, 0, 0, in_slots), seconds)
    far_sends, far_receives, packed, staged = found.sends, found.receives, sent, received
    if near is not None:
        far_sends, far_receives = (
            tuple(message for message in each if not near.takes(message, itemsize))
            for each in (far_sends, far_receives)
        )
        packed, staged = (_num_bytes(each, itemsize) for each in (far_sends, far_receives))
    in_place, landing, aligned = 0, 0, 0
    source_at, target_at = ({block.region: (block,) for block in blocks} for blocks in stored)
    for message in far_sends:
        here, there = _in_place_bytes(
            source_at.get(message.parts[0].region, source_blocks), message, itemsize, alignment
        )
        in_place, aligned = in_place + here, aligned + there
    for message in far_receives if step.kind != "reduce" else ():
        here, there = _in_place_bytes(
            target_at.get(message.parts[0].region, target_blocks), message, itemsize, alignment
        )
        landing, aligned = landing + here, aligned + there
    num_bytes = _Bytes(sent, received, packed - in_place, staged - landing, aligned=aligned, placed=sent - packed)
    return _step_report(step, found, num_bytes, seconds)


def _num_bytes(messages: Iterable[Message], itemsize: int) -> int:
    return sum(message.numel for message in messages) * itemsize


def _in_place_bytes(
    stored: tuple[Block, ...], message: Message, itemsize: int, alignment: Alignment
) -> tuple[int, int]:
    """Bytes of a message that goes without a buffer, and of one that would but for where it starts."""
    num_bytes = message.numel * itemsize
    offset = contiguous_offset(stored, message.parts[0].region) if len(message.parts) == 1 else None
    if offset is None:
        return 0, 0
    return (num_bytes, 0) if alignment.keeps_in_place(offset * itemsize, num_bytes) else (0, num_bytes)


def collective_report(
    step: Step, collective: Collective, itemsize: int, seconds: float, coordinate: Coordinate
) -> StepReport:
    """Report of a step that NCCL does: its bytes are a ring's, to and from all others of the rank's group."""
    gathers, num_peers = collective.op is None, collective.num_ranks - 1
    whole = step.target_layout if gathers else step.route.source_layout
    numel = prod(whole.local_shape(coordinate))
    moved = collective._replace(numel=numel).moved_elements * itemsize
    copied = 0 if collective.is_dense else numel * itemsize
    packed, staged = (0, copied) if gathers else (copied, 0)
    if collective.registered_bytes:
        packed, staged = (each * itemsize for each in collective._replace(numel=numel).sides)
    return StepReport(
        kind=collective.kind,
        source=str(step.source),
        target=str(step.target),
        num_sent=num_peers,
        num_received=num_peers,
        sent_bytes=moved,
        received_bytes=moved,
        packed_bytes=packed,
        staged_bytes=staged,
        seconds=seconds,
    )


class WireSize(NamedTuple):
    """Bytes of an element in the tensor and in messages, and of the scale of a box in messages."""

    itemsize: int
    wire_itemsize: int
    scale_bytes: int

    def num_bytes(self, parts: Iterable[Part]) -> int:
        """Bytes that parts take in messages."""
        return sum(
            part.numel * self.wire_itemsize + regions.num_boxes(part.region) * self.scale_bytes for part in parts
        )


def cast_report(step: Step, found: Exchange, wire: WireSize, seconds: float) -> StepReport:
    """Report of a step whose messages have another dtype: sends and keeps are packed, those that several receive once.

    Terms of a reduction are staged as they come, and as wide as the tensor.
    """
    packed = {*(message.parts for message in found.sends), *((part,) for part in found.keeps)}
    arriving = [part for message in found.receives for part in message.parts]
    received = wire.num_bytes(arriving)
    widened = 0
    if step.kind == "reduce":
        widened = sum(part.numel for part in (*arriving, *found.keeps)) * wire.itemsize
    sent = sum(wire.num_bytes(message.parts) for message in found.sends)
    num_bytes = _Bytes(sent, received, sum(wire.num_bytes(parts) for parts in packed), received + widened)
    return _step_report(step, found, num_bytes, seconds)


class _Bytes(NamedTuple):
    """Bytes of one step on one rank, for a StepReport."""

    sent: int
    received: int
    packed: int
    staged: int
    in_slot: int = 0
    aligned: int = 0
    placed: int = 0


def _step_report(step: Step, found: Exchange, num_bytes: _Bytes, seconds: float) -> StepReport:
    return StepReport(
        kind=step.kind,
        source=str(step.source),
        target=str(step.target),
        num_sent=len(found.sends),
        num_received=len(found.receives),
        sent_bytes=num_bytes.sent,
        received_bytes=num_bytes.received,
        packed_bytes=num_bytes.packed,
        staged_bytes=num_bytes.staged,
        seconds=seconds,
        slot_bytes=num_bytes.in_slot,
        aligned_bytes=num_bytes.aligned,
        placed_bytes=num_bytes.placed,
    )
