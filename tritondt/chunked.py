"""A gather or a reduce-scatter in chunks that are under way while the calling thread computes.

Chunks are issued on the communicator's queue and run in order of issue, by distance: at distance d every rank sends to
the rank d places after it. What a chunk holds are positions of the one dim that the ranks share out.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from tritondt import events
from tritondt._C import ReduceTable
from tritondt.comm import registry
from tritondt.comm.communicator import Communicator, Traffic, Transfer
from tritondt.comm.work import Work
from tritondt.kernels.boxes import ReduceBox, Slot
from tritondt.memory import allocate
from tritondt.placement import Shard
from tritondt.planning.chunks import by_distance, in_pieces
from tritondt.planning.exchange import Exchange, Part
from tritondt.planning.geometry import Block, joint_boxes, message_block
from tritondt.planning.plan import Step
from tritondt.runnable import compiled
from tritondt.spec import DTensorSpec

# Computes positions [start, stop) of the dim into the tensor given.
Compute = Callable[[int, int, torch.Tensor], None]


class Chunk(NamedTuple):
    """One exchange of many, and the part that this rank sends and receives in it, where it does."""

    transfer: Transfer
    sent: Part | None
    received: Part | None


class Chunked(NamedTuple):
    """A step in chunks, in order of distance; `own` are this rank's positions of dim `dim` under the shard.

    `sums` completes piece after piece of a reduce-scatter: chunks to wait for, and what to do with what they brought.
    """

    step: Step
    communicator: Communicator
    dim: int
    own: tuple[int, int]
    chunks: tuple[Chunk, ...]
    sums: tuple["Sum", ...] = ()


class Sum(NamedTuple):
    """Adds what chunks number `arrivals` brought to the own product, in coordinate order."""

    arrivals: tuple[int, ...]
    table: ReduceTable | None


def shared_dim(spec: DTensorSpec) -> int:
    """The dim that the one axis of a spec's mesh cuts."""
    placement = spec.placements[0]
    assert isinstance(placement, Shard), f"{spec} is not sharded"
    return placement.dim


@lru_cache(maxsize=1024)
def chunked_gather(
    source: DTensorSpec, target: DTensorSpec, strides: tuple[int, ...], num_pieces: int
) -> Chunked | None:
    """From Shard to Replicate on a mesh of one axis; None where that is no single exchange."""
    found = _divided(source, target, strides, source, num_pieces)
    if found is None:
        return None
    chunked, transfer, parts = found
    chunks = tuple(
        _chunk(transfer, number, len(parts), exchange, transfer.source_blocks[0], transfer.target_blocks[0])
        for number, exchange in enumerate(parts)
    )
    return chunked._replace(chunks=chunks)


@lru_cache(maxsize=1024)
def chunked_scatter(source: DTensorSpec, target: DTensorSpec, num_pieces: int) -> Chunked | None:
    """From Partial to Shard on a mesh of one axis, the farthest first; None where that is no single exchange."""
    found = _divided(source, target, source.tensor_meta.stride, target, num_pieces)
    if found is None:
        return None
    chunked, transfer, parts = found
    farthest_first = range(len(parts) - num_pieces, -1, -num_pieces)
    parts = [parts[start + piece] for start in farthest_first for piece in range(num_pieces)]
    chunks = []
    for number, exchange in enumerate(parts):
        sent, received = _only_part(exchange, "sends"), _only_part(exchange, "receives")
        chunks.append(_chunk(transfer, number, len(parts), exchange, _own_memory(sent), _own_memory(received)))
    sums = tuple(
        _sum(transfer, piece, chunks, range(place, len(chunks), num_pieces))
        for place, piece in enumerate(in_pieces(transfer.exchange, chunked.dim, num_pieces))
    )
    return chunked._replace(chunks=tuple(chunks), sums=sums)


def _divided(
    source: DTensorSpec, target: DTensorSpec, strides: tuple[int, ...], cut: DTensorSpec, num_pieces: int
) -> tuple[Chunked, Transfer, list[Exchange]] | None:
    """The step without chunks, its transfer, and the exchanges of those: distance by distance, piece by piece."""
    steps = compiled(source, target, strides)
    if len(steps) != 1 or steps[0].communicator is None or steps[0].transfer is None:
        return None
    step, transfer, communicator = steps[0][:3]
    assert transfer is not None
    assert communicator is not None
    assert cut.coordinate is not None, f"{cut} is taken apart on a rank outside its mesh"
    dim = shared_dim(cut)
    intervals = cut.layout.region(cut.coordinate)[dim]
    own = (intervals[0][0], intervals[-1][1]) if intervals else (0, 0)
    place = communicator.ranks.index(source.mesh.identity.rank)
    distances = by_distance(transfer.exchange, place, len(communicator.ranks))[1:]
    parts = [piece for distance in distances for piece in in_pieces(distance, dim, num_pieces)]
    return Chunked(step, communicator, dim, own, ()), transfer, parts


def _only_part(exchange: Exchange, side: str) -> Part | None:
    messages = exchange.sends if side == "sends" else exchange.receives
    parts = [part for message in messages for part in message.parts]
    assert len(parts) <= 1, f"{side} of a chunk are {parts}, expected one part"
    return parts[0] if parts else None


def _own_memory(part: Part | None) -> tuple[Block, ...]:
    """Where a part lies in a tensor that holds nothing else."""
    return () if part is None else (message_block(part.region),)


