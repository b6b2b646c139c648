"""Tokens on the ranks of their experts: one all-to-all there and one back, of as many rows as each expert got."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import LocalTensorError, MeshError, check_not_of_torch
from tritondt.errors.arguments import check_types, checked
from tritondt.parallel.boundary import activation_spec
from tritondt.parallel.feature_cut import evenly
from tritondt.redistribution.refusals import refusing_comparison, refusing_next
from tritondt.redistribution.rows import RowCounts, RowsUnderWay, exchange_rows, issue_rows
from tritondt.redistribution.run import check_memory, redistribute_local
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Replicate, Shard

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class DispatchedTokens:
    """Tokens of this rank's experts, with the information for their way back.

    `tokens` are rows of all ranks sorted by expert, and for one expert by rank; `num_tokens_per_expert` has a count for
    each expert of this rank.
    """

    tokens: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    counts: RowCounts
    mesh: Mesh
    # Places of the sorted rows in the order in which they arrived, and the other way round; None where that is one.
    orders: tuple[torch.Tensor, torch.Tensor] | None


class TokensUnderWay(Generic[_Found]):
    """Tokens that travel while the caller computes; made with `async_op=True`. `wait` gives what was asked for.

    Any number of them may be in flight, and waits may come in any order. Computation between the call and `wait` also
    hides gradients in backward: they travel while autograd runs the backward of that computation.
    """

    def __init__(self, rows: RowsUnderWay, finish: Callable[[torch.Tensor], _Found]) -> None:
        self._rows, self._finish = rows, finish
        self._found: _Found | None = None

    def wait(self) -> _Found:
        """Returns the tokens once they have arrived; raises PeerError where they did not."""
        if self._found is None:
            self._found = self._finish(self._rows.wait())
        return self._found


@overload
def token_dispatch(
    tokens: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    device_mesh: "DeviceMesh | Mesh",
    *,
    sizes: Sequence[int] | None = ...,
    async_op: Literal[False] = ...,
) -> DispatchedTokens: ...
@overload
def token_dispatch(
    tokens: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    device_mesh: "DeviceMesh | Mesh",
    *,
    sizes: Sequence[int] | None = ...,
    async_op: Literal[True],
) -> TokensUnderWay[DispatchedTokens]: ...
@checked
def token_dispatch(
    tokens: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    device_mesh: "DeviceMesh | Mesh",
    *,
    sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> DispatchedTokens | TokensUnderWay[DispatchedTokens]:
    """Sends each rank the tokens of its experts, from plain `tokens` that every rank has sorted by expert.

    `tokens` is (tokens, ...). `num_tokens_per_expert` is (experts,), integers, for all experts of the mesh of one axis.
    Each rank has a run of experts: as many as `sizes` lists, or an even share, where the first ranks have one more if
    the experts do not divide. Ranks may have any number of tokens, and none. A collective call of all ranks of the
    mesh: one exchange of counts, and one of the tokens, with one message per pair of ranks. If a gradient is needed,
    all ranks must run backward, which is one exchange. With `async_op` the tokens travel while the caller continues,
    and `wait` of the result returns them. Raises LocalTensorError on all ranks alike for counts that are not those of
    the tokens, and MeshError.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def tokens_on(rank):
    ...     given, counts = torch.tensor([10.0, 20.0, 21.0]) + rank, torch.tensor([1, 2])
    ...     found = token_dispatch(given, counts, Mesh((2,)))
    ...     return found.tokens.tolist(), token_combine(-found.tokens, found).tolist()
    >>> run_ranks(2, tokens_on)
    [([10.0, 11.0], [-10.0, -20.0, -21.0]), ([20.0, 21.0, 21.0, 22.0], [-11.0, -21.0, -22.0])]
    """
    mesh = canonical_mesh(device_mesh)
    check_not_of_torch(tokens, "token_dispatch")
    if mesh.ndim != 1 or mesh.coordinate is None:
        raise MeshError(f"token_dispatch takes a mesh of one axis and is called on its ranks, got {mesh}")
    with refusing_comparison(mesh):
        given = {"tokens": tokens, "num_tokens_per_expert": num_tokens_per_expert, "sizes": sizes}
        check_types(token_dispatch, **given)
    table = _counts_of_all(tokens, num_tokens_per_expert, mesh)
    with refusing_next(mesh):
        sizes = _checked_sizes(sizes, table.shape[1], mesh.shape[0])
        check_memory(tokens, "token_dispatch")
    by_rank = torch.stack([part.sum(1) for part in table.split(list(sizes), 1)], 1)
    counts = RowCounts(tuple(map(tuple, by_rank.tolist())))
    first = sum(sizes[: mesh.coordinate[0]])
    own = table[:, first : first + sizes[mesh.coordinate[0]]]

    def sorted_by_expert(arrived: torch.Tensor) -> DispatchedTokens:
        orders = _orders(own, tokens.device)
        if orders is not None:
            arrived = _Reordered.apply(arrived, *orders)  # type: ignore[no-untyped-call]
        return DispatchedTokens(arrived, own.sum(0).to(num_tokens_per_expert), counts, mesh, orders)

    if async_op:
        return TokensUnderWay(issue_rows(tokens, counts, mesh), sorted_by_expert)
    return sorted_by_expert(exchange_rows(tokens, counts, mesh))


@overload
def token_combine(
    tokens: torch.Tensor, dispatched: DispatchedTokens, *, async_op: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def token_combine(
    tokens: torch.Tensor, dispatched: DispatchedTokens, *, async_op: Literal[True]
) -> TokensUnderWay[torch.Tensor]: ...
@checked
def token_combine(
    tokens: torch.Tensor, dispatched: DispatchedTokens, *, async_op: bool = False
) -> torch.Tensor | TokensUnderWay[torch.Tensor]:
    """Returns one row for each token that this rank passed to `token_dispatch`, in the same order.

    `tokens` has a row for each of `dispatched.tokens`. A collective call of all ranks of the mesh, with one exchange.
    If a gradient is needed, all ranks must run backward, which is another one. With `async_op` the rows travel while
    the caller continues, and `wait` of the result returns them. Raises LocalTensorError for another number of rows.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def body(rank):
    ...     found = token_dispatch(torch.ones(rank, 2), torch.tensor([0, rank]), Mesh((2,)))
    ...     under_way = token_combine(3 * found.tokens, found, async_op=True)
    ...     beside = torch.ones(2) * 2  # meanwhile
    ...     return under_way.wait().tolist()
    >>> run_ranks(2, body)
    [[], [[3.0, 3.0]]]
    """
    with refusing_next(dispatched.mesh):
        check_types(token_combine, tokens=tokens)
        check_memory(tokens, "token_combine")
        if not tokens.ndim or tokens.shape[0] != dispatched.tokens.shape[0]:
            raise LocalTensorError(
                f"token_combine got tokens of shape {tuple(tokens.shape)} on rank {dispatched.mesh.identity.rank}; "
                f"allowed is a row for each of the {dispatched.tokens.shape[0]} tokens that were dispatched to it"
            )
    if dispatched.orders is not None:
        tokens = _Reordered.apply(tokens, *dispatched.orders[::-1])  # type: ignore[no-untyped-call]
    back = dispatched.counts.back()
    if async_op:
        return TokensUnderWay(issue_rows(tokens, back, dispatched.mesh), _as_they_come)
    return exchange_rows(tokens, back, dispatched.mesh)


def _checked_sizes(sizes: Sequence[int] | None, num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Experts of each rank; LocalTensorError where they are no experts of all ranks."""
    found = evenly(num_experts, num_ranks) if sizes is None else tuple(sizes)
    if len(found) != num_ranks or sum(found) != num_experts or min(found) < 0:
        raise LocalTensorError(
            f"token_dispatch got sizes={found} for {num_experts} experts on {num_ranks} ranks; allowed is a number "
            "of experts for each rank, which sum to all"
        )
    return found


