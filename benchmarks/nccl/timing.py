"""Times the sides of a case in turns, in a rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.nccl import sides
from benchmarks.nccl.sides import Sides, meet
from tests.nccl.devices import device_of
from tests.nccl.libraries import check_shared

_WARM_UP_ROUNDS = 3


class Job(NamedTuple):
    """One timing on every rank: a function of `sides` and its arguments, `calls` at a time."""

    kind: str
    case: str
    make: str
    arguments: tuple[object, ...]
    calls: int


def seconds_in_turns(
    given: Sides, rounds: int, calls: int, synchronize: Callable[[], None], *, to_the_end: bool
) -> dict[str, list[float]]:
    """Seconds of a call in every round; `to_the_end`, until all has run, else until the calls have returned.

    The results of the calls are dropped when the clock has stopped.
    """
    names = list(given)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            run = given[name]
            synchronize()
            meet()
            start = time.perf_counter()
            results = [run() for _ in range(calls)]
            if to_the_end:
                synchronize()
            seconds = time.perf_counter() - start
            synchronize()
            del results
            if number >= 0:
                found[name].append(seconds / calls)
    return found


def timed(rank: int, where: str, job: Job, rounds: int) -> dict[str, list[float]]:
    """This rank's seconds of a job, by side."""
    synchronize = device_of(where).synchronize
    made = getattr(sides, job.make)(rank, where, *job.arguments)
    gc.disable()
    try:
        with torch.no_grad():
            return seconds_in_turns(
                made, rounds, job.calls, synchronize, to_the_end=job.kind not in ("host", "overhead")
            )
    finally:
        gc.enable()


def jobs(num_ranks: int, sizes: list[int]) -> list[Job]:
    """All timings of a run; two ranks on one GPU take turns, so that each call is long."""
    found = []
    for name in sides.COLLECTIVES:
        for size in sizes:
            calls = 2 if num_ranks > 1 else 20 if size < 1 << 24 else 5
            found.append(Job("time", f"{name} of {size} bytes", "collective", (name, size), calls))
        if num_ranks == 1:
            found.append(Job("host", f"{name} of {sizes[0]} bytes", "collective", (name, sizes[0]), 50))
    if num_ranks == 1:
        return found
    for pair in (("S1", "S0"), ("P", "S1")):
        for shape in ((1023, 1025), (4095, 4097)):
            case = f"{pair[0]} -> {pair[1]} of {shape[0]} x {shape[1]}"
            found.append(Job("redistribution", case, "redistribution", (shape, *pair), 1))
    for shape in ((64, 96), (1023, 1025)):
        case = f"in slots: S1 -> S0 of {shape[0]} x {shape[1]}"
        found.append(Job("slots", case, "slots", (shape, "S1", "S0"), 5))
    return [*found, Job("overhead", "S0 -> S1 of 512 x 512, async", "issued", (512,), 10)]


def library(rank: int, where: str) -> dict[str, str]:
    """Which NCCL and device were used; refuses where torch and we do not share one library."""
    ours = device_of(where).library
    found = {"nccl": ours.version, "nccl_path": ours.path}
    if where == "host":
        return {**found, "device": "the host, over the test double"}
    check_shared(ours)
    return {**found, "device": torch.cuda.get_device_name()}