def _chunk(
    transfer: Transfer,
    number: int,
    num_chunks: int,
    exchange: Exchange,
    source: tuple[Block, ...],
    target: tuple[Block, ...],
) -> Chunk:
    text = f"{transfer.fingerprint} {number} {num_chunks}"
    made = Transfer(
        exchange=replace(exchange, contributions=(1,)),
        source_blocks=(source,),
        target_blocks=(target,),
        dtypes=transfer.dtypes,
        reductions=(None,),
        fingerprint=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little"),
        description=f"chunk {number + 1} of {num_chunks} of {transfer.description}",
    )
    return Chunk(made, _only_part(exchange, "sends"), _only_part(exchange, "receives"))


def _sum(transfer: Transfer, piece: Exchange, chunks: Sequence[Chunk], arrivals: Sequence[int]) -> Sum:
    """The sum of a piece: the own product is source 0, what chunk i brought source i + 1."""
    if not piece.keeps:
        return Sum(tuple(arrivals), None)
    (kept,), (whole,) = piece.keeps, transfer.exchange.keeps
    terms = [(kept.contribution, 0, message_block(whole.region))]
    for number in arrivals:
        part = chunks[number].received
        assert part is not None, f"chunk {number} of {transfer.description} brings no term of {kept}"
        terms.append((part.contribution, number + 1, message_block(part.region)))
    terms.sort(key=lambda term: term[0])
    sides = [transfer.target_blocks[0], *((block,) for _, _, block in terms)]
    boxes = []
    for lengths, ((offset, strides), *places) in joint_boxes(sides, kept.region):
        slots = tuple(Slot(term[1], *place) for term, place in zip(terms, places, strict=True))
        boxes.append(ReduceBox(0, offset, lengths, strides, slots))
    return Sum(tuple(arrivals), ReduceTable(boxes, "sum", str(transfer.dtypes[0]).removeprefix("torch."), 1))


def gather(chunked: Chunked, local: torch.Tensor, whole: torch.Tensor, compute: Callable[[int, int], None]) -> None:
    """Fills `whole`, and calls `compute` with the positions that are there: this rank's own first."""
    _tell(chunked)
    issue = _Issues(chunked)
    works = [issue(chunk, local, whole, guard=True) for chunk in chunked.chunks]
    start, stop = chunked.own
    whole.narrow(chunked.dim, start, stop - start).copy_(local)
    compute(start, stop)
    for work, chunk in zip(works, chunked.chunks, strict=True):
        work.wait()
        if chunk.received is not None:
            compute(*_span(chunk.received, chunked.dim))


def scatter(
    chunked: Chunked, shape: Sequence[int], like: torch.Tensor, compute: Compute, meanwhile: Callable[[], None]
) -> torch.Tensor:
    """This rank's part, of `shape`, of the sum over ranks of what `compute` gives.

    What others wait for is computed first and sent at once; `meanwhile` is called before this rank waits for them.
    """
    _tell(chunked)
    issue, works, arrived = _Issues(chunked), list[Work](), list[torch.Tensor]()
    try:
        for chunk in chunked.chunks:
            product = _empty(chunk.sent, like)
            if chunk.sent is not None:
                compute(*_span(chunk.sent, chunked.dim), product)
            arrived.append(_empty(chunk.received, like))
            works.append(issue(chunk, product, arrived[-1]))
    except BaseException as error:  # the others wait for a chunk that will not come
        chunked.communicator.refuse(error)
        raise
    own = allocate(shape, like.dtype, like.device)
    compute(*chunked.own, own)
    meanwhile()
    result = allocate(shape, like.dtype, like.device)
    pointers = [tensor.data_ptr() for tensor in (own, *arrived)]
    for needed, table in chunked.sums:
        for number in needed:
            works[number].wait()
        if table is not None:
            table.run(pointers, [result.data_ptr()], torch.get_num_threads())
    return result


class _Issues:
    """Issues chunks of one call; after one has failed the rest fail alike, without asking the others again."""

    def __init__(self, chunked: Chunked) -> None:
        self._communicator = chunked.communicator
        self._failure: BaseException | None = None

    def __call__(self, chunk: Chunk, source: torch.Tensor, target: torch.Tensor, *, guard: bool = False) -> Work:
        def run() -> None:
            if self._failure is not None:
                raise self._failure
            try:
                self._communicator.exchange([source], [target], chunk.transfer)
            except BaseException as error:
                self._failure = error
                raise

        return self._communicator.issue(run, chunk.transfer.description, (source,) if guard else ())


def _span(part: Part, dim: int) -> tuple[int, int]:
    intervals = part.region[dim]
    return intervals[0][0], intervals[-1][1]


def _empty(part: Part | None, like: torch.Tensor) -> torch.Tensor:
    lengths = (0,) if part is None else message_block(part.region).lengths
    return allocate(lengths, like.dtype, like.device)


def _tell(chunked: Chunked) -> None:
    """Tells what all chunks together will move, as one step that took no time yet."""
    if not events.enabled():
        return
    total, step = Traffic(), chunked.step
    for chunk in chunked.chunks:
        moved = chunked.communicator.traffic_of(chunk.transfer)
        total.count(moved.sent_bytes, moved.received_bytes, moved.num_sent, moved.num_received)
    numbers = (total.sent_bytes, total.received_bytes, total.num_sent, total.num_received)
    events.emit(events.StepRan(step.kind, str(step.source), str(step.target), step.target_layout.shape, *numbers, 0.0))


registry.on_end(chunked_gather.cache_clear)
registry.on_end(chunked_scatter.cache_clear)
