"""Redistributions of torch's DTensor within `accelerate_torch`, of our own tensor, and of torch's DTensor by torch.

    python -m benchmarks.redistribution.accelerate [--ranks 4] [--pairs 20] [--rounds 25] [--json [FILE]]

The three take turns in one run, a pair of layouts at a time, and are compared with each other first, exactly: the first
two in rounds within one `accelerate_torch`, as a program switches it on once, and blocks of these rounds with blocks of
torch's. The time to switch it on and off is told by itself. Pairs are S0 -> R, S1 -> S0, S0 -> S1, S1 -> R and P -> S0
by turns, float32, between 4 kB and 4 MB, as many small as large on a logarithmic scale. `accelerate_torch` adds torch's
own host time around the call to ours, a fixed time, which the smallest sizes show.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import tritondt as T
from benchmarks.redistribution.both_sides import moves_of, quiet_rank, shape_of
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.launch import num_cores, run_on_ranks
from tritondt.cli.surroundings import versions
from tritondt.comm.transports.table import chosen

_PAIRS = ("S0 R", "S1 S0", "S0 S1", "S1 R", "P S0")
_SMALLEST, _LARGEST = 4 << 10, 4 << 20
_CALLS = 5  # of one side in a row, so that a round is longer than what a barrier leaves of noise
_BLOCKS = 3
_SWITCHES = 200


@dataclass(frozen=True)
class Request:
    """The measurement that the ranks are asked for."""

    pairs: int
    rounds: int
    pair_s: float


@dataclass(frozen=True)
class Found:
    """Times of a pair of layouts: accelerated, ours, torch's."""

    pair: str
    num_bytes: int
    times: list[Times]


def _measure_on_rank(send: Callable[[object], None], request: Request) -> None:
    quiet_rank()
    num_ranks = dist.get_world_size()
    mesh = T.init_device_mesh("cpu", (num_ranks,))
    found = []
    with torch.no_grad():
        for number in range(request.pairs):
            text = _PAIRS[number % len(_PAIRS)]
            shape = shape_of(number, request.pairs, _SMALLEST, _LARGEST, num_ranks)
            theirs, ours = _sides(mesh, text, shape, number)
            expected = theirs().to_local()
            with T.accelerate_torch():
                for run in (theirs, ours):
                    torch.testing.assert_close(run().to_local(), expected, rtol=0, atol=0)
            found.append(Found(text, shape[0] * shape[1] * 4, _times(theirs, ours, request)))
    started = time.perf_counter()
    for _ in range(_SWITCHES):
        with T.accelerate_torch():
            pass
    switch_s = (time.perf_counter() - started) / _SWITCHES
    if dist.get_rank() == 0:
        send((found, switch_s))


def _sides(mesh: T.DeviceMesh, text: str, shape: tuple[int, int], seed: int) -> list[Callable[[], Any]]:
    """The redistribution of one tensor: torch's and ours."""
    (ours, placements), (theirs, torch_placements) = moves_of(mesh, text, shape, seed)

    def repeated(tensor: Any, wanted: Any) -> Any:
        for _ in range(_CALLS - 1):
            tensor.redistribute(placements=wanted)
        return tensor.redistribute(placements=wanted)

    return [lambda: repeated(theirs, torch_placements), lambda: repeated(ours, placements)]


def _times(theirs: Callable[[], Any], ours: Callable[[], Any], request: Request) -> list[Times]:
    """Times of torch's within `accelerate_torch`, ours, and torch's."""
    found: list[list[float]] = [[], [], []]
    rounds, block_s = -(-request.rounds // _BLOCKS), request.pair_s / _BLOCKS / 2
    for _ in range(_BLOCKS):
        with T.accelerate_torch():
            blocks = time_interleaved([theirs, ours], rounds, block_s)
        blocks += time_interleaved([theirs], rounds, block_s)
        for seconds, times in zip(found, blocks, strict=True):
            seconds += times.seconds
    return [Times(tuple(seconds)) for seconds in found]


def _mean_ratio(found: list[Found], other: int) -> float:
    """Geometric mean over pairs of the accelerated median over another side's."""
    return geometric_mean(each.times[0].median / each.times[other].median for each in found)


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--pairs", type=click.IntRange(min=1), default=20, help="Pairs of layouts, with sizes.")
@click.option("--rounds", type=click.IntRange(min=1), default=60, help="Most rounds of a pair.")
@click.option("--pair-seconds", type=float, default=8.0, help="Time for the rounds of a pair; 27 are made anyway.")
@json_option
def accelerate(ranks: int, pairs: int, rounds: int, pair_seconds: float, json_to: str | None) -> None:
    """Time torch's redistributions within accelerate_torch, ours, and torch's own."""
    messages: list[Any] = []
    run_on_ranks(ranks, _measure_on_rank, Request(pairs, rounds, pair_seconds), on_message=messages.append)
    found: list[Found] = messages[0][0]
    switch_s: float = messages[0][1]
    table = Table("", "kB", "accelerated us", "ours us", "torch us", "over ours", "over torch")
    for each in found:
        medians = [times.median for times in each.times]
        micros = [f"{median / _CALLS * 1e6:.0f}" for median in medians]
        ratios = [f"{medians[0] / other:.2f}" for other in medians[1:]]
        table.add_row(each.pair.replace(" ", " -> "), f"{each.num_bytes / 1024:.0f}", *micros, *ratios)
    Console().print(table)
    over_ours, over_torch = _mean_ratio(found, 1), _mean_ratio(found, 2)
    Console().print(f"geometric means: {over_ours:.3f} of ours, {over_torch:.3f} of torch's", highlight=False)
    Console().print(f"on and off again takes {switch_s * 1e6:.1f} us", highlight=False)
    write_json(
        {
            "ratio_to_ours": over_ours,
            "ratio_to_torch": over_torch,
            "switch_s": switch_s,
            "pairs": [
                {"pair": each.pair, "bytes": each.num_bytes, "median_s": [t.median / _CALLS for t in each.times]}
                for each in found
            ],
            "ranks": ranks,
            "transport": chosen("cpu").name,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": {**versions(), "machine": platform.platform(), "cores": num_cores()},
        },
        json_to,
    )


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    accelerate(prog_name="python -m benchmarks.redistribution.accelerate")