def _as_they_come(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _counts_of_all(tokens: torch.Tensor, counts: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Numbers of tokens (ranks, experts), on the CPU; LocalTensorError on all ranks where one's are not its tokens'."""
    # A count that cannot be sent goes as -1: the others are to hear of it, and raise the same.
    is_list = counts.ndim == 1 and not counts.is_floating_point() and not counts.is_complex()
    own = counts.detach().to(torch.int64) if is_list else counts.new_full((counts.numel(),), -1, dtype=torch.int64)
    num_rows = tokens.shape[0] if tokens.ndim else 0
    row = torch.cat([own, own.new_tensor([num_rows])]).unsqueeze(0)
    source, target = (
        activation_spec(mesh, placement, (mesh.shape[0], row.shape[1]), torch.int64)
        for placement in (Shard(0), Replicate())
    )
    table = redistribute_local(row, source, target).cpu()
    for rank, (*per_expert, rows) in zip(mesh.ranks, table.tolist(), strict=True):
        if sum(per_expert) != rows or min(per_expert, default=0) < 0:
            raise LocalTensorError(
                f"token_dispatch got counts {per_expert} for {rows} tokens on rank {rank}; allowed is a list of "
                "integers, how many of the tokens are for each expert"
            )
    return table[:, :-1]


def _orders(own: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Orders of rows that arrived by rank and are sorted by expert; `own` are the counts (ranks, own experts)."""
    if min(own.shape) < 2:
        return None
    starts = own.flatten().cumsum(0).view(own.shape) - own
    lengths = own.T.flatten()
    ends = lengths.cumsum(0)
    order = torch.repeat_interleave(starts.T.flatten() - ends + lengths, lengths) + torch.arange(int(ends[-1]))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return order.to(device), back.to(device)


class _Reordered(torch.autograd.Function):
    """Rows in another order; gradients are put back, where index_select would add them up in zeros."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        """Rows of the places in `order`; `back` is the inverse of `order`."""
        ctx.orders = back, order
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Gradients in the order of the rows."""
        return _Reordered.apply(grad, *ctx.orders), None, None  # type: ignore[no-untyped-call]
