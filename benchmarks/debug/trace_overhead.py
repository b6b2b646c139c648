"""Cost of a trace while it is on: training steps of a tensor-parallel model with and without a recording, in turns.

python -m benchmarks.debug.trace_overhead [--ranks N] [--turns N] [--width N] [--json [FILE]]

Turns change places: off, on, off again, and back. Each six give one ratio of medians, on to off; the ratio of off again
to off is the machine's noise. The median of the ratios is printed, with its interval in 95 % of resamples.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn

import tritondt as T
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings
from tritondt.debug.tracing.recording import Recording
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tritondt.redistribution import compile as compiling

_MOST_RATIO = 1.03
_WARM_UP_STEPS = 2
_STEPS_A_TURN = 2
_SIDES = ("off", "on", "off again")
_NUM_RESAMPLES = 1000


def measure(send: Callable[[object], None], num_groups: int, width: int) -> None:
    """Times of a step by side and group of turns, of rank 0, in seconds."""
    step = training_step(width)
    times: dict[str, list[list[float]]] = {side: [] for side in _SIDES}
    num_spans = 0
    for number in range(num_groups):
        for side in _SIDES:
            times[side].append([])
        forth, back = (_SIDES, _SIDES[::-1])[:: -1 if number % 2 else 1]
        for side in forth + back:
            recording = Recording()
            if side == "on":
                recording.begin()
            else:
                compiling.compile_plan.cache_clear()  # as a recording does
            times[side][-1] += turn(step)
            recording.end()
            if side == "on":
                num_spans = len(recording.record(dist.get_rank(), dist.get_world_size()).spans)
    if dist.get_rank() == 0:
        send((times, num_spans / (_WARM_UP_STEPS + _STEPS_A_TURN)))


def training_step(width: int) -> Callable[[], None]:
    """A step of two tensor-parallel layers, with their optimizer."""
    torch.manual_seed(0)
    mesh = T.init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    x = T.distribute_tensor(torch.randn(64, width), mesh, [T.Shard(0)])

    def step() -> None:
        model(x.redistribute(placements=[T.Replicate()]).to_local()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def turn(step: Callable[[], None]) -> list[float]:
    """Seconds of the steps of a turn behind the first, in which plans are compiled."""
    seconds = []
    for _ in range(_WARM_UP_STEPS + _STEPS_A_TURN):
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds[_WARM_UP_STEPS:]


def ratios(times: dict[str, list[list[float]]], side: str) -> list[float]:
    """Median of a side's steps over that without a recording, of each group of turns.

    >>> ratios({"off": [[1.0, 2.0, 9.0]], "on": [[3.0, 3.0, 3.0]]}, "on")
    [1.5]
    """
    pairs = zip(times[side], times["off"], strict=True)
    return [statistics.median(own) / statistics.median(off) for own, off in pairs]


def interval(values: list[float]) -> tuple[float, float]:
    """Interval of the median in 95 % of resamples, which are the same in every run."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES))
    return medians[_NUM_RESAMPLES // 40], medians[-_NUM_RESAMPLES // 40]


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--turns", default=120, show_default=True, help="Groups of two turns of each side, of 2 steps.")
@click.option("--width", default=512, show_default=True, help="Features of the model.")
@json_option
def main(ranks: int, turns: int, width: int, json_to: str | None) -> None:
    """Time steps with and without a recording; status 1 where the median ratio is above 1.03."""
    found: list[Any] = []
    run_on_ranks(ranks, measure, turns, width, on_message=found.append)
    ((times, spans_a_step),) = found
    off, on = (statistics.median(itertools.chain(*times[side])) for side in ("off", "on"))
    result: dict[str, Any] = {**surroundings(), "ranks": ranks, "width": width, "seconds": times}
    told = []
    for side in ("on", "off again"):
        found_ratios = ratios(times, side)
        low, high = interval(found_ratios)
        result[f"ratio {side}"] = {"median": statistics.median(found_ratios), "interval": [low, high]}
        told.append(f"{side} {statistics.median(found_ratios):.3f} of off ({low:.3f} to {high:.3f})")
    click.echo(
        f"{width} features on {ranks} ranks, {spans_a_step:.0f} spans a step: {off * 1e3:.2f} ms off, "
        f"{on * 1e3:.2f} ms on; {'; '.join(told)}",
        err=is_printed(json_to),
    )
    write_json({**result, "spans_a_step": spans_a_step}, json_to)
    if result["ratio on"]["median"] > _MOST_RATIO:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
