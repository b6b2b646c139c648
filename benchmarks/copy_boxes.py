"""Boxes copied, cast and reduced on the CPU, against memcpy and against torch's own ways to the same bytes.

    python -m benchmarks.copy_boxes [--rounds N] [--json [FILE]]

Before it is timed, a side must give the bytes that the others give. Then all sides of a case take turns, in an
order that turns too; a speed is that of the median round, a ratio one of medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import chain
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.box_case import MEMCPY, OURS, TORCH, Case
from benchmarks.box_cases import box_cases
from benchmarks.cast_cases import cast_cases
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


def worst(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """The lowest ratio to each side that has a limit, by number of threads, subject and limit."""
    lowest: dict[tuple[int, str, str, float], Measured] = {}
    for item in found:
        for side, limit in item.limits.items():
            key = (item.threads, item.title.partition(",")[0], side, limit)
            if key not in lowest or item.ratios[side] < lowest[key].ratios[side]:
                lowest[key] = item
    return [
        {
            "threads": threads,
            "subject": subject,
            "over": side,
            "ratio": item.ratios[side],
            "limit": limit,
            "case": item.title,
        }
        for (threads, subject, side, limit), item in lowest.items()
    ]


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


@click.command(context_settings={"show_default": True})
@click.option("--rounds", type=click.IntRange(min=9), default=25, help="Times that each side runs.")
@click.option("--mib", type=click.IntRange(min=1), default=64, help="Size of a case in MiB.")
@click.option("--threads", type=click.IntRange(min=1), multiple=True, default=(1, 2), help="Threads; may be repeated.")
@click.option("--only", default="*", help="Cases to run, as a glob of subject and name, such as 'pack*'.")
@json_option
def copy_boxes(rounds: int, mib: int, threads: tuple[int, ...], only: str, json_to: str | None) -> None:
    """Time tables of boxes on the CPU against memcpy and torch."""
    console = Console(stderr=is_printed(json_to))
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(stderr=is_printed(json_to), width=_FILE_COLUMNS)
    found = []
    gc.disable()
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for make in chain(box_cases(mib << 20, num_threads), cast_cases(mib << 20, num_threads)):
            if not fnmatch(make.title, only):
                continue
            case = make()
            check(case)
            found.append(measure(case, num_threads, rounds))
    if not found:
        raise click.UsageError(f"--only {only!r} names no case")
    _report(console, found)
    lowest = worst(found)
    for item in lowest:
        console.print(
            f"{item['subject']} over {item['over']}, {item['threads']} threads: {item['ratio']:.2f} "
            f"(at least {item['limit']}; {item['case']})",
            highlight=False,
        )
    result = {
        "benchmark": "copy_boxes",
        **surroundings(),
        "rounds": rounds,
        "mib": mib,
        "cases": [asdict(item) for item in found],
        "ratios": lowest,
        "holds": all(item.holds() for item in found),
    }
    write_json(result, json_to)


if __name__ == "__main__":
    copy_boxes(prog_name="python -m benchmarks.copy_boxes")
