"""Calls of torch.distributed by name: each takes a group and returns what this rank then holds.

Values are whole numbers that every order of adding gives alike.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

Case = Callable[[Any, int, int], list[torch.Tensor]]
CASES: dict[str, Case] = {}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


def own(rank: int, length: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank brings: 1, 2, 3... times its number plus one."""
    return (torch.arange(1, length + 1) * (rank + 1)).to(dtype)


@case
def all_reduce_of_every_dtype(group, rank, size):
    tensors = [own(rank, 5, dtype) for dtype in DTYPES]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


@case
def all_reduce_by_every_op(group, rank, size):
    kinds = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    tensors = [own(rank) * 4 for _ in kinds]
    for kind, tensor in zip(kinds, tensors, strict=True):
        dist.all_reduce(tensor, op=kind, group=group)
    return tensors


@case
def all_reduce_of_complex(group, rank, size):
    tensor = torch.complex(own(rank), -own(rank))
    dist.all_reduce(tensor, group=group)
    return [tensor]


@case
def all_reduce_of_dims_in_another_order(group, rank, size):
    tensor = own(rank, 24).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    dist.broadcast(tensor, group=group, group_src=size - 1)
    return [tensor.contiguous()]


@case
def broadcast_from_every_rank(group, rank, size):
    tensors = [own(rank) for _ in range(size)] + [own(rank) > 5]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, group=group, group_src=root % size)
    return tensors


@case
def reduce_to_every_rank(group, rank, size):
    tensors = [own(rank) for _ in range(size)]
    for root, tensor in enumerate(tensors):
        dist.reduce(tensor, group=group, group_dst=root)
    return [tensors[rank]]


@case
def all_gather_lists(group, rank, size):
    outputs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(outputs, own(rank).reshape(2, 3), group=group)
    views = list(torch.empty(size, 6, dtype=torch.bool).unbind())
    dist.all_gather(views, own(rank) > 3, group=group)
    return outputs + views


@case
def all_gather_into_one(group, rank, size):
    outputs = [torch.empty(size * 6), torch.empty(size * 6, dtype=torch.bool)]
    dist.all_gather_into_tensor(outputs[0], own(rank), group=group)
    dist.all_gather_into_tensor(outputs[1], own(rank) > 3, group=group)
    return outputs


@case
def all_gather_coalesced(group, rank, size):
    outputs = [torch.empty(size * 6), torch.empty(size * 3)]
    with dist._coalescing_manager(group):
        dist.all_gather_into_tensor(outputs[0], own(rank), group=group)
        dist.all_gather_into_tensor(outputs[1], own(rank, 3), group=group)
    return outputs


@case
def all_reduce_coalesced(group, rank, size):
    tensors = [own(rank), own(rank, 3)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return tensors


@case
def reduce_scatter_lists(group, rank, size):
    output = torch.empty(6)
    dist.reduce_scatter(output, [own(rank) + place for place in range(size)], group=group)
    return [output]


@case
def reduce_scatter_one(group, rank, size):
    outputs = [torch.empty(3), torch.empty(3)]
    dist.reduce_scatter_tensor(outputs[0], own(rank, 3 * size), group=group)
    dist.reduce_scatter_tensor(outputs[1], own(rank, 3 * size), op=dist.ReduceOp.MAX, group=group)
    return outputs


@case
def reduce_scatter_coalesced(group, rank, size):
    outputs = [torch.empty(3), torch.empty(2)]
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(outputs[0], own(rank, 3 * size), group=group)
        dist.reduce_scatter_tensor(outputs[1], own(rank, 2 * size), group=group)
    return outputs


@case
def all_to_all_single_even(group, rank, size):
    output = torch.empty(size * 2, 3)
    dist.all_to_all_single(output, own(rank, size * 6).reshape(size * 2, 3), group=group)
    return [output]


@case
def all_to_all_single_uneven(group, rank, size):
    sends = [(rank + target) % 3 for target in range(size)]
    receives = [(source + rank) % 3 for source in range(size)]
    output = torch.empty(sum(receives), 2, dtype=torch.int64)
    given = own(rank, sum(sends) * 2, torch.int64).reshape(-1, 2)
    dist.all_to_all_single(output, given, receives, sends, group=group)
    return [output]


@case
def gather_to_every_rank(group, rank, size):
    found = []
    for root in range(size):
        outputs = [torch.empty(6) for _ in range(size)] if rank == root else None
        dist.gather(own(rank), outputs, group=group, group_dst=root)
        found += outputs or []
    return found


@case
def scatter_from_every_rank(group, rank, size):
    found = []
    for root in range(size):
        found.append(torch.empty(6))
        given = [own(rank) + place for place in range(size)] if rank == root else None
        dist.scatter(found[-1], given, group=group, group_src=root)
    return found


@case
def messages_in_order(group, rank, size):
    found = []
    for number in range(3):
        if rank == 0:
            dist.send(own(number), group=group, group_dst=1)
        elif rank == 1:
            found.append(torch.empty(6))
            dist.recv(found[-1], group=group, group_src=0)
    return found


@case
def messages_around_a_ring(group, rank, size):
    """All send first: whoever waits for a send with nobody receiving waits for ever."""
    found = torch.empty(1 << 16)
    sent: Any = dist.isend(own(rank, 1 << 16), group=group, group_dst=(rank + 1) % size)
    received: Any = dist.irecv(found, group=group, group_src=(rank - 1) % size)
    sent.wait()
    received.wait()
    return [found]


@case
def messages_in_a_batch(group, rank, size):
    found = [torch.empty(3) for _ in range(size)]
    peers = [peer for peer in range(size) if peer != rank]
    ops = [dist.P2POp(dist.isend, own(rank, 3) + peer, group=group, group_peer=peer) for peer in peers]
    ops += [dist.P2POp(dist.irecv, found[peer], group=group, group_peer=peer) for peer in reversed(peers)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [found[peer] for peer in peers]


@case
def objects(group, rank, size):
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    told = [rank, "x"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(told, group=group, group_src=size - 1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"to {place}" for place in range(size)], group=group, group_src=0)
    collected: Any = [None] * size if rank == size - 1 else None
    dist.gather_object({"from": rank}, collected, group=group, group_dst=size - 1)
    assert collected == ([{"from": place} for place in range(size)] if rank == size - 1 else None)
    if size > 1 and rank == 0:
        dist.send_object_list(["a", 1], group=group, group_dst=1)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, group=group, group_src=0)
        assert received == ["a", 1]
    assert (gathered, told) == ([{"rank": place} for place in range(size)], [size - 1, "x"])
    assert scattered == [f"to {rank}"]
    return []


@case
def barriers(group, rank, size):
    dist.barrier(group=group)
    dist.barrier(group=group, async_op=True).wait(timedelta(seconds=30))
    return []


@case
def functional_collectives(group, rank, size):
    """Through C++, as torch's DTensor and compiled code call them."""
    x = own(rank, 2 * size).reshape(size, 2)
    found = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.broadcast(x, size - 1, group),
        functional.all_to_all_single(x, None, None, group),
        *functional.all_reduce_coalesced([x, x * 2], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, x * 2], group),
        *functional.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(tensor) for tensor in found]


@case
def empty_tensors(group, rank, size):
    tensor, outputs = torch.empty(0), [torch.empty(0) for _ in range(size)]
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, group=group, group_src=0)
    dist.all_gather(outputs, tensor, group=group)
    return [tensor, *outputs]
