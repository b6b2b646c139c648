"""Collectives of the backend "tritondt" through shared memory and those of Gloo, in turns on the same ranks.

python -m benchmarks.collectives.shared_memory [--ranks N] [--sizes 4K,1M] [--rounds N] [--json [FILE]]

A size is that of the largest tensor of a rank, as in nccl-tests. The result of every case is compared with Gloo's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator

COLLECTIVES = (
    *("all_reduce", "reduce", "all_gather", "reduce_scatter", "broadcast"),
    *("gather", "scatter", "all_to_all", "barrier"),
)
UNITS = {"K": 1 << 10, "M": 1 << 20}
# torch 2.13 has new names for two, and warns at every call of an old one: 7 us of reduce_scatter's 28.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Request(NamedTuple):
    """Cases to time, in at most so many rounds and about so many seconds each."""

    collectives: tuple[str, ...]
    sizes: tuple[str, ...]
    rounds: int
    case_s: float


class Measured(NamedTuple):
    """Times of one case, of this backend and of Gloo."""

    collective: str
    size: str
    times: tuple[Times, ...]


def measure_on_rank(send: Callable[[object], None], request: Request) -> list[Measured]:
    """Times of every case, equal on all ranks; a collective call."""
    torch.set_num_threads(1)
    groups: list[Any] = [dist.new_group(backend=backend) for backend in ("tritondt", "gloo")]
    found = []
    for collective in request.collectives:
        for size in request.sizes if collective != "barrier" else ("0K",):
            times = _measured(collective, int(size[:-1]) * UNITS[size[-1]], groups, request)
            found.append(Measured(collective, size, times))
    carrying = groups[0]._router._cpu_group._carrier.whole
    assert isinstance(carrying, SharedMemoryCommunicator), "the ranks share no memory"
    return found


def _measured(collective: str, num_bytes: int, groups: list[Any], request: Request) -> tuple[Times, ...]:
    runs, results = zip(*(call_on(group, collective, num_bytes // 4) for group in groups), strict=True)
    for run in runs:
        run()
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)  # of a root's alone where it is a root's
    return tuple(time_interleaved(runs, request.rounds, request.case_s))


def call_on(group: Any, collective: str, numel: int) -> tuple[Callable[[], object], torch.Tensor]:
    """A call on a group, and the tensor that it writes; sums are of zeros, which calls in turn leave as they are."""
    size, rank = dist.get_world_size(), dist.get_rank()
    zeros, part = torch.zeros(numel), torch.full((numel // size,), float(rank))
    parts = list(zeros.chunk(size)) if rank == 0 else None
    given = torch.arange(numel).fmod_(7).mul_(rank + 1).float()
    calls: dict[str, tuple[Callable[[], object], torch.Tensor]] = {
        "all_reduce": (lambda: dist.all_reduce(zeros, group=group), zeros),
        "all_gather": (lambda: _ALL_GATHER(zeros, part, group=group), zeros),
        "reduce_scatter": (lambda: _REDUCE_SCATTER(part, given, group=group), part),
        "reduce": (lambda: dist.reduce(zeros, group=group, group_dst=0), zeros),
        "broadcast": (lambda: dist.broadcast(given, group=group, group_src=0), given),
        "gather": (lambda: dist.gather(part, parts, group=group, group_dst=0), zeros),
        "scatter": (lambda: dist.scatter(part, parts, group=group, group_src=0), part),
        "all_to_all": (lambda: dist.all_to_all_single(zeros, given, group=group), zeros),
        "barrier": (lambda: dist.barrier(group=group), zeros),
    }
    return calls[collective]


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--collectives", default=",".join(COLLECTIVES), help="Which ones.")
@click.option("--sizes", default="4K,64K,1M,8M,64M", help="Bytes of the largest tensor of a rank.")
@click.option("--rounds", type=click.IntRange(min=1), default=50, help="Most rounds of a case.")
@click.option("--case-seconds", type=float, default=3.0, help="Time for a case; 9 rounds are made anyway.")
@json_option
def shared_memory(
    ranks: int, collectives: str, sizes: str, rounds: int, case_seconds: float, json_to: str | None
) -> None:
    """Time collectives through shared memory and on Gloo, in turns."""
    os.environ["TRITONDT_TRANSPORT"] = "shared-memory"
    console = Console(stderr=is_printed(json_to))
    request = Request(tuple(collectives.split(",")), tuple(sizes.split(",")), rounds, case_seconds)
    found: Any = run_on_ranks(ranks, measure_on_rank, request, on_message=lambda _: None)[0]
    rows = [_row(each) for each in found]
    table = Table("collective", "size", "ms", "Gloo's ms", "fastest, of Gloo's", "medians")
    for row in rows:
        times = (f"{row['ms']:.3f}", f"{row['gloo_ms']:.3f}", f"{row['to_gloo']:.3f}", f"{row['to_gloo_median']:.3f}")
        table.add_row(row["collective"], row["size"], *times)
    console.print(table)
    means = {key: geometric_mean(row[key] for row in rows) for key in ("to_gloo", "to_gloo_median")}
    console.print(", ".join(f"{key} {value:.3f}" for key, value in means.items()))
    result = {"benchmark": "shared_memory_collectives", **surroundings(), "ranks": ranks, "means": means}
    write_json({**result, "cases": rows}, json_to)


def _row(found: Measured) -> dict[str, Any]:
    own, gloo = found.times
    return {
        "collective": found.collective,
        "size": found.size,
        "ms": own.fastest * 1e3,
        "gloo_ms": gloo.fastest * 1e3,
        "median_ms": own.median * 1e3,
        "gloo_median_ms": gloo.median * 1e3,
        "to_gloo": own.fastest / gloo.fastest,
        "to_gloo_median": own.median / gloo.median,
    }


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    shared_memory(prog_name="python -m benchmarks.collectives.shared_memory")
