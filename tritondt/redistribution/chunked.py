"""Gathers and reduce-scatters in chunks that are under way while the calling thread computes.

Chunks are issued on the communicator's queue and run in order of issue, by distance: at distance d every rank sends to
the rank d places after it. A chunk holds positions of the one dim that the ranks share out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from tritondt import events, identity
from tritondt.comm.communicator import Communicator, Traffic, Transfer
from tritondt.comm.work import Work
from tritondt.kernels.boxes import ReduceBox, Slot
from tritondt.kernels.memory import allocate
from tritondt.kernels.tables import Table, reduce_table
from tritondt.planning.chunks import by_distance, in_pieces
from tritondt.planning.exchange import Exchange, Part
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.plan import Step
from tritondt.planning.storage import Block, joint_boxes, message_block
from tritondt.redistribution.compile import compile_plan
from tritondt.redistribution.compiled_step import CompiledStep
from tritondt.redistribution.refusals import refuse_each
from tritondt.sharding.placement import Shard
from tritondt.sharding.spec import DTensorSpec

# Computes positions [start, stop) of the dim.
Compute = Callable[[int, int], None]


class Chunk(NamedTuple):
    """One exchange of many, with the part that this rank sends and the part that it receives, None where there is
    none.
    """

    transfer: Transfer
    sent: Part | None
    received: Part | None


class Chunked(NamedTuple):
    """A step divided into chunks, in order of distance; `own` are this rank's positions of dim `dim` under the shard.

    `sums` completes piece after piece of a reduce-scatter: chunks to wait for, and what to do with what they brought.
    """

    step: Step
    communicator: Communicator
    dim: int
    own: tuple[int, int]
    chunks: tuple[Chunk, ...]
    sums: tuple["Sum", ...] = ()


class Sum(NamedTuple):
    """Addition of the terms that chunks number `arrivals` brought to the own product, in coordinate order."""

    arrivals: tuple[int, ...]
    table: Table | None


def shared_dim(spec: DTensorSpec) -> int:
    """Dim that the one axis of a spec's mesh shards."""
    placement = spec.placements[0]
    assert isinstance(placement, Shard), f"{spec} is not sharded"
    return placement.dim


@lru_cache(maxsize=1024)
def chunked_gather(
    source: DTensorSpec,
    target: DTensorSpec,
    strides: tuple[int, ...],
    shares: tuple[int, ...],
    device: torch.device,
) -> Chunked | None:
    """Chunks of a step from Shard to Replicate on a mesh of one axis; None where the plan is no single exchange."""
    found = _divided(compile_plan(source, target, strides, device, None, True).steps, source, shares)
    if found is None:
        return None
    chunked, transfer, parts = found
    chunks = tuple(
        _chunk(transfer, number, len(parts), exchange, transfer.source_blocks[0], transfer.target_blocks[0])
        for number, exchange in enumerate(parts)
    )
    return chunked._replace(chunks=chunks)


@lru_cache(maxsize=1024)
def chunked_scatter(
    source: DTensorSpec, target: DTensorSpec, shares: tuple[int, ...], device: torch.device
) -> Chunked | None:
    """Chunks of a step from Partial to Shard on a mesh of one axis, the farthest first; None where the plan is no
    single exchange.
    """
    compiled = compile_plan(source, target, source.tensor_meta.stride, device, None, True)
    found = _divided(compiled.steps, target, shares)
    if found is None:
        return None
    chunked, transfer, parts = found
    num_pieces = len(shares)
    farthest_first = range(len(parts) - num_pieces, -1, -num_pieces)
    parts = [parts[start + piece] for start in farthest_first for piece in range(num_pieces)]
    chunks = []
    for number, exchange in enumerate(parts):
        received = _only_part(exchange, "receives")
        arrives_as = () if received is None else (message_block(received.region),)  # it holds nothing else
        chunks.append(_chunk(transfer, number, len(parts), exchange, transfer.source_blocks[0], arrives_as))
    sums = tuple(
        _sum(transfer, piece, chunks, range(place, len(chunks), num_pieces))
        for place, piece in enumerate(in_pieces(transfer.exchange, chunked.dim, shares))
    )
    return chunked._replace(chunks=tuple(chunks), sums=sums)


def _divided(
    steps: Sequence[CompiledStep], cut: DTensorSpec, shares: tuple[int, ...]
) -> tuple[Chunked, Transfer, list[Exchange]] | None:
    """Step without chunks, its transfer, and the exchanges of its chunks: distance by distance, piece by piece."""
    if len(steps) != 1 or steps[0].communicator is None or steps[0].transfer is None:
        return None
    step, transfer, communicator = steps[0][:3]
    assert transfer is not None
    assert communicator is not None
    assert cut.coordinate is not None, f"{cut} is taken apart on a rank outside its mesh"
    dim = shared_dim(cut)
    intervals = cut.layout.region(cut.coordinate)[dim]
    own = (intervals[0][0], intervals[-1][1]) if intervals else (0, 0)
    place = communicator.ranks.index(cut.mesh.identity.rank)
    distances = by_distance(transfer.exchange, place, len(communicator.ranks))[1:]
    parts = [piece for distance in distances for piece in in_pieces(distance, dim, shares)]
    return Chunked(step, communicator, dim, own, ()), transfer, parts


def _only_part(exchange: Exchange, side: str) -> Part | None:
    messages = exchange.sends if side == "sends" else exchange.receives
    parts = [part for message in messages for part in message.parts]
    assert len(parts) <= 1, f"{side} of a chunk are {parts}, expected one part"
    return parts[0] if parts else None


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
        fingerprint=exchange_fingerprint(text),
        description=f"chunk {number + 1} of {num_chunks} of {transfer.description}",
        device=transfer.device,
    )
    return Chunk(made, _only_part(exchange, "sends"), _only_part(exchange, "receives"))


