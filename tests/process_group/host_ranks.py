"""The program of a test on several hosts: ranks of the backend, forked once torch is imported, run what is named.

COUNTS says how many ranks each host has ("3,5"); each writes one line of JSON with its number, and what it has found.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.pairs_on_hosts import sent_on_wire
from tests.harness.two_hosts import ADDRESSES
from tests.process_group import collectives, random_collectives


def random(seed: int) -> str:
    """Random collectives on all ranks, and on a group that lies across the hosts in an order of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    random_collectives.run(dist.group.WORLD, seed, 12)
    across = [0, size - 1, size // 2]
    group: Any = dist.new_group(sorted(across))
    if rank in across:
        random_collectives.run(group, seed + 1, 12)
    turned: Any = dist.new_group([size - 1, *range(size - 1)], sort_ranks=False)
    random_collectives.run(turned, seed + 2, 6)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": place} for place in range(size)]
    dist.barrier()
    return type(dist.group.WORLD._router._cpu_group._carrier.whole).__name__  # type: ignore[attr-defined]


def as_on_gloo(how: int) -> list[str]:
    """Names of every call that torch has, on all ranks and on some of both hosts; results are Gloo's, bit for bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    across = [0, size // 2, size - 1]
    for ranks in (list(range(size)), across):
        own: Any = dist.new_group(ranks)
        over_gloo: Any = dist.new_group(ranks, backend="gloo")
        for name, case in collectives.CASES.items() if rank in ranks else ():
            place = ranks.index(rank)
            found, expected = (case(group, place, len(ranks)) for group in (own, over_gloo))
            try:
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
            except AssertionError as error:
                raise AssertionError(f"{name} on rank {rank} of {ranks}") from error
    return list(collectives.CASES)


def means_of_halves() -> None:
    """Means of float16 whose sum over one host is infinite: what they are where all ranks share a host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.full((size * 20_011,), 59_904.0, dtype=torch.float16)
    part, expected = torch.empty(20_011, dtype=torch.float16), whole.clone()
    dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)
    assert torch.equal(part, expected[:20_011])
    dist.reduce(whole, size - 1, op=dist.ReduceOp.AVG)
    assert torch.equal(whole, expected)
    whole -= 64 * rank
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    mean = torch.tensor(sum(59_904.0 - 64 * each for each in range(size)) / size).half()
    assert bool((whole == mean).all())


def same_bits(how: int) -> str:
    """A digest of a sum of terms that any order gives other bits."""
    means_of_halves()
    generator = torch.Generator().manual_seed(dist.get_rank())
    term = torch.randn(300_007, generator=generator) * 10.0 ** torch.randint(-6, 6, (300_007,), generator=generator)
    dist.all_reduce(term)
    return str(int(term.view(torch.int32).to(torch.int64).mul(torch.arange(300_007)).sum()))


def refused(how: int) -> list[str]:
    """Errors where one rank alone asks for too short an output, and a sum that follows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = []
    for culprit in (size - 1, 0):
        lists = [torch.ones(40_000) for _ in range(size)]
        calls: list[Callable[[], Any]] = [
            partial(dist.all_reduce, torch.ones(300_000)),
            partial(dist.all_gather, lists, torch.ones(40_000)),
            partial(dist.reduce_scatter, torch.ones(40_000), lists),
        ]
        for number, call in enumerate(calls):
            try:
                if rank == culprit:
                    dist.all_gather_into_tensor(torch.ones(7), torch.ones(3))
                else:
                    call()
                told.append("no error")
            except T.TritondtError as error:
                told.append(f"{type(error).__name__}: {error}")
            total = torch.full((200_000,), float(rank + number))
            dist.all_reduce(total)
            assert bool((total == size * (size - 1) // 2 + size * number).all())
    return told


def refused_over_gloo(how: int) -> list[str]:
    """Errors where the last rank alone asks for too short an output, or is asked for one more thing then, over Gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    told = []
    for _ in range(2):
        try:
            dist.all_gather_into_tensor(torch.ones(3 * size - (rank == size - 1)), torch.ones(3))
            told.append("no error")
        except T.TritondtError as error:
            told.append(f"{type(error).__name__}: {error}")
    T.abort()
    total = torch.full((1000,), float(rank))
    dist.all_reduce(total)
    assert bool((total == size * (size - 1) // 2).all())
    return told


def disagree(how: int) -> list[str]:
    """The error where the last rank's tensor is longer, and the one of what follows; then a sum in a new world."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    told = []
    for length in (300_000 + (rank == last), 300_000):
        try:
            dist.all_reduce(torch.ones(length))
            told.append("no error")
        except T.TritondtError as error:
            told.append(f"{type(error).__name__}: {error}")
    T.abort()
    total = torch.ones(200_000)
    dist.all_reduce(total)
    assert bool((total == last + 1).all())
    return told


LENGTH = 1 << 18
CALLS: dict[str, Callable[[int, int], Any]] = {
    "all_gather": lambda rank, size: dist.all_gather(
        [torch.empty(LENGTH) for _ in range(size)], torch.full((LENGTH,), float(rank))
    ),
    "all_gather_into_tensor": lambda rank, size: dist.all_gather_into_tensor(
        torch.empty(size * LENGTH), torch.full((LENGTH,), float(rank))
    ),
    "reduce_scatter": lambda rank, size: dist.reduce_scatter(
        torch.empty(LENGTH), [torch.full((LENGTH,), float(rank)) for _ in range(size)]
    ),
    "reduce_scatter_tensor": lambda rank, size: dist.reduce_scatter_tensor(
        torch.empty(LENGTH), torch.full((size * LENGTH,), float(rank))
    ),
    "all_reduce": lambda rank, size: dist.all_reduce(torch.full((size * LENGTH,), float(rank))),
    "broadcast": lambda rank, size: dist.broadcast(torch.full((size * LENGTH,), float(rank)), 0),
    "reduce": lambda rank, size: dist.reduce(torch.full((size * LENGTH,), float(rank)), 0),
}


def on_wire(how: int) -> dict[str, int]:
    """Bytes that this host sends over the link in each collective; all ranks of a host know the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, call in CALLS.items():
        call(rank, size)
        dist.barrier()
        before = sent_on_wire()
        dist.barrier()
        call(rank, size)
        dist.barrier()
        after = sent_on_wire()
        dist.barrier()
        found[name] = after - before
    return found


BODIES: dict[str, Callable[[int], Any]] = {
    "random": random,
    "as_on_gloo": as_on_gloo,
    "same_bits": same_bits,
    "refused": refused,
    "refused_over_gloo": refused_over_gloo,
    "disagree": disagree,
    "on_wire": on_wire,
}


def run(name: str, number: int) -> None:
    """One rank."""
    dist.init_process_group("tritondt", timeout=timedelta(seconds=90))
    found = BODIES[name](number)
    os.write(1, (json.dumps({"rank": dist.get_rank(), "found": found}) + "\n").encode())
    T.close()
    dist.destroy_process_group()


def main() -> None:
    """All ranks of this host."""
    name, number, counts = sys.argv[1], int(sys.argv[2]), [int(count) for count in sys.argv[3].split(",")]
    host = int(os.environ["HOST_NUMBER"])
    os.environ.update(WORLD_SIZE=str(sum(counts)), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501")
    os.environ["LOCAL_WORLD_SIZE"] = str(counts[host])
    children = []
    for place in range(counts[host]):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(sum(counts[:host]) + place)
            torch.set_num_threads(1)
            try:
                run(name, number)
            except BaseException:  # noqa: BLE001  its parent sees how it ends
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, statuses)))


if __name__ == "__main__":
    main()
