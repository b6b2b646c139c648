"""Collectives as exchanges of boxes between ranks that read each other's memory.

What reduces is planned as a redistribution of a flat tensor is: Partial to Replicate, in one exchange or in pieces that
are gathered, and Partial to Shard. What moves only moves bytes, of any dtype.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from tritondt.comm.communicator import Communicator, Reduction, Transfer
from tritondt.planning.cost import CostTable
from tritondt.planning.exchange import Exchange, Message, Part, renumber_peers
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.plan import Step
from tritondt.planning.planner import make_plan
from tritondt.planning.storage import Block, step_blocks
from tritondt.process_group.naming import op_name
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Replicate, Shard

Tensors = Sequence[torch.Tensor]

# Of other dtypes and reductions (bitwise ones, a mean of integers, complex numbers, bool) Gloo decides.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OPS = ("sum", "product", "min", "max")


class Members(NamedTuple):
    """The ranks of a group, in its order, of which this one is number `own`, and the prices that they share."""

    ranks: tuple[int, ...]
    own: int
    costs: CostTable


def reduces(dtype: torch.dtype, op: Any) -> bool:
    """Whether elements of a dtype are reduced here by torch's `op`."""
    name = op_name(op)
    return (name in _OPS and dtype in (*_INTEGERS, *_FLOATS)) or (name == "avg" and dtype in _FLOATS)


def flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements of a tensor without gaps in the order of memory; None of another one."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.view(-1) if tensor.is_contiguous() else None


def all_reduce_transfers(members: Members, numel: int, dtype: torch.dtype, op: Any, text: str) -> tuple[Transfer, ...]:
    """One exchange, or two: terms in pieces, and what they make."""
    return _planned(members, (Partial(op_name(op)), Replicate()), numel, dtype, text)  # type: ignore[arg-type]


def all_reduce(communicator: Communicator, transfers: Sequence[Transfer], tensor: torch.Tensor) -> None:
    """Reduces a flat tensor in place, to the same bits on all ranks."""
    first, *rest = transfers
    # Not into the tensor itself, whose terms are read until the end.
    reduced = torch.empty(_numel(first.target_blocks[0]), dtype=tensor.dtype)
    communicator.exchange([tensor], [reduced], first)
    if rest:
        communicator.exchange([reduced], [tensor], rest[0])
    else:
        tensor.copy_(reduced)


def reduce_scatter_transfers(
    members: Members, numel: int, dtype: torch.dtype, op: Any, text: str
) -> tuple[Transfer, ...]:
    """The exchange by which each rank reduces its part of `numel` elements."""
    return _planned(members, (Partial(op_name(op)), Shard(0)), numel, dtype, text)  # type: ignore[arg-type]


def all_gather_transfer(members: Members, num_bytes: Sequence[int], text: str) -> Transfer:
    """The exchange of one tensor of each rank, by the rank's number, of so many bytes."""
    own = members.own
    others = [rank for rank in range(len(members.ranks)) if rank != own and num_bytes[rank]]
    peers = [rank for rank in range(len(members.ranks)) if rank != own and num_bytes[own]]
    parts = [Part((((0, count),),), 0, number) for number, count in enumerate(num_bytes)]
    exchange = Exchange(
        tuple(Message(rank, (parts[own],)) for rank in peers),
        tuple(Message(rank, (parts[rank],)) for rank in others),
        (parts[own],) if num_bytes[own] else (),
        (1,) * len(parts),
    )
    return _of_bytes(members, exchange, num_bytes, text)


def broadcast_transfer(members: Members, num_bytes: int, root: int, text: str) -> Transfer:
    """The exchange by which all have a tensor of the root."""
    part, ranks = Part((((0, num_bytes),),)), range(len(members.ranks))
    is_root = members.own == root
    sends = tuple(Message(rank, (part,)) for rank in ranks if rank != root) if is_root else ()
    return _of_bytes(members, Exchange(sends, () if is_root else (Message(root, (part,)),), ()), [num_bytes], text)


def _planned(
    members: Members, placements: tuple[Any, Any], numel: int, dtype: torch.dtype, text: str
) -> tuple[Transfer, ...]:
    size = len(members.ranks)
    source, target = (Layout((size,), (placement,), (numel,)) for placement in placements)
    steps = make_plan(source, target, dtype.itemsize, members.costs).steps
    return tuple(
        _step_transfer(members, step, f"step {number} of {len(steps)} of {text}", dtype)
        for number, step in enumerate(steps, 1)
    )


def _step_transfer(members: Members, step: Step, text: str, dtype: torch.dtype) -> Transfer:
    coordinate = (members.own,)
    source_blocks, target_blocks = step_blocks(step, coordinate)
    return Transfer(
        exchange=renumber_peers(step.exchange(coordinate), members.ranks),
        source_blocks=(source_blocks,),
        target_blocks=(target_blocks,),
        dtypes=(dtype,),
        reductions=(None if step.reduce_op is None else Reduction(step.reduce_op, step.divisor),),
        fingerprint=exchange_fingerprint(f"{text} {members.ranks}"),
        description=text,
    )


def _of_bytes(members: Members, exchange: Exchange, num_bytes: Sequence[int], text: str) -> Transfer:
    blocks = tuple((Block((((0, count),),), (count,), 0, (1,)),) for count in num_bytes)
    return Transfer(
        exchange=renumber_peers(exchange, members.ranks),
        source_blocks=blocks,
        target_blocks=blocks,
        dtypes=(torch.uint8,) * len(blocks),
        reductions=(None,) * len(blocks),
        fingerprint=exchange_fingerprint(f"{text} {members.ranks}"),
        description=text,
    )


def _numel(blocks: Sequence[Block]) -> int:
    return sum(prod(block.lengths) for block in blocks)
