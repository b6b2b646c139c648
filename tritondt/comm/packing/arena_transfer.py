"""Transfers compiled for ranks that read messages where their senders have packed them.

Every round of an exchange packs a chunk of each message into one slot of this rank's arena, one that several peers
receive only once; receivers unpack, or reduce, from there, while it is in the cache. The extension cuts the rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tritondt._C import ArenaProgram, BoxMoves
from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.messages import NO_SLICES, Slice, Slices
from tritondt.comm.packing.packed_transfer import Blocks, PackedTransfer, check_contributions, kept, moves, part_bytes
from tritondt.planning.exchange import Message, Part
from tritondt.planning.slots import goes_past_cache
from tritondt.planning.storage import Joint, joint_boxes, message_block
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Region

# As the extension takes it: the tensor, lengths without gaps, and boxes in storages and in a message of the part.
_Boxes = tuple[int, tuple[int, ...], list[Joint]]


class ArenaTransfer(NamedTuple):
    """A transfer compiled to a program of the extension, and the places of its peers.

    Staged are terms that wait for those of later rounds. `sends` and `receives` say how long the messages are, where
    they are of boxes; the program knows where they lie.
    """

    native: ArenaProgram
    peers: tuple[int, ...]
    sent_bytes: int
    received_bytes: int
    num_sent: int
    num_received: int
    staged_bytes: int
    sends: Slices = NO_SLICES
    receives: Slices = NO_SLICES


@dataclass(frozen=True, eq=False)
class ProgramTransfer(Transfer):
    """A transfer of whole tensors that is made as a program, or as messages: it has no boxes, and moves bytes."""

    plan: ArenaTransfer | PackedTransfer | None = None
    ends: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # of its bytes in each source and in each target

    @property
    def needed_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of memory that each source and each target has behind its first element, at least."""
        return self.ends


def arena_transfer(transfer: Transfer, num_ranks: int, chunk_bytes: int, num_cores: int) -> ArenaTransfer:
    """A transfer among `num_ranks` of `num_cores` compiled for their arenas, `chunk_bytes` of a message in a round."""
    sends, receives = transfer.exchange.sends, transfer.exchange.receives
    leaving, arriving = _leaving(transfer), _arriving(transfer)
    native = BoxMoves(
        num_ranks=num_ranks,
        chunk_bytes=chunk_bytes,
        itemsizes=[dtype.itemsize for dtype in transfer.dtypes],
        reductions=[
            None if found is None else (str(dtype).removeprefix("torch."), found.op, found.divisor)
            for dtype, found in zip(transfer.dtypes, transfer.reductions, strict=True)
        ],
        leaving=leaving.boxes,
        arriving=arriving.boxes,
        sends=[(found.peer, [leaving.number(part) for part in found.parts]) for found in sends],
        receives=[
            (found.peer, [(arriving.number(part), part.contribution) for part in found.parts]) for found in receives
        ],
        own_terms=[(arriving.number(part), part.contribution) for part in _own_terms(transfer)],
        keeps=list(kept(transfer)),
        is_past_cache=goes_past_cache(max(_written_bytes(transfer), transfer.result_bytes), num_ranks, num_cores),
    )
    return ArenaTransfer(
        native,
        tuple(dict.fromkeys(found.peer for found in (*sends, *receives))),
        sum(part_bytes(transfer, part) for found in sends for part in found.parts),
        sum(part_bytes(transfer, part) for found in receives for part in found.parts),
        len(sends),
        len(receives),
        native.staged_bytes,
        *(_messages(transfer, found) for found in (sends, receives)),
    )


def _messages(transfer: Transfer, messages: Sequence[Message]) -> Slices:
    return Slices(
        Slice(message.peer, None, 0, sum(part_bytes(transfer, part) for part in message.parts)) for message in messages
    )


class _Numbered(NamedTuple):
    """Boxes of parts, one for all that are of the same elements."""

    numbers: dict[tuple[int, Region], int]
    boxes: list[_Boxes]

    def number(self, part: Part) -> int:
        """Number of a part's boxes."""
        return self.numbers[part.tensor, part.region]

    def add(self, part: Part, storages: Sequence[Blocks]) -> None:
        """Adds the boxes of a part, which has none yet, in storages and in a message of the whole part."""
        region = part.region
        self.numbers[part.tensor, region] = len(self.boxes)
        found = joint_boxes((*storages, (message_block(region),)), region)
        self.boxes.append((part.tensor, tuple(map(regions.total, region)), found))


def _leaving(transfer: Transfer) -> _Numbered:
    """Boxes of what this rank sends."""
    found = _Numbered({}, [])
    for part in _parts_of(transfer.exchange.sends):
        if (part.tensor, part.region) not in found.numbers:
            found.add(part, (transfer.source_blocks[part.tensor],))
    return found


def _arriving(transfer: Transfer) -> _Numbered:
    """Boxes of what this rank receives, and of its own terms of what is reduced."""
    found, own = _Numbered({}, []), _own_terms(transfer)
    own_regions = {(part.tensor, part.region) for part in own}
    terms: dict[tuple[int, Region], list[Part]] = {}
    for part in (*_parts_of(transfer.exchange.receives), *own):
        key, targets = (part.tensor, part.region), transfer.target_blocks[part.tensor]
        if key not in found.numbers:
            sources = transfer.source_blocks[part.tensor]
            found.add(part, (targets, sources) if key in own_regions else (targets,))
        if not moves(transfer, part):
            terms.setdefault(key, []).append(part)
    for each in terms.values():
        check_contributions(transfer, sorted(each, key=lambda part: part.contribution))
    return found


def _parts_of(messages: Iterable[Message]) -> list[Part]:
    return [part for message in messages for part in message.parts]


def _own_terms(transfer: Transfer) -> list[Part]:
    """Terms of sums that this rank has itself."""
    return [part for part in transfer.exchange.keeps if not moves(transfer, part)]


def _written_bytes(transfer: Transfer) -> int:
    """Bytes that a transfer copies to its targets."""
    parts = (*transfer.exchange.keeps, *_parts_of(transfer.exchange.receives))
    return sum(part_bytes(transfer, part) for part in parts if moves(transfer, part))
