"""Host time of an asynchronous redistribution over NCCL: all but NCCL, streams and kernels, which do nothing here.

    python -m benchmarks.nccl_host_overhead [--ranks N] [--rounds N] [--json [FILE]]

Everything else is there: dispatch, plan, allocation, packing and unpacking up to the launch, recorder, watch and queue.
The ranks are processes, of which the first is timed; nothing is moved, and so no result is checked. A round's time is
the mean of its calls'; medians and fastest rounds are told. `--profile` prints where the time of one case goes.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import tritondt as T
from benchmarks.no_op_nccl import build, carried_by_nothing
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings

_CASES = (("S0", "S1"), ("S0", "R"), ("S1", "S0"), ("P", "S0"), ("P", "R"))
_JUDGED = _CASES[:4]  # plans of one step; the last is one of two
_SHAPE = (63, 65)
_CALLS = 20
_MOST_US = 25.0
_TIMED = "nccl_host_overhead/timed"


class Times(NamedTuple):
    """Microseconds of a call until it returns, and until the wait for it has too; and the latter's fastest round."""

    issued_us: float
    waited_us: float
    fastest_us: float


def on_rank(send: Callable[[object], None], rounds: int, profiled: int | None) -> list[Times]:
    """The times of every case, of rank 0; the others are only there."""
    torch.set_num_threads(1)
    store: Any = dist.distributed_c10d._get_default_store()
    with carried_by_nothing():
        mesh = T.Mesh((dist.get_world_size(),))
        tensors = [T.zeros(_SHAPE, device_mesh=mesh, placements=T.parse_placements(text)) for text, _ in _CASES]
        for tensor, (_, target) in zip(tensors, _CASES, strict=True):
            tensor.redistribute(placements=T.parse_placements(target))  # makes the communicator
        found = []
        if dist.get_rank() == 0:
            for case, (tensor, (_, target)) in enumerate(zip(tensors, _CASES, strict=True)):
                placements = T.parse_placements(target)
                if profiled == case:
                    send(_profiled(tensor, placements))
                found.append(_times(tensor, placements, rounds))
            store.set(_TIMED, "")
        store.wait([_TIMED])  # asleep: whoever waits in Gloo takes part of a core from the one that is timed
    return found


def _times(tensor: Any, placements: Any, rounds: int) -> Times:
    issued, waited = [], []
    gc.collect()
    gc.disable()
    with torch.no_grad():
        for _ in range(rounds):
            started, waiting = time.perf_counter(), 0.0
            for _ in range(_CALLS):
                moved = tensor.redistribute(placements=placements, async_op=True)
                came_back = time.perf_counter()
                moved.wait()
                waiting += time.perf_counter() - came_back
            both = time.perf_counter() - started
            issued.append((both - waiting) / _CALLS * 1e6)
            waited.append(both / _CALLS * 1e6)
    gc.enable()
    return Times(statistics.median(issued[1:]), statistics.median(waited[1:]), min(waited))


def _profiled(tensor: Any, placements: Any) -> str:
    profile = cProfile.Profile()
    with torch.no_grad(), profile:
        for _ in range(150 * _CALLS):
            tensor.redistribute(placements=placements, async_op=True).wait()
    lines: list[str] = []
    stream: Any = type("Lines", (), {"write": lambda _, text: lines.append(text)})()
    pstats.Stats(profile, stream=stream).sort_stats("tottime").print_stats(45)
    return "".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--rounds", type=click.IntRange(min=3), default=400, help="Rounds of each case.")
@click.option("--profile", type=click.IntRange(0, len(_CASES) - 1), help="The case to profile, by its number.")
@json_option
def main(ranks: int, rounds: int, profile: int | None, json_to: str | None) -> None:
    """Time asynchronous redistributions over an NCCL that does nothing."""
    console = Console(stderr=is_printed(json_to))
    build()  # once, before the ranks look for it
    times: Any = run_on_ranks(ranks, on_rank, rounds, profile, on_message=print)[0]
    table = Table("case", "issued us", "and waited for us", "fastest round us", "at most")
    rows = []
    for (source, target), case in zip(_CASES, times, strict=True):
        rows.append({"source": source, "target": target, **case._asdict()})
        limit = f"{_MOST_US:.0f}" if (source, target) in _JUDGED else ""
        table.add_row(f"{source} -> {target}", *(f"{number:.1f}" for number in case), limit)
    worst_us = max(found.waited_us for case, found in zip(_CASES, times, strict=True) if case in _JUDGED)
    console.print(table)
    console.print(f"slowest of one step: {worst_us:.1f} us (at most {_MOST_US:.0f})")
    result = {
        "benchmark": "nccl_host_overhead",
        **surroundings(),
        "ranks": ranks,
        "rounds": rounds,
        "shape": _SHAPE,
        "cases": rows,
        "worst_us": worst_us,
        "worst_us_limit": _MOST_US,
    }
    write_json(result, json_to)


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    main(prog_name="python -m benchmarks.nccl_host_overhead")
