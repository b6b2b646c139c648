"""An all-reduce of one's own, a ring of messages between neighbours, for `bench all_reduce --impl own_collective:bind`.

torchrun --nproc-per-node 2 examples/own_collective.py
PYTHONPATH=examples python -m tritondt bench all_reduce -b 4M --impl own_collective:bind,gloo
"""

import torch
import torch.distributed as dist

from tritondt.cli.bench.collective.sides import Call, NotOfferedError, Run


def ring_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Adds up `x` over the ranks of a group, in place: each rank talks to its neighbours only."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = list(x.tensor_split(size))
    arriving = torch.empty_like(parts[0])  # the longest

    def pass_on(sent: int, received: torch.Tensor) -> None:
        works = [
            dist.isend(parts[sent % size], group_dst=(rank + 1) % size, group=group),
            dist.irecv(received, group_src=(rank - 1) % size, group=group),
        ]
        for work in works:
            work.wait()

    for step in range(size - 1):  # every part is added up on its way round
        own = parts[(rank - step - 1) % size]
        pass_on(rank - step, arriving[: len(own)])
        own += arriving[: len(own)]
    for step in range(size - 1):  # and the sums go round once more
        pass_on(rank + 1 - step, parts[(rank - step) % size])


def bind(call: Call) -> Run:
    """Returns the function to time for a call; refuses all but sums over all ranks."""
    if (call.case.kind.name, call.case.redop) != ("all_reduce", "sum"):
        raise NotOfferedError("the ring adds up for an all_reduce, and does nothing else")

    def run() -> None:
        if not call.in_place:
            call.out.copy_(call.x)
        ring_all_reduce(call.out, call.group)

    return run


if __name__ == "__main__":
    dist.init_process_group("gloo")
    x = torch.arange(7.0) + dist.get_rank()
    expected = x.clone()
    dist.all_reduce(expected)
    ring_all_reduce(x, dist.group.WORLD)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    print("the ring gives", x.tolist())
    dist.destroy_process_group()
