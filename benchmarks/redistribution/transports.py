"""Redistributions through arenas, over sockets and by torch.distributed.tensor, in turns on the same ranks.

python -m benchmarks.redistribution.transports [--ranks N] [--sizes 64x96,1024x1024] [--rounds N] [--json [FILE]]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table

import tritondt as T
from tritondt.cli.bench.cases import Case, default_pairs, make_cases, parse_pairs, parse_sizes
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.inputs import source_part, target_part
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.bench.measure import _quiet_torch, _torch_run
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings
from tritondt.comm import world
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.comm.transports.sockets import SocketCommunicator
from tritondt.redistribution.compile import compile_plan
from tritondt.redistribution.run import _run_steps

_SIDES = ("shared-memory", "sockets", "torch")


class Request(NamedTuple):
    """Cases to time, in at most so many rounds and about so many seconds each."""

    cases: tuple[Case, ...]
    rounds: int
    case_s: float


class Measured(NamedTuple):
    """Times of one case, by side."""

    case: Case
    times: tuple[Times, ...]


def measure_on_rank(send: Callable[[object], None], request: Request) -> list[Measured]:
    """Times of every case, equal on all ranks; a collective call."""
    torch.set_num_threads(1)
    ranks = tuple(range(request.cases[0].source.num_ranks))
    here: Any = world.current()
    assert isinstance(here.communicator(ranks), SharedMemoryCommunicator), "the ranks share no memory"
    sockets = SocketCommunicator(here.join("sockets beside arenas", ranks, here._timeout))
    with torch.no_grad(), _quiet_torch():
        return [_measured(case, sockets, request) for case in request.cases]


def _measured(case: Case, sockets: SocketCommunicator, request: Request) -> Measured:
    mesh, meta = T.init_device_mesh("cpu", case.mesh_shape), T.TensorMeta.contiguous(case.shape)
    source, target = (T.DTensorSpec(mesh, side, meta) for side in (case.pair.source, case.pair.target))
    assert source.coordinate is not None, "every rank is on the mesh"
    local = source_part(case, torch.float32, source.coordinate)
    expected = target_part(case, torch.float32, source.coordinate)
    compiled = compile_plan(source, target, local.stride(), local.device, None)
    steps = [step._replace(communicator=step.communicator and sockets) for step in compiled.steps]
    runs = [
        lambda: T.redistribute(local, source, target),
        lambda: _run_steps(steps, local),
        _torch_run(local, mesh, case),
    ]
    for run in runs:
        torch.testing.assert_close(run(), expected, rtol=0, atol=0)
    return Measured(case, tuple(time_interleaved(runs, request.rounds, request.case_s)))


def _row(found: Measured) -> dict[str, Any]:
    """A case's ratios: of fastest rounds and of medians, to sockets and to torch."""
    shared, sockets, torchs = found.times
    return {
        "case": f"{found.case.size} {found.case.pair_text}",
        "size": found.case.size,
        **{f"{side}_ms": times.fastest * 1e3 for side, times in zip(_SIDES, found.times, strict=True)},
        **{f"{side}_median_ms": times.median * 1e3 for side, times in zip(_SIDES, found.times, strict=True)},
        "to_sockets": shared.fastest / sockets.fastest,
        "to_sockets_median": shared.median / sockets.median,
        "to_torch": shared.fastest / torchs.fastest,
        "to_torch_median": shared.median / torchs.median,
    }


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--sizes", default="64x96,1024x1024,4096x4096", help="Shapes of the whole tensor.")
@click.option("--pairs", help='As in "S0->R; S0,S1->R,R".')
@click.option("--rounds", type=click.IntRange(min=1), default=25, help="Most rounds of a case.")
@click.option("--case-seconds", type=float, default=10.0, help="Time for a case; 9 rounds are made anyway.")
@json_option
def transports(
    ranks: int, sizes: str, pairs: str | None, rounds: int, case_seconds: float, json_to: str | None
) -> None:
    """Time redistributions through arenas, over sockets and by torch, in turns."""
    os.environ["TRITONDT_TRANSPORT"] = "shared-memory"
    console = Console(stderr=is_printed(json_to))
    chosen = default_pairs(ranks) if pairs is None else parse_pairs(pairs)
    request = Request(make_cases(ranks, parse_sizes(sizes), chosen), rounds, case_seconds)
    found: Any = run_on_ranks(ranks, measure_on_rank, request, on_message=lambda _: None)[0]
    rows = [_row(each) for each in found]
    table = Table(
        "case", *(f"{side} ms" for side in _SIDES), "to sockets", "to torch", "medians: to sockets", "to torch"
    )
    for row in rows:
        ratios = (row["to_sockets"], row["to_torch"], row["to_sockets_median"], row["to_torch_median"])
        table.add_row(
            row["case"], *(f"{row[f'{side}_ms']:.3f}" for side in _SIDES), *(f"{each:.3f}" for each in ratios)
        )
    console.print(table)
    means = []
    for size in dict.fromkeys(row["size"] for row in rows):
        of_size = [row for row in rows if row["size"] == size]
        mean = {key: geometric_mean(row[key] for row in of_size) for key in of_size[0] if key.startswith("to_")}
        means.append({"size": size, **mean})
        console.print(f"{size}: {', '.join(f'{key} {value:.3f}' for key, value in mean.items())}")
    write_json({"benchmark": "transports", **surroundings(), "ranks": ranks, "means": means, "cases": rows}, json_to)


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    transports(prog_name="python -m benchmarks.redistribution.transports")