def _sum(transfer: Transfer, piece: Exchange, chunks: Sequence[Chunk], arrivals: Sequence[int]) -> Sum:
    """Sum of a piece, whose table has the own product as source 0 and the tensor of chunk i as source i + 1."""
    if not piece.keeps:
        return Sum(tuple(arrivals), None)
    (kept,) = piece.keeps
    terms = [(kept.contribution, 0, transfer.source_blocks[0])]
    for number in arrivals:
        part = chunks[number].received
        assert part is not None, f"chunk {number} of {transfer.description} brings no term of {kept}"
        terms.append((part.contribution, number + 1, (message_block(part.region),)))
    terms.sort(key=lambda term: term[0])
    sides = [transfer.target_blocks[0], *(blocks for _, _, blocks in terms)]
    boxes = []
    for lengths, ((offset, strides), *places) in joint_boxes(sides, kept.region):
        slots = tuple(Slot(term[1], *place) for term, place in zip(terms, places, strict=True))
        boxes.append(ReduceBox(0, offset, lengths, strides, slots))
    dtype = str(transfer.dtypes[0]).removeprefix("torch.")
    return Sum(tuple(arrivals), reduce_table(boxes, "sum", dtype, 1, transfer.device))


def gather(
    chunked: Chunked, local: torch.Tensor, whole: torch.Tensor, compute: Compute, products: Sequence[int]
) -> None:
    """Fills `whole`, and calls `compute` with the positions that have arrived: this rank's own first.

    `products` says of how many chunks each call after that is.
    """
    _emit_step(chunked)
    issue = _Issues(chunked)
    works = [issue(chunk, local, whole, guard=True) for chunk in chunked.chunks]
    start, stop = chunked.own
    whole.narrow(chunked.dim, start, stop - start).copy_(local)
    compute(start, stop)
    for taken in _runs(products):
        for work in works[taken]:
            work.wait()
        _compute_span(chunked, [chunk.received for chunk in chunked.chunks[taken]], compute)


def scatter(
    chunked: Chunked,
    product: torch.Tensor,
    shape: Sequence[int],
    compute: Compute,
    products: Sequence[int],
    meanwhile: Callable[[], None],
) -> torch.Tensor:
    """Part of this rank, of `shape`, of the sum over ranks of `product`, which `compute` writes.

    Chunks that other ranks wait for are computed first and sent at once; `products` says how many go to each call of
    `compute`. `meanwhile` is called before this rank waits for the others.
    """
    _emit_step(chunked)
    issue, works, arrived = _Issues(chunked), list[Work](), list[torch.Tensor]()
    try:
        for taken in _runs(products):
            chunks = chunked.chunks[taken]
            _compute_span(chunked, [chunk.sent for chunk in chunks], compute)
            for chunk in chunks:
                arrived.append(_empty(chunk.received, product))
                works.append(issue(chunk, product, arrived[-1]))
    except Exception as error:  # the others wait for a chunk that will not come
        refuse_each([chunked.communicator] * (len(chunked.chunks) - len(works)), error)
        raise
    compute(*chunked.own)
    meanwhile()
    result = allocate(shape, product.dtype, product.device)
    pointers = [tensor.data_ptr() for tensor in (product, *arrived)]
    for needed, table in chunked.sums:
        for number in needed:
            works[number].wait()
        if table is not None:
            table.run(pointers, [result.data_ptr()], torch.get_num_threads())
    return result


def _runs(lengths: Sequence[int]) -> list[slice]:
    """Consecutive slices of the given lengths."""
    return [slice(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True)]


def _compute_span(chunked: Chunked, parts: Sequence[Part | None], compute: Compute) -> None:
    """Calls `compute` once for the parts, of one peer and in order, that are not empty."""
    intervals = [interval for part in parts if part is not None for interval in part.region[chunked.dim]]
    if intervals:
        compute(intervals[0][0], intervals[-1][1])


class _Issues:
    """Issues chunks of one call; after one has failed the rest fail alike, without asking the others again."""

    def __init__(self, chunked: Chunked) -> None:
        self._communicator = chunked.communicator
        self._failure: Exception | None = None

    def __call__(self, chunk: Chunk, source: torch.Tensor, target: torch.Tensor, *, guard: bool = False) -> Work:
        def run() -> None:
            if self._failure is not None:
                refuse_each([self._communicator], self._failure)
                raise self._failure
            try:
                self._communicator.exchange([source], [target], chunk.transfer)
            except Exception as error:
                self._failure = error
                raise

        return self._communicator.issue(run, chunk.transfer.description, (source,) if guard else ())


def _empty(part: Part | None, like: torch.Tensor) -> torch.Tensor:
    lengths = (0,) if part is None else message_block(part.region).lengths
    return allocate(lengths, like.dtype, like.device)


def _emit_step(chunked: Chunked) -> None:
    """Tells what all chunks together will move, as one step that took no time yet."""
    if not events.enabled():
        return
    total, step = Traffic(), chunked.step
    for chunk in chunked.chunks:
        moved = chunked.communicator.traffic_of(chunk.transfer)
        total.count(moved.sent_bytes, moved.received_bytes, moved.num_sent, moved.num_received)
    events.emit_step(step.kind, str(step.source), str(step.target), step.target_layout.shape, total)


identity.on_end(chunked_gather.cache_clear)
identity.on_end(chunked_scatter.cache_clear)
