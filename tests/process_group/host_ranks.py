"""The program of a test on two hosts: ranks of the backend, forked once torch is imported, run what is named.

COUNT ranks on each host; each writes one line of JSON with its number, and what it has found.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.two_hosts import ADDRESSES
from tests.process_group import random_collectives


def random(count: int) -> str:
    """Random collectives on all ranks, and on a group that lies across the hosts in an order of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    random_collectives.run(dist.group.WORLD, 5, 12)
    across = [0, size - 1, size // 2]
    group: Any = dist.new_group(sorted(across))
    if rank in across:
        random_collectives.run(group, 6, 12)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": place} for place in range(size)]
    dist.barrier()
    return type(dist.group.WORLD._router._cpu_group._communicator).__name__  # type: ignore[attr-defined]


def same_bits(count: int) -> str:
    """A digest of a sum of terms that any order gives other bits."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    term = torch.randn(300_007, generator=generator) * 10.0 ** torch.randint(-6, 6, (300_007,), generator=generator)
    dist.all_reduce(term)
    return str(int(term.view(torch.int32).to(torch.int64).mul(torch.arange(300_007)).sum()))


def lose(how: int) -> str:
    """The error where the last rank is killed or stops, or is late."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.all_reduce(torch.ones(1))
    dist.send(torch.ones(1), 0) if rank == last else None
    if rank == 0:
        dist.recv(torch.ones(1), last)
    if rank == last and how in (signal.SIGKILL, signal.SIGSTOP):
        os.kill(os.getpid(), how)
    if rank == last:
        time.sleep(40)
        os._exit(0)
    began = time.monotonic()
    dist.group.WORLD.set_timeout(timedelta(seconds=8))  # type: ignore[union-attr]
    try:
        dist.all_reduce(torch.ones(50_000))
    except T.PeerError as error:
        assert time.monotonic() - began < 60
        return str(error)
    return "no error"


BODIES: dict[str, Callable[[int], str]] = {"random": random, "same_bits": same_bits, "lose": lose}


def run(name: str, number: int) -> None:
    """One rank."""
    dist.init_process_group("tritondt", timeout=timedelta(seconds=90))
    found = BODIES[name](number)
    os.write(1, (json.dumps({"rank": dist.get_rank(), "found": found}) + "\n").encode())
    if name == "lose":
        os._exit(0)
    T.close()
    dist.destroy_process_group()


def main() -> None:
    """All ranks of this host."""
    name, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    host = int(os.environ["HOST_NUMBER"])
    os.environ.update(
        WORLD_SIZE=str(2 * count), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29501", LOCAL_WORLD_SIZE=str(count)
    )
    children = []
    for place in range(count):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(host * count + place)
            try:
                run(name, number)
            except BaseException:  # noqa: BLE001  its parent sees how it ends
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    is_lost = name == "lose" and host == 1
    waited = children[:-1] if is_lost else children
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in waited]
    if is_lost:
        time.sleep(1)
        os.kill(children[-1], signal.SIGKILL)
    sys.exit(max(statuses))


if __name__ == "__main__":
    main()
