"""NCCL called by us against torch's ProcessGroupNCCL, on the same library.

    python -m benchmarks.nccl [--ranks 1|2] [--rounds N] [--only GLOB] [--json [FILE]]

Every case is checked before it is timed: all sides must give the same. Then they take turns, and a round takes as
long as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from typing import Any

import click
from rich.console import Console

from benchmarks.nccl.judging import Measured, judged, table_of, worst
from benchmarks.nccl.timing import Job, jobs, library, timed
from tests.harness.gloo_ranks import GlooRanks
from tests.nccl.devices import start, why_not
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.surroundings import surroundings

_FILE_COLUMNS = 140
_CASE_SECONDS = 120.0  # the first one makes all communicators


def measure(console: Console, ranks: GlooRanks, where: str, chosen: Sequence[Job], rounds: int) -> Iterator[Measured]:
    """Times the jobs one after the other; a rank that does not come back in time ends all."""
    for number, job in enumerate(chosen, 1):
        of_ranks = ranks.run(timed, where, job, rounds, timeout_s=_CASE_SECONDS)
        found = judged(job.kind, job.case, of_ranks)
        values = ", ".join(f"{side} {value:.2f}" for side, value in found.values.items())
        console.print(f"{number}/{len(chosen)}  {job.kind}: {job.case}: {values}", highlight=False)
        yield found


def report(found: Sequence[Measured], facts: dict[str, Any], ranks: int, rounds: int) -> dict[str, Any]:
    """The JSON object."""
    by_name = worst(found)
    return {
        "benchmark": "nccl",
        **surroundings(),
        **facts,
        "ranks": ranks,
        "rounds": rounds,
        "cases": [{**asdict(item), "holds": item.holds} for item in found],
        "ratios": {name: each["value"] for name, each in by_name.items()},
        "limits": {name: each["limit"] for name, each in by_name.items()},
        "holds": all(item.holds for item in found),
    }


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(1, 2), default=1, help="Ranks, all on one GPU.")
@click.option("--rounds", type=click.IntRange(min=1), default=50, help="Times that each side takes its turn.")
@click.option(
    "--bytes", "sizes", type=click.IntRange(min=8), multiple=True,
    default=(1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26), help="Sizes of collectives; may be repeated.",
)  # fmt: skip
@click.option("--only", multiple=True, default=("*",), help="Cases, a glob such as 'all_reduce*'; may be repeated.")
@click.option(
    "--double", is_flag=True, help="Over the test double on the host: that it runs, not how fast; never fails."
)
@json_option
@click.pass_context
def nccl(
    context: click.Context,
    ranks: int,
    rounds: int,
    sizes: tuple[int, ...],
    only: tuple[str, ...],
    double: bool,
    json_to: str | None,
) -> None:
    """Time collectives and redistributions against torch's on the same NCCL; exit with 1 where a limit is missed."""
    where = "host" if double else "gpu"
    reason = why_not(where, ranks)
    if reason is not None:
        raise click.ClickException(f"this benchmark {reason}" if reason.startswith("needs") else reason)
    chosen = [job for job in jobs(ranks, list(sizes)) if any(fnmatch(job.case, pattern) for pattern in only)]
    if not chosen:
        raise click.UsageError(f"--only {' '.join(only)} names no case")
    console = Console(stderr=is_printed(json_to))
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(stderr=is_printed(json_to), width=_FILE_COLUMNS)
    with start(where, ranks, PYTHONWARNINGS="ignore::FutureWarning") as started:
        facts = started.run(library, where, timeout_s=_CASE_SECONDS)[0]
        console.print(f"NCCL {facts['nccl']} ({facts['nccl_path']}), {facts['device']}", highlight=False)
        found = list(measure(console, started, where, chosen, rounds))
    console.print(table_of(found))
    for name, each in worst(found).items():
        console.print(f"{name}: {each['value']:.2f} (at most {each['limit']:g}; {each['case']})", highlight=False)
    result = report(found, facts, ranks, rounds)
    write_json(result, json_to)
    if not (double or result["holds"]):
        context.exit(1)


if __name__ == "__main__":
    nccl(prog_name="python -m benchmarks.nccl")
