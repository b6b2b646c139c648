"""Collectives by torch.distributed's functions, on a process group of any backend.

Where torch.distributed works in place only (all_reduce, broadcast, reduce), out of place is a copy and that. Gloo has
no all-gather or reduce-scatter of uneven parts: on it both are collectives of parts that are padded to the longest, as
users write them. All-gather is so for "tritondt" on the CPU too. NCCL takes uneven parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

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
    name, parts = call.case.kind.name, call.case.parts()
    if name == "sendrecv":
        return _sendrecv(call)
    if len(set(parts)) > 1 and name == "all_gather_v" and call.x.device.type == "cpu":
        return _padded_all_gather(call, parts)
    if len(set(parts)) > 1 and name == "reduce_scatter_v" and dist.get_backend(call.group) == "gloo":
        return _padded_reduce_scatter(call, parts)
    run, copies = _operation(call)

    def run_on_copy() -> None:
        call.out.copy_(call.x)
        run()

    return run_on_copy if copies else lambda: run() and None


def issue(call: Call) -> Callable[[], object]:
    """Starts a call out of place, and returns what waits for it; NotOfferedError for one with uneven parts."""
    if call.case.kind.name not in _ISSUED:
        raise NotOfferedError(f"{call.case.kind.name} is not issued by itself here")
    run, copies = _operation(call)
    if copies:
        call.out.copy_(call.x)
    wait: Callable[[], object] = run(async_op=True).wait
    return wait


# Calls of even parts of which torch.distributed makes one operation.
_ISSUED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")


def _operation(call: Call) -> tuple[Callable[..., Any], bool]:
    """The function of torch.distributed that makes a call, bound to all but async_op.

    It works in place on a copy of the input where the second value says so.
    """
    case, x, out, group = call.case, call.x, call.out, call.group
    op, root, is_root, name = _OPS.get(case.redop), case.root, call.rank == case.root, case.kind.name
    buffer = x if call.in_place else out

    def pieces(whole: torch.Tensor, is_needed: bool = True) -> list[torch.Tensor] | None:
        return list(whole.split(case.parts())) if is_needed else None

    operations: Mapping[str, Callable[[], Callable[..., Any]]] = {
        "all_reduce": lambda: partial(dist.all_reduce, buffer, op, group),
        "reduce": lambda: partial(dist.reduce, buffer, op=op, group=group, group_dst=root),
        "broadcast": lambda: partial(dist.broadcast, out, group=group, group_src=root),
        "all_gather": lambda: partial(_all_gather_single, out, x, group),
        "all_gather_v": lambda: partial(dist.all_gather, pieces(out), x, group),
        "reduce_scatter": lambda: partial(_reduce_scatter_single, out, x, op, group),
        "reduce_scatter_v": lambda: partial(dist.reduce_scatter, out, pieces(x), op, group),
        "all_to_all": lambda: partial(dist.all_to_all_single, out, x, group=group),
        "all_to_all_v": lambda: partial(
            dist.all_to_all_single, out, x, list(case.receives(call.rank)), list(case.sends(call.rank)), group
        ),
        "gather": lambda: partial(dist.gather, x, pieces(out, is_root), group=group, group_dst=root),
        "scatter": lambda: partial(dist.scatter, out, pieces(x, is_root), group=group, group_src=root),
    }
    copies = name in ("all_reduce", "reduce") or (name == "broadcast" and is_root)
    return operations[name](), copies and not call.in_place


def _padded_all_gather(call: Call, parts: Sequence[int]) -> Run:
    longest, own = max(parts), parts[call.rank]
    padded, gathered = call.x.new_zeros(longest), call.x.new_empty(longest * len(parts))

    def run() -> None:
        padded[:own].copy_(call.x)
        _all_gather_single(gathered, padded, call.group)
        torch.cat([piece[:part] for piece, part in zip(gathered.split(longest), parts, strict=True)], out=call.out)

    return run


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


def _sendrecv(call: Call) -> Run:
    num_ranks, group = call.case.num_ranks, call.group
    after, before = (call.rank + 1) % num_ranks, (call.rank - 1) % num_ranks

    def run() -> None:
        sent = dist.P2POp(dist.isend, call.x, group=group, group_peer=after)
        received = dist.P2POp(dist.irecv, call.out, group=group, group_peer=before)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return run
