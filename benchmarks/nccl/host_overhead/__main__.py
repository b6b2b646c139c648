"""Host time of asynchronous calls over NCCL: all but NCCL, streams and kernels, which do nothing here.

    python -m benchmarks.nccl.host_overhead [--cuda] [--ranks N] [--rounds N] [--only GLOB] [--json [FILE]]

Everything else is there: dispatch, plan, allocation, packing and unpacking up to the launch, recorder, watch and queue.
The ranks are processes, of which the first is timed; nothing is moved, and so no result is checked. Beside each
collective of our backend the same call is timed of torch's fake group: what torch.distributed itself takes, around a
group in C++ that does nothing.

With `--cuda`, streams are the library's own for GPUs, kernels are compiled for sm_90 and go through Triton's launcher,
and the calls of CUDA that all of it makes take as long as CUDA's (`benchmarks/nccl/stub_cuda/`); NCCL still does
nothing. Then it tells what these calls take, and where the rest of the time goes.

Times are medians of the rounds in which the machine was at full speed, as a loop beside them tells, whose share of all
rounds is in the table; those of parts are medians of all calls.

`--profile` prints where the time of the cases goes, one by one.
"""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.nccl.host_overhead.on_rank import on_rank
from benchmarks.nccl.no_op_nccl import build
from benchmarks.nccl.stub_cuda import build as build_cuda
from benchmarks.nccl.stub_cuda.costs import COSTS_NS
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings


def table_of(found: list[dict[str, Any]]) -> Table:
    """A line for each case."""
    columns = ("issued us", "and waited for us", "fastest round us", "at full speed", "at most", "torch's fake group")
    table = Table("kind", "case", *columns)
    for row in found:
        numbers = [f"{row[name]:.1f}" for name in ("issued_us", "waited_us", "fastest_us")]
        numbers.append(f"{row['full_speed']:.0%}")
        most = "" if row["most_us"] is None else f"{row['most_us']:.0f}"
        table.add_row(
            row["kind"], row["case"], *numbers, most, f"{row['fake']['waited_us']:.1f}" if row["fake"] else ""
        )
    return table


def parts_of(row: dict[str, Any]) -> Table:
    """Where the time of a case goes until it returns."""
    device = row["device"]
    calls = ", ".join(f"{count} {name}" for name, count in device["calls"].items())
    table = Table("part", "us", title=f"{row['case']} until it returns")
    for part, spent_us in device["parts_us"].items():
        table.add_row(part, f"{spent_us:.1f}")
    table.add_row(f"calls of CUDA, in the above: {calls}", f"{device['calls_us']:.1f}")
    table.add_row("timed with calls that take no time", f"{device['without_us']:.1f}")
    return table


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=2, help="Processes to start.")
@click.option("--rounds", type=click.IntRange(min=3), default=1000, help="Rounds, in which the cases take turns.")
@click.option("--only", multiple=True, default=("*",), help="Cases, a glob such as 'all_*'; may be repeated.")
@click.option("--cuda", is_flag=True, help="Over a stub of CUDA whose calls take their time, and Triton's launcher.")
@click.option("--profile", is_flag=True, help="Print where the time of the cases goes.")
@json_option
def main(ranks: int, rounds: int, only: tuple[str, ...], cuda: bool, profile: bool, json_to: str | None) -> None:
    """Time asynchronous redistributions and collectives over an NCCL that does nothing."""
    console = Console(stderr=is_printed(json_to), width=None if Console().is_terminal else 140)
    build()  # once, before the ranks look for it
    if cuda:
        build_cuda()
    found: Any = run_on_ranks(ranks, on_rank, rounds, only, profile, cuda, on_message=print)[0]
    if not found:
        raise click.UsageError(f"--only {' '.join(only)} names no case")
    console.print(table_of(found))
    judged = [row for row in found if row["most_us"] is not None]
    judged_by = "issued_us" if cuda else "waited_us"
    for row in judged:
        if row[judged_by] > row["most_us"]:
            console.print(f"{row['case']}: {row[judged_by]:.1f} us (at most {row['most_us']:.0f})", highlight=False)
    for row in found:
        if row["device"] is not None:
            console.print(parts_of(row))
    result = {"benchmark": "nccl_host_overhead", **surroundings(), "ranks": ranks, "rounds": rounds, "cases": found}
    result |= {"costs_ns": COSTS_NS} if cuda else {}
    write_json(result, json_to)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.nccl.host_overhead")
