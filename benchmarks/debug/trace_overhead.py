"""What a trace costs while it is on: training steps of a tensor-parallel model with and without a recording, in turns.

python -m benchmarks.debug.trace_overhead [--ranks N] [--steps N] [--json [FILE]]
"""

from __future__ import annotations

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

_MOST_RATIO = 1.03
_WARM_UP_STEPS = 3
_STEPS_A_TURN = 5


def measure(send: Callable[[object], None], num_turns: int, width: int) -> None:
    """Times of a step without and with a recording, of rank 0, in seconds; turns change places."""
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

    times: dict[str, list[float]] = {"off": [], "on": []}
    num_spans = 0
    for turn in range(2 * num_turns):
        side = ("off", "on", "on", "off")[turn % 4]
        recording = Recording()
        if side == "on":
            recording.begin()
        for number in range(_WARM_UP_STEPS + _STEPS_A_TURN):
            dist.barrier()
            started = time.perf_counter()
            step()
            if number >= _WARM_UP_STEPS:
                times[side].append(time.perf_counter() - started)
        recording.end()
        if side == "on":
            num_spans = len(recording.record(dist.get_rank(), dist.get_world_size()).spans)
    if dist.get_rank() == 0:
        send((times, num_spans / (_WARM_UP_STEPS + _STEPS_A_TURN)))


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--turns", default=30, show_default=True, help="Turns of each side, of 5 steps.")
@click.option("--width", default=512, show_default=True, help="Features of the model.")
@json_option
def main(ranks: int, turns: int, width: int, json_to: str | None) -> None:
    """Time steps with and without a recording; status 1 where medians are more than 3 % apart."""
    found: list[Any] = []
    run_on_ranks(ranks, measure, turns, width, on_message=found.append)
    ((times, spans_a_step),) = found
    off, on = (statistics.median(times[side]) for side in ("off", "on"))
    fastest = min(times["on"]) / min(times["off"])
    click.echo(
        f"{width} features on {ranks} ranks: {off * 1e3:.2f} ms off, {on * 1e3:.2f} ms on, {on / off:.3f} of it; "
        f"{fastest:.3f} by the fastest; {spans_a_step:.0f} spans a step",
        err=is_printed(json_to),
    )
    result = {**surroundings(), "ranks": ranks, "width": width, "seconds": times, "ratio_median": on / off}
    write_json({**result, "ratio_fastest": fastest, "spans_a_step": spans_a_step}, json_to)
    if on / off > _MOST_RATIO:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
