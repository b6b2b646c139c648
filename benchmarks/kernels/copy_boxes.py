"""Boxes copied, cast and reduced on the CPU, against memcpy and against torch's own ways to the same bytes.

    python -m benchmarks.kernels.copy_boxes [--rounds N] [--only GLOB] [--json [FILE]]

Before it is timed, a side must give the bytes that the others give. Then all sides of a case take turns, in an
order that turns too; a speed is that of the median round, a ratio one of medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import chain

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.box_case import MEMCPY, OURS, TORCH, Case
from benchmarks.kernels.box_cases import box_cases
from benchmarks.kernels.cast_cases import cast_cases
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.surroundings import surroundings

_FILE_COLUMNS = 120


@dataclass(frozen=True)
class Measured:
    """Speeds in GB of the case's bytes a second; `ratios` and `limits` are ours over a side's."""

    threads: int
    title: str
    gb_per_s: dict[str, float]
    ratios: dict[str, float]
    limits: dict[str, float]

    def holds(self) -> bool:
        """Whether every ratio is at its limit or above."""
        return all(self.ratios[side] >= limit for side, limit in self.limits.items())


def check(case: Case) -> None:
    """Refuses to time sides that do not give equal bytes; memcpy moves as many, but not where the others do."""
    expected: torch.Tensor | None = None
    for name, run in case.sides.items():
        if name == MEMCPY:
            continue
        case.target.view(torch.uint8).fill_(0x5A)
        result = run()
        # A side that allocates its result returns it.
        given = result if isinstance(result, torch.Tensor) else case.target
        found = given.reshape(-1).view(torch.uint8).clone()
        expected = found if expected is None else expected
        if not torch.equal(found, expected):
            raise AssertionError(f"{case.title}: {name} gives other bytes than {next(iter(case.sides))}")


def measure(case: Case, threads: int, rounds: int) -> Measured:
    """Times a case's sides in turns."""
    names = list(case.sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            start = time.perf_counter()
            case.sides[name]()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: medians[name] / medians[OURS] for name in names if name != OURS}
    ratios[TORCH] = min(ratio for name, ratio in ratios.items() if name.startswith(TORCH))
    speeds = {name: case.num_bytes / median / 1e9 for name, median in medians.items()}
    return Measured(threads, case.title, speeds, ratios, case.limits)


def worst(found: Sequence[Measured]) -> dict[str, tuple[float, float, str]]:
    """By subject, other side and threads: the lowest ratio to a side that has a limit, the limit, the case."""
    lowest: dict[str, tuple[float, float, str]] = {}
    for item in found:
        subject = item.title.partition(",")[0]
        for side, limit in item.limits.items():
            name = f"{subject} over {side}, {item.threads} threads"
            if name not in lowest or item.ratios[side] / limit < lowest[name][0] / lowest[name][1]:
                lowest[name] = (item.ratios[side], limit, item.title)
    return lowest


def _report(console: Console, found: Sequence[Measured]) -> None:
    table = Table("case", "threads", "GB/s", "over memcpy", "over torch", "fastest of torch", "limits")
    for item in found:
        theirs = {name: speed for name, speed in item.gb_per_s.items() if name.startswith(TORCH)}
        table.add_row(
            item.title,
            str(item.threads),
            f"{item.gb_per_s[OURS]:.2f}",
            f"{item.ratios[MEMCPY]:.2f}" if MEMCPY in item.ratios else "",
            f"{item.ratios[TORCH]:.2f}",
            max(theirs, key=lambda name: theirs[name]).removeprefix("torch "),
            "" if item.holds() else "missed",
        )
    console.print(table)


def _measure_all(
    console: Console, rounds: int, mib: int, threads: Sequence[int], only: Sequence[str]
) -> Iterator[Measured]:
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for recipe in chain(box_cases(mib << 20, num_threads), cast_cases(mib << 20, num_threads)):
            if not any(fnmatch(recipe.title, pattern) for pattern in only):
                continue
            console.print(f"{recipe.title}, {num_threads} threads", highlight=False)
            case = recipe()
            check(case)
            yield measure(case, num_threads, rounds)


@click.command(context_settings={"show_default": True})
@click.option("--rounds", type=click.IntRange(min=9), default=25, help="Times that each side runs.")
@click.option("--mib", type=click.IntRange(min=1), default=64, help="Size of a case in MiB.")
@click.option("--threads", type=click.IntRange(min=1), multiple=True, default=(1, 2), help="Threads; may be repeated.")
@click.option("--only", multiple=True, default=("*",), help="Cases to run, a glob such as 'pack*'; may be repeated.")
@json_option
@click.pass_context
def copy_boxes(
    context: click.Context, rounds: int, mib: int, threads: tuple[int, ...], only: tuple[str, ...], json_to: str | None
) -> None:
    """Time tables of boxes on the CPU against memcpy and torch; exit with 1 where a ratio is below its limit."""
    console = Console(stderr=is_printed(json_to))
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(stderr=is_printed(json_to), width=_FILE_COLUMNS)
    gc.disable()
    found = list(_measure_all(console, rounds, mib, threads, only))
    if not found:
        raise click.UsageError(f"--only {' '.join(only)} names no case")
    _report(console, found)
    lowest = worst(found)
    for name, (ratio, limit, case) in lowest.items():
        console.print(f"{name}: {ratio:.2f} (at least {limit}; {case})", highlight=False)
    holds = all(item.holds() for item in found)
    result = {
        "benchmark": "copy_boxes",
        **surroundings(),
        "rounds": rounds,
        "mib": mib,
        "cases": [asdict(item) for item in found],
        "ratios": {name: ratio for name, (ratio, _, _) in lowest.items()},
        "limits": {name: limit for name, (_, limit, _) in lowest.items()},
        "holds": holds,
    }
    write_json(result, json_to)
    if not holds:
        context.exit(1)


if __name__ == "__main__":
    copy_boxes(prog_name="python -m benchmarks.kernels.copy_boxes")
