"""Collectives by torch.distributed's functions, on a process group of any backend.

Where torch.distributed works in place only (all_reduce, broadcast, reduce), out of place is a copy and that. Gloo has
no all-gather or reduce-scatter of uneven parts: on it both are collectives of parts that are padded to the longest, as
users write them. All-gather is so for "tritondt" on the CPU too. NCCL takes uneven parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from tritondt.cli.bench.collective.sides import Call, NotOfferedError, Run

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# torch 2.13's names, and those of before, which warn there.
_all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def bind(call: Call) -> Run:
    """The function that runs a call on its group."""
    return _BINDS[call.case.kind.name](call)


def issue(call: Call) -> Callable[[], object]:
    """Starts a call out of place, and returns what waits for it; NotOfferedError for one with uneven parts."""
    if call.case.kind.name not in _ISSUES:
        raise NotOfferedError(f"{call.case.kind.name} is not issued by itself here")
    return cast("Callable[[], object]", _ISSUES[call.case.kind.name](call).wait)


# Calls of which torch.distributed makes one operation.
_ISSUES: dict[str, Callable[[Call], Any]] = {
    "all_reduce": lambda call: dist.all_reduce(call.out.copy_(call.x), _OPS[call.case.redop], call.group, True),
    "all_gather": lambda call: _all_gather_single(call.out, call.x, call.group, async_op=True),
    "reduce_scatter": lambda call: _reduce_scatter_single(
        call.out, call.x, _OPS[call.case.redop], call.group, async_op=True
    ),
    "all_to_all": lambda call: dist.all_to_all_single(call.out, call.x, group=call.group, async_op=True),
    "broadcast": lambda call: dist.broadcast(
        call.out.copy_(call.x) if call.rank == call.case.root else call.out,
        group=call.group,
        group_src=call.case.root,
        async_op=True,
    ),
    "reduce": lambda call: dist.reduce(
        call.out.copy_(call.x),
        op=_OPS[call.case.redop],
        group=call.group,
        group_dst=call.case.root,
        async_op=True,
    ),
}


def _copied_first(call: Call, run_in_place: Callable[[torch.Tensor], object]) -> Run:
    x, out = call.x, call.out

    def run() -> None:
        run_in_place(out.copy_(x))

    def run_where_it_is() -> None:
        run_in_place(x)

    return run_where_it_is if call.in_place else run


def _all_reduce(call: Call) -> Run:
    op, group = _OPS[call.case.redop], call.group
    return _copied_first(call, lambda buffer: dist.all_reduce(buffer, op, group))


def _reduce(call: Call) -> Run:
    op, group, root = _OPS[call.case.redop], call.group, call.case.root
    return _copied_first(call, lambda buffer: dist.reduce(buffer, op=op, group=group, group_dst=root))


def _broadcast(call: Call) -> Run:
    group, root, x, out = call.group, call.case.root, call.x, call.out
    if call.in_place or call.rank != root:
        return lambda: dist.broadcast(out, group=group, group_src=root) and None
    return lambda: dist.broadcast(out.copy_(x), group=group, group_src=root) and None


def _all_gather(call: Call) -> Run:
    return lambda: _all_gather_single(call.out, call.x, call.group) and None


def _reduce_scatter(call: Call) -> Run:
    op = _OPS[call.case.redop]
    return lambda: _reduce_scatter_single(call.out, call.x, op, call.group) and None


def _all_to_all(call: Call) -> Run:
    return lambda: dist.all_to_all_single(call.out, call.x, group=call.group) and None


def _all_to_all_v(call: Call) -> Run:
    sends, receives = list(call.case.sends(call.rank)), list(call.case.receives(call.rank))
    return lambda: dist.all_to_all_single(call.out, call.x, receives, sends, call.group) and None


def _all_gather_v(call: Call) -> Run:
    parts = call.case.parts()
    if call.x.device.type == "cpu" and len(set(parts)) > 1:
        return _padded_all_gather(call, parts)
    outs = list(call.out.split(parts))
    return lambda: dist.all_gather(outs, call.x, call.group) and None


def _padded_all_gather(call: Call, parts: Sequence[int]) -> Run:
    longest, own = max(parts), parts[call.rank]
    padded, gathered = call.x.new_zeros(longest), call.x.new_empty(longest * len(parts))

    def run() -> None:
        padded[:own].copy_(call.x)
        _all_gather_single(gathered, padded, call.group)
        torch.cat([piece[:part] for piece, part in zip(gathered.split(longest), parts, strict=True)], out=call.out)

    return run


def _reduce_scatter_v(call: Call) -> Run:
    parts, op = call.case.parts(), _OPS[call.case.redop]
    if dist.get_backend(call.group) == "gloo" and len(set(parts)) > 1:
        return _padded_reduce_scatter(call, parts)
    pieces = list(call.x.split(parts))
    return lambda: dist.reduce_scatter(call.out, pieces, op, call.group) and None


def _padded_reduce_scatter(call: Call, parts: Sequence[int]) -> Run:
    longest, op = max(parts), _OPS[call.case.redop]
    padded, own = call.x.new_zeros(longest * len(parts)), call.x.new_empty(longest)
    slots = [slot[:part] for slot, part in zip(padded.split(longest), parts, strict=True)]
    pieces = call.x.split(parts)

    def run() -> None:
        for slot, piece in zip(slots, pieces, strict=True):
            slot.copy_(piece)
        _reduce_scatter_single(own, padded, op, call.group)
        call.out.copy_(own[: parts[call.rank]])

    return run


def _gather(call: Call) -> Run:
    root, group, x = call.case.root, call.group, call.x
    outs = list(call.out.split(call.case.parts())) if call.rank == root else None
    return lambda: dist.gather(x, outs, group=group, group_dst=root) and None


def _scatter(call: Call) -> Run:
    root, group, out = call.case.root, call.group, call.out
    pieces = list(call.x.split(call.case.parts())) if call.rank == root else None
    return lambda: dist.scatter(out, pieces, group=group, group_src=root) and None


def _sendrecv(call: Call) -> Run:
    num_ranks, group = call.case.num_ranks, call.group
    after, before = (call.rank + 1) % num_ranks, (call.rank - 1) % num_ranks

    def run() -> None:
        sent = dist.P2POp(dist.isend, call.x, group=group, group_peer=after)
        received = dist.P2POp(dist.irecv, call.out, group=group, group_peer=before)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return run


_BINDS: dict[str, Callable[[Call], Run]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_v": _all_gather_v,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_v": _reduce_scatter_v,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "sendrecv": _sendrecv,
}
