"""Host time until asynchronous calls return, in bursts of 1 and 10, and by parts of the library; on a GPU.

    python -m benchmarks.nccl.host_bursts [--ranks 1|2] [--rounds N] [--double] [--json FILE]

A redistribution from Shard(0) to Shard(1), and an all_reduce of our backend and of torch. Time of the device is left
out: it has nothing to do when a burst begins, and is waited for behind it. Two ranks share the one GPU, which takes
nothing from the host. The last line tells the medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tritondt as T
from benchmarks.nccl.host_overhead.breakdown import breakdown_of
from benchmarks.nccl.sides import meet, torchs_group
from tests.nccl.devices import device_of, start, why_not
from tritondt.cli.surroundings import surroundings
from tritondt.comm.nccl.streams import CudaStreams

_BURSTS = (1, 10)
_LENGTH, _SIDE = 256, 64
_MOST_WARM_UP = 20
_TIMEOUT_S = 80.0


def bursts(rank: int, where: str, rounds: int) -> dict[str, Any]:
    """Microseconds of a call, by its name and the length of a burst, and those of the redistribution's parts."""
    device = device_of(where)
    mesh = T.Mesh((dist.get_world_size(),), device_type=device.kind)
    whole = torch.arange(float(_SIDE * _SIDE), device=device.kind).view(_SIDE, _SIDE)
    source: Any = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    tensor = torch.zeros(_LENGTH, device=device.kind)
    groups: dict[str, Any] = {"tritondt": dist.group.WORLD, "torch": torchs_group(where)}
    calls: dict[str, Callable[[], Any]] = {
        f"all_reduce of {name}": (lambda group=group: dist.all_reduce(tensor, group=group, async_op=True))
        for name, group in groups.items()
    }
    calls["redistribution"] = lambda: source.redistribute(placements=[T.Shard(1)], async_op=True)
    found = {
        name: {str(length): _us(call, length, rounds, device.synchronize) for length in _BURSTS}
        for name, call in calls.items()
    }
    return {"us": found, "parts_us": breakdown_of(calls["redistribution"], 2 * rounds, CudaStreams)}


def _us(call: Callable[[], Any], length: int, rounds: int, synchronize: Callable[[], None]) -> float:
    """Median microseconds of a call in bursts of so many, until the last returns."""
    times = []
    for number in range(-min(_MOST_WARM_UP, rounds), rounds):
        synchronize()
        meet()
        started = time.perf_counter()
        works = [call() for _ in range(length)]
        seconds = time.perf_counter() - started
        for work in works:
            work.wait()
        if number >= 0:
            times.append(seconds / length * 1e6)
    synchronize()
    return statistics.median(times)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nccl.host_bursts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--double", action="store_true", help="over the test double on the host: that it runs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    where = "host" if given.double else "gpu"
    reason = why_not(where, given.ranks)
    if reason is not None:
        sys.stderr.write(f"Error: {reason}\n")
        return 1
    # A rank imports it by the name of its module, which is not that of what is run.
    on_rank = importlib.import_module("benchmarks.nccl.host_bursts").bursts
    with start(where, given.ranks) as started:
        found = started.run(on_rank, where, given.rounds, timeout_s=_TIMEOUT_S)[0]
    for part, spent_us in found["parts_us"].items():
        sys.stdout.write(f"  {part}: {spent_us:.1f} us\n")
    told = (
        f"{name} " + " and ".join(f"{us:.1f}" for us in by_length.values()) for name, by_length in found["us"].items()
    )
    sys.stdout.write(f"host us a call in bursts of 1 and 10: {'; '.join(told)}\n")
    if given.json is not None:
        result = {
            "benchmark": "nccl_host_bursts",
            **surroundings(),
            "ranks": given.ranks,
            "rounds": given.rounds,
            **found,
        }
        given.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
