"""Exchange of rows by counts: every rank of a mesh axis gives every other as many rows of a tensor as a table says.

The rows of all ranks are one tensor, those of the first rank first, and what each rank sends and receives are intervals
of its rows. Counts are those of one call, so that nothing is compiled ahead: a plan is a box for each pair of ranks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from tritondt import events
from tritondt.comm import world
from tritondt.comm.communicator import Communicator, Transfer
from tritondt.comm.work import Work
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


class RowsUnderWay:
    """Rows of an exchange that was issued and runs while the caller computes; `wait` gives them."""

    def __init__(self, local: torch.Tensor, counts: RowCounts, mesh: Mesh) -> None:
        self.counts, self.mesh = counts, mesh
        self.work: Work | None = None
        # Gradients that travel back while autograd does what was computed meanwhile.
        self.gradient: tuple[torch.Tensor, Work] | None = None
        self._rows: torch.Tensor | None = _IssuedRows.apply(local, self)  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        """The rows, as `exchange_rows` gives them; the first call waits, later ones give the same tensor."""
        if self.work is not None:
            self._rows = _ArrivedRows.apply(self._rows, self)  # type: ignore[no-untyped-call]
            self.work = None
        assert self._rows is not None, "an exchange that failed has no rows"
        return self._rows


def issue_rows(local: torch.Tensor, counts: RowCounts, mesh: Mesh) -> RowsUnderWay:
    """Rows on their way: `exchange_rows` that returns at once.

    In backward the gradients travel while autograd runs backward of what the forward pass computed between this call
    and `wait`.
    """
    return RowsUnderWay(local, counts, mesh)


class _IssuedRows(torch.autograd.Function):
    """Rows that will change ranks, in memory that the exchange fills; backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, flight: RowsUnderWay) -> torch.Tensor:
        """Issues the exchange; a new tensor."""
        ctx.flight = flight
        result, flight.work = _issued(local, flight.counts, flight.mesh)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gradients of the rows that this rank gave away."""
        flight: RowsUnderWay = ctx.flight
        if flight.gradient is None:  # gradients of gradients are wanted
            return exchange_rows(grad, flight.counts.back(), flight.mesh), None
        (found, work), flight.gradient = flight.gradient, None
        work.wait()
        return found, None


class _ArrivedRows(torch.autograd.Function):
    """Rows that have changed ranks; backward sends their gradients off."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, flight: RowsUnderWay) -> torch.Tensor:
        """Waits for the exchange."""
        ctx.flight = flight
        assert flight.work is not None, "rows are waited for once"
        flight.work.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradients themselves, which `_IssuedRows` puts those that arrive in place of."""
        flight: RowsUnderWay = ctx.flight
        if not torch.is_grad_enabled():
            flight.gradient = _issued(grad, flight.counts.back(), flight.mesh)
        return grad, None


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


class _Prepared(NamedTuple):
    """An exchange of rows from `source` to `result`, and the shape of the rows of all ranks."""

    communicator: Communicator
    transfer: Transfer
    source: torch.Tensor
    result: torch.Tensor
    whole_shape: tuple[int, ...]

    def run(self) -> None:
        """Exchanges the rows."""
        self.communicator.exchange([self.source], [self.result], self.transfer)

    def emit(self, seconds: float) -> None:
        """Tells subscribers of the exchange, which took so long; 0 where that is not known yet."""
        moved = self.communicator.traffic_of(self.transfer)
        events.emit_step("rows", ROWS_BY_SOURCE, ROWS_BY_TARGET, self.whole_shape, moved, seconds=seconds)


def _prepared(local: torch.Tensor, counts: RowCounts, mesh: Mesh) -> _Prepared:
    assert mesh.coordinate is not None, f"rows are exchanged on ranks of {mesh} only"
    own, shape = mesh.coordinate[0], tuple(local.shape[1:])
    assert local.shape[0] == counts.num_sent(own), f"{counts} has other rows than {tuple(local.shape)} of rank {own}"
    result = allocate((counts.num_received(own), *shape), local.dtype, local.device)
    communicator = world.current().communicator(mesh.ranks, mesh.device_type)
    transfer = _transfer(counts, own, mesh, local)
    source = with_memory(local).contiguous()
    return _Prepared(communicator, transfer, source, result, (sum(map(sum, counts.sent)), *shape))


def _exchanged(local: torch.Tensor, counts: RowCounts, mesh: Mesh) -> torch.Tensor:
    prepared, started = _prepared(local, counts, mesh), time.perf_counter()
    prepared.run()
    if events.subscribers:
        prepared.emit(time.perf_counter() - started)
    return prepared.result


def _issued(local: torch.Tensor, counts: RowCounts, mesh: Mesh) -> tuple[torch.Tensor, Work]:
    prepared = _prepared(local, counts, mesh)
    if events.subscribers:
        prepared.emit(0.0)
    work = prepared.communicator.issue(prepared.run, prepared.transfer.description, (prepared.source,))
    return prepared.result, work


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
