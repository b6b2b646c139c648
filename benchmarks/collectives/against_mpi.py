"""Collectives of the backend "tritondt" through shared memory, and those of an MPI on this machine.

    python -m benchmarks.collectives.against_mpi [--ranks 4] [--sizes 4K,1M] [--turns 3] [--json [FILE]]

Needs mpicxx and mpirun of Open MPI (Debian: openmpi-bin, libopenmpi-dev). Each side runs the same loops, blocks of
calls in a row behind a barrier: ours through torch.distributed from Python, MPI's from C++ (mpi_loops/). Whole sweeps
take turns, a process for each rank and side, as ranks of MPI that wait for a turn would keep the cores. A call takes
as long as its block on the slowest rank over the calls in it.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.collectives.shared_memory import COLLECTIVES, UNITS, call_on
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator

_SOURCE = Path(__file__).parent / "mpi_loops" / "mpi_loops.cpp"
_BUILT = Path(__file__).parents[2] / "build" / "mpi_loops"
_WARM_UP, _BLOCKS = 3, 7
_BLOCK_BYTES, _MOST_CALLS = 64 << 20, 100


class Case(NamedTuple):
    """A collective of tensors of so many bytes, called so often in a block."""

    collective: str
    size: str
    num_bytes: int
    num_calls: int


def _cases(collectives: list[str], sizes: list[str]) -> list[Case]:
    found = []
    for collective in collectives:
        for size in sizes if collective != "barrier" else ["0K"]:
            num_bytes = int(size[:-1]) * UNITS[size[-1]]
            num_calls = max(1, min(_MOST_CALLS, _BLOCK_BYTES // max(num_bytes, 1)))
            found.append(Case(collective, size, num_bytes, num_calls))
    return found


def measure_on_rank(send: Callable[[object], None], cases: list[Case]) -> list[list[float]]:
    """Seconds of a call in every block of every case, of the slowest rank; a collective call."""
    torch.set_num_threads(1)
    group: Any = dist.new_group(backend="tritondt")
    found = []
    for case in cases:
        run, _ = call_on(group, case.collective, case.num_bytes // 4)
        for _ in range(_WARM_UP):
            run()
        found.append([_block(group, run, case.num_calls) for _ in range(_BLOCKS)])
    carrying = group._router._cpu_group._carrier.whole
    assert isinstance(carrying, SharedMemoryCommunicator), "the ranks share no memory"
    return found


def _block(group: Any, run: Callable[[], object], num_calls: int) -> float:
    dist.barrier(group=group)
    started = time.perf_counter()
    for _ in range(num_calls):
        run()
    own = torch.tensor((time.perf_counter() - started) / num_calls, dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    return float(own)


def _program() -> Path:
    """The loops of MPI, compiled where they are older than their source."""
    if shutil.which("mpicxx") is None or shutil.which("mpirun") is None:
        raise click.ClickException("no mpicxx and mpirun here; Debian: apt-get install openmpi-bin libopenmpi-dev")
    program = _BUILT / "mpi_loops"
    if not program.exists() or program.stat().st_mtime < _SOURCE.stat().st_mtime:
        _BUILT.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mpicxx", "-std=c++17", "-O3", str(_SOURCE), "-o", str(program)], check=True)
    return program


def _mpi_seconds(program: Path, ranks: int, cases: list[Case]) -> list[list[float]]:
    arguments = [str(part) for case in cases for part in (case.collective, case.num_bytes, case.num_calls)]
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), str(program)]
    command += [str(_WARM_UP), str(_BLOCKS), *arguments]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [[float(seconds) for seconds in line.split()[2:]] for line in told.splitlines()]


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--collectives", default=",".join(COLLECTIVES), help="Which ones.")
@click.option("--sizes", default="4K,64K,1M,8M,64M", help="Bytes of the largest tensor of a rank.")
@click.option("--turns", type=click.IntRange(min=1), default=3, help="Sweeps of each side.")
@json_option
def against_mpi(ranks: int, collectives: str, sizes: str, turns: int, json_to: str | None) -> None:
    """Time collectives through shared memory and of MPI, in turns."""
    console, program = Console(stderr=is_printed(json_to)), _program()
    cases = _cases(collectives.split(","), sizes.split(","))
    ours: list[list[float]] = [[] for _ in cases]
    theirs: list[list[float]] = [[] for _ in cases]
    for _ in range(turns):
        for side, found in (
            (theirs, _mpi_seconds(program, ranks, cases)),
            (ours, run_on_ranks(ranks, measure_on_rank, cases, on_message=lambda _: None)[0]),
        ):
            for seconds, more in zip(side, found, strict=True):
                seconds += more
    rows = [_row(*each) for each in zip(cases, ours, theirs, strict=True)]
    table = Table("collective", "size", "calls", "us", "MPI's us", "medians", "fastest")
    for row in rows:
        times = (f"{row['median_s'] * 1e6:.1f}", f"{row['mpi_median_s'] * 1e6:.1f}")
        ratios = (f"{row['to_mpi_median']:.3f}", f"{row['to_mpi']:.3f}")
        table.add_row(row["collective"], row["size"], str(row["calls"]), *times, *ratios)
    console.print(table)
    means = {key: geometric_mean(row[key] for row in rows) for key in ("to_mpi_median", "to_mpi")}
    console.print(", ".join(f"{key} {value:.3f}" for key, value in means.items()))
    told = subprocess.run(["mpirun", "--version"], check=True, capture_output=True, text=True).stdout
    result = {"benchmark": "collectives_against_mpi", **surroundings(), "mpi": told.splitlines()[0], "ranks": ranks}
    write_json({**result, "means": means, "cases": rows}, json_to)


def _row(case: Case, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    return {
        "collective": case.collective,
        "size": case.size,
        "calls": case.num_calls,
        "median_s": median(ours),
        "fastest_s": min(ours),
        "mpi_median_s": median(theirs),
        "mpi_fastest_s": min(theirs),
        "to_mpi_median": median(ours) / median(theirs),
        "to_mpi": min(ours) / min(theirs),
    }


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    against_mpi(prog_name="python -m benchmarks.collectives.against_mpi")
