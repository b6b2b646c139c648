"""A training step of the demo in style `dtensor` against style `local`, on the same ranks, step by step in turns.

python -m benchmarks.parallel.demo_styles [--ranks N] [--rounds N] [--json [FILE]]
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import click
import torch
from rich.console import Console

from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.demo.experiment import STYLES, Experiment, ignore
from tritondt.cli.demo.model import Model
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings

_SIZES = Model(heads=6, layers=4, width=192, sequence=127)
_BATCH = 16


def measure_on_rank(send: Callable[[object], None], rounds: int) -> list[Times]:
    """Times of a step in both styles, in the order of STYLES."""
    torch.set_num_threads(1)
    experiment = Experiment(_SIZES, steps=rounds + 2, batch=_BATCH, seed=0)

    def steps(name: str) -> Callable[[], object]:
        learner, numbers = STYLES[name].on_ranks(experiment, ignore), count()
        return lambda: learner.run_step(next(numbers))

    return time_interleaved([steps(name) for name in STYLES], rounds, budget_s=600.0)


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=1), default=4, help="Processes to start.")
@click.option("--rounds", type=click.IntRange(min=9), default=50, help="Steps of each style.")
@json_option
def demo_styles(ranks: int, rounds: int, json_to: str | None) -> None:
    """Time a training step of the demo in both of its styles."""
    console = Console(stderr=is_printed(json_to))
    times: Any = run_on_ranks(ranks, measure_on_rank, rounds, on_message=ignore)[0]
    found = dict(zip(STYLES, times, strict=True))
    for name, of_style in found.items():
        console.print(f"{name}: median {of_style.median * 1e3:.1f} ms, fastest {of_style.fastest * 1e3:.1f} ms")
    result = {
        "benchmark": "demo_styles",
        **surroundings(),
        "ranks": ranks,
        "rounds": rounds,
        **{f"{name}_median_s": of_style.median for name, of_style in found.items()},
        **{f"{name}_fastest_s": of_style.fastest for name, of_style in found.items()},
        "ratio_median": found["dtensor"].median / found["local"].median,
        "ratio_fastest": found["dtensor"].fastest / found["local"].fastest,
    }
    console.print(f"dtensor / local: {result['ratio_median']:.3f} by medians, {result['ratio_fastest']:.3f} by fastest")
    write_json(result, json_to)


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    demo_styles(prog_name="python -m benchmarks.parallel.demo_styles")
