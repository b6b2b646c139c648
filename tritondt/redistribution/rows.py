"""Exchange of rows by counts: every rank of a mesh axis gives every other as many rows of a tensor as a table says.

The rows of all ranks are one tensor, those of the first rank first, and what each rank sends and receives are intervals
of its rows. Counts are those of one call, so that nothing is compiled ahead: a plan is a box for each pair of ranks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tritondt import events
from tritondt.comm import world
from tritondt.comm.communicator import Transfer
from tritondt.kernels.memory import allocate
from tritondt.planning.exchange import Exchange, Message, Part, renumber_peers
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.storage import Block
from tritondt.redistribution.run import with_memory
from tritondt.sharding import intervals as regions
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.strides import dense_strides

# What events say of an exchange, in place of placements.
ROWS_BY_SOURCE, ROWS_BY_TARGET = "rows by source", "rows by target"


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows that go from each rank of a mesh axis to each: `sent[source][target]`.

    A rank holds what it sends in the order of the targets, and gets rows in the order of the sources.

    >>> counts = RowCounts(((1, 2), (0, 3)))
    >>> counts.num_received(1), counts.back().sent
    (5, ((1, 0), (2, 3)))
    """

    sent: tuple[tuple[int, ...], ...]

    def num_sent(self, source: int) -> int:
        """Rows that a rank holds before the exchange."""
        return sum(self.sent[source])

    def num_received(self, target: int) -> int:
        """Rows that a rank holds after the exchange."""
        return sum(row[target] for row in self.sent)

    def back(self) -> "RowCounts":
        """The counts by which all rows return."""
        return RowCounts(tuple(zip(*self.sent, strict=True)))


def exchange_rows(local: torch.Tensor, counts: RowCounts, mesh: Mesh) -> torch.Tensor:
    """Rows that all ranks of a mesh of one axis have for this one, of a plain tensor of rows for all; differentiable.

    One exchange, with one message from each rank to each other that gets rows. A collective call of the mesh's ranks,
    with equal counts and rows of one shape and dtype; MismatchError where those differ.
    """
    found: torch.Tensor = _ExchangeRows.apply(local, counts, mesh)  # type: ignore[no-untyped-call]
    return found


class _ExchangeRows(torch.autograd.Function):
    """Rows that change ranks; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, counts: RowCounts, mesh: Mesh) -> torch.Tensor:
        """Exchanges rows; a new tensor."""
        ctx.counts, ctx.mesh = counts, mesh
        return _exchanged(local, counts, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Gradients of the rows that this rank gave away."""
        return exchange_rows(grad, ctx.counts.back(), ctx.mesh), None, None


def _exchanged(local: torch.Tensor, counts: RowCounts, mesh: Mesh) -> torch.Tensor:
    assert mesh.coordinate is not None, f"rows are exchanged on ranks of {mesh} only"
    own, shape = mesh.coordinate[0], tuple(local.shape[1:])
    assert local.shape[0] == counts.num_sent(own), f"{counts} has other rows than {tuple(local.shape)} of rank {own}"
    result = allocate((counts.num_received(own), *shape), local.dtype, local.device)
    communicator = world.current().communicator(mesh.ranks, mesh.device_type)
    transfer, started = _transfer(counts, own, mesh, local), time.perf_counter()
    communicator.exchange([with_memory(local).contiguous()], [result], transfer)
    if events.subscribers:
        seconds = time.perf_counter() - started
        whole = (sum(map(sum, counts.sent)), *shape)
        moved = communicator.traffic_of(transfer)
        events.emit_step("rows", ROWS_BY_SOURCE, ROWS_BY_TARGET, whole, moved, seconds=seconds)
    return result


def _transfer(counts: RowCounts, own: int, mesh: Mesh, local: torch.Tensor) -> Transfer:
    """This rank's side of the exchange."""
    inner, num_ranks = tuple(local.shape[1:]), len(counts.sent)
    ends = list(accumulate(map(sum, counts.sent), initial=0))

    def part(source: int, target: int) -> Part:
        start = ends[source] + sum(counts.sent[source][:target])
        return Part((((start, start + counts.sent[source][target]),), *(((0, length),) for length in inner)))

    def block(intervals: Sequence[tuple[int, int]]) -> tuple[Block, ...]:
        lengths = (sum(stop - start for start, stop in intervals), *inner)
        region = (regions.merge(intervals), *(((0, length),) for length in inner))
        return (Block(region, lengths, 0, dense_strides(lengths)),)

    others = [(own + distance) % num_ranks for distance in range(1, num_ranks)]
    sends = tuple(Message(rank, (part(own, rank),)) for rank in others if part(own, rank).numel)
    receives = tuple(Message(rank, (part(rank, own),)) for rank in others if part(rank, own).numel)
    keeps = (part(own, own),) if part(own, own).numel else ()
    arriving = [part(rank, own).region[0][0] for rank in range(num_ranks)]
    row = "x".join(map(str, inner)) or "1"
    return Transfer(
        exchange=renumber_peers(Exchange(sends, receives, keeps), mesh.ranks),
        source_blocks=(block([(ends[own], ends[own + 1])]),),
        target_blocks=(block(arriving),),
        dtypes=(local.dtype,),
        reductions=(None,),
        fingerprint=exchange_fingerprint(f"rows {counts.sent} {inner} {local.dtype}"),
        # Without the counts: descriptions are kept for the flight record.
        description=f"an exchange of rows of {row} {local.dtype} by counts on {mesh}",
        device=local.device,
    )
