"""Transfers compiled to one collective of NCCL, and to the tables that copy what it cannot read or write in place.

All ranks take part in the collective; whether a rank copies into or out of a buffer for it is that rank's own affair,
unless the collective is of registered memory.
"""

from collections.abc import Sequence

from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.messages import Slice, Slices
from tritondt.comm.packing.packed_transfer import (
    ALIGNED,
    Arrival,
    CollectiveCall,
    PackedTransfer,
    TensorStarts,
    in_buffer,
    part_bytes,
    part_copies,
)
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.tables import copy_table
from tritondt.planning.alignment import DENSE, Alignment
from tritondt.planning.collectives import Collective
from tritondt.planning.exchange import Message, Part
from tritondt.planning.storage import Block, contiguous_offset


def collective_transfer(
    transfer: Transfer,
    collective: Collective,
    place: int,
    alignment: Alignment = DENSE,
    starts: TensorStarts = ALIGNED,
) -> PackedTransfer:
    """A transfer as a call of a collective, made by the rank at `place` in the communicator, with its tables.

    A large tensor that starts between multiples of an alignment is copied to or from a buffer that starts at one.
    """
    exchange, itemsize = transfer.exchange, transfer.dtypes[0].itemsize
    (kept,) = exchange.keeps
    source_blocks, target_blocks = transfer.source_blocks[0], transfer.target_blocks[0]
    if collective.kind == "all_gather":
        leaving, arriving = [kept], _in_order(exchange.receives, kept, place)
    elif collective.kind == "reduce_scatter":
        leaving, arriving = _in_order(exchange.sends, kept, place), [kept]
    else:
        leaving = arriving = [kept]
    source_start, target_start = (
        _aligned_run(blocks, parts, itemsize, alignment, (behind or (0,))[0])
        for (blocks, parts), behind in zip(_sides(transfer, leaving, arriving), starts, strict=True)
    )
    if collective.registered_bytes:  # by the buffers on every rank
        source_start = target_start = None
    packs: tuple[CopyBox, ...] = ()
    unpacks: tuple[CopyBox, ...] = ()
    if source_start is None:
        packs = tuple(
            box
            for found in _end_to_end(transfer, leaving)
            for box in part_copies(transfer, found.part, (source_blocks, in_buffer(transfer, found)), (0, 0))
        )
    if target_start is None:
        unpacks = tuple(
            box
            for found in _end_to_end(transfer, arriving)
            for box in part_copies(transfer, found.part, (in_buffer(transfer, found), target_blocks), (0, 0))
        )
    # In a group of shorter tensors than the largest has, fewer elements go.
    own = collective._replace(numel=kept.numel * (1 if collective.kind == "all_reduce" else collective.num_ranks))
    moved_bytes, peers = own.moved_elements * itemsize, [it for it in range(collective.num_ranks) if it != place]
    slices = Slices(Slice(peer, None, 0, moved_bytes // len(peers)) for peer in peers)
    call = CollectiveCall(
        collective.kind,
        kept.numel * itemsize if collective.op is None else kept.numel,
        "uint8" if collective.op is None else str(transfer.dtypes[0]).removeprefix("torch."),
        collective.op or "sum",
        collective.divisor,
        None if source_start is None else source_start * itemsize,
        (target_start or 0) * itemsize,
        target_start is None,
        collective.registered_bytes,
    )
    return PackedTransfer(
        slices,
        slices,
        moved_bytes,
        moved_bytes,
        sum(part_bytes(transfer, part) for part in leaving) if packs else 0,
        sum(part_bytes(transfer, part) for part in arriving) if unpacks else 0,
        copy_table(packs, transfer.device) if packs else None,
        None,
        copy_table(unpacks, transfer.device) if unpacks else None,
        (),
        collective=call,
    )


def _sides(
    transfer: Transfer, leaving: Sequence[Part], arriving: Sequence[Part]
) -> tuple[tuple[Sequence[Block], Sequence[Part]], ...]:
    return (transfer.source_blocks[0], leaving), (transfer.target_blocks[0], arriving)


def _in_order(messages: Sequence[Message], kept: Part, place: int) -> list[Part]:
    """Parts of all ranks in the order of their places, one of each."""
    parts = {message.peer: message.parts[0] for message in messages} | {place: kept}
    return [parts[peer] for peer in sorted(parts)]


def _run(stored: Sequence[Block], parts: Sequence[Part]) -> int | None:
    """Offset at which parts lie one after the other in storage, as one run; None where they do not."""
    first = contiguous_offset(stored, parts[0].region)
    if first is None:
        return None
    offset = first
    for part in parts:
        if contiguous_offset(stored, part.region) != offset:
            return None
        offset += part.numel
    return first


def _aligned_run(
    stored: Sequence[Block], parts: Sequence[Part], itemsize: int, alignment: Alignment, behind: int
) -> int | None:
    """Offset of a run, of a tensor so many bytes `behind`; None where there is none, or a large one is misaligned."""
    start, num_bytes = _run(stored, parts), sum(part.numel for part in parts) * itemsize
    if start is None or not alignment.keeps_in_place(behind + start * itemsize, num_bytes):
        return None
    return start


def _end_to_end(transfer: Transfer, parts: Sequence[Part]) -> list[Arrival]:
    """Parts where they lie in a buffer, one after the other."""
    found, filled = [], 0
    for part in parts:
        found.append(Arrival(part, filled))
        filled += part_bytes(transfer, part)
    return found
