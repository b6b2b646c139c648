"""200 tensors of mixed sizes and layouts: `redistribute_many`, ours and torch's one by one, and the bytes alone.

    python -m benchmarks.redistribution.many [--ranks 4] [--tensors 200] [--rounds 15] [--json [FILE]]

They take turns in one run on processes of the transport that TRITONDT_TRANSPORT names. Results are compared with each
other first, exactly. Sizes run from 64 kB to 4 MB, as many small as large on a logarithmic scale; each tensor goes
S0 -> R, S1 -> S0, S0 -> S1, R -> S0, S1 -> R or P -> S0. No padding is asked of torch: every length divides.
"Bytes alone" is one gather of one flat tensor in which every rank receives as many bytes as in the list, straight from
and into the tensor: what no packing of the list undercuts.
"""

from __future__ import annotations

import datetime
import platform
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import tritondt as T
from benchmarks.redistribution.both_sides import Move, moves_of, quiet_rank, shape_of
from tritondt.cli.bench.harness import Times, time_interleaved
from tritondt.cli.bench.json_result import json_option, write_json
from tritondt.cli.launch import num_cores, run_on_ranks
from tritondt.cli.surroundings import versions
from tritondt.comm import world
from tritondt.comm.transports.table import chosen

_PAIRS = ("S0 R", "S1 S0", "S0 S1", "R S0", "S1 R", "P S0")
_SMALLEST, _LARGEST = 64 << 10, 4 << 20
_NAMES = ("redistribute_many", "ours one by one", "torch one by one", "bytes alone")


@dataclass(frozen=True)
class Request:
    """The measurement that the ranks are asked for."""

    tensors: int
    bucket_bytes: int | None
    rounds: int
    budget_s: float


@dataclass(frozen=True)
class Found:
    """Times of the four, and bytes that a rank received at most in ours."""

    times: list[Times]
    received_bytes: int
    minimum_bytes: int
    whole_bytes: int


def _shapes(count: int, multiple: int) -> list[tuple[int, int]]:
    """Shapes of float32 tensors of 64 kB to 4 MB, each length a multiple of the number of ranks."""
    found = [shape_of(number, count, _SMALLEST, _LARGEST, multiple) for number in range(count)]
    random.Random(0).shuffle(found)
    return found


def _measure_on_rank(send: Callable[[object], None], request: Request) -> None:
    quiet_rank()
    num_ranks = dist.get_world_size()
    mesh = T.init_device_mesh("cpu", (num_ranks,))
    ours: list[Move] = []
    theirs: list[Move] = []
    for number, shape in enumerate(_shapes(request.tensors, num_ranks)):
        mine, its = moves_of(mesh, _PAIRS[number % len(_PAIRS)], shape, number)
        ours.append(mine)
        theirs.append(its)

    def many() -> list[Any]:
        return T.redistribute_many(ours, bucket_bytes=request.bucket_bytes)

    def one_by_one(moves: Any) -> list[Any]:
        return [x.redistribute(placements=placements) for x, placements in moves]

    with torch.no_grad():
        results = [run() for run in (many, partial(one_by_one, ours), partial(one_by_one, theirs))]
        for found in zip(*results, strict=True):
            first, *others = (x.to_local() for x in found)
            for other in others:
                torch.testing.assert_close(other, first, rtol=0, atol=0)
        traffic = world.current().communicator(range(num_ranks)).traffic
        before = traffic.received_bytes
        many()
        received = traffic.received_bytes - before
        minimum = sum(T.explain(x._spec, x._spec.with_placements(p)).received_bytes for x, p in ours)
        del results
        # Each rank receives the parts of all others.
        flat = T.DTensor.from_local(torch.zeros(received // 4 // (num_ranks - 1)), mesh, [T.Shard(0)])
        bytes_alone = partial(one_by_one, [(flat, [T.Replicate()])])
        runs = (many, partial(one_by_one, ours), partial(one_by_one, theirs), bytes_alone)
        times = time_interleaved(runs, request.rounds, request.budget_s)
    if dist.get_rank() == 0:
        send(Found(times, received, minimum, sum(x.numel() * 4 for x, _ in ours)))


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--tensors", type=click.IntRange(min=1), default=200, help="Tensors in the list.")
@click.option("--bucket-bytes", type=click.IntRange(min=1), help="Bytes of a bucket; by transport unless given.")
@click.option("--rounds", type=click.IntRange(min=1), default=15, help="Most rounds.")
@click.option("--seconds", type=float, default=60.0, help="Time for all rounds; 9 are made anyway.")
@json_option
def many(ranks: int, tensors: int, bucket_bytes: int | None, rounds: int, seconds: float, json_to: str | None) -> None:
    """Time a list of redistributions in few exchanges, one by one, and by torch's DTensor."""
    request = Request(tensors, bucket_bytes, rounds, seconds)
    messages: list[Any] = []
    run_on_ranks(ranks, _measure_on_rank, request, on_message=messages.append)
    found: Found = messages[0]
    together, *others = found.times
    table = Table("", "median ms", "fastest ms", "redistribute_many's share")
    for name, times in zip(_NAMES, found.times, strict=True):
        share = together.median / times.median
        table.add_row(name, f"{times.median * 1e3:.1f}", f"{times.fastest * 1e3:.1f}", f"{share:.3f}")
    Console().print(table)
    Console().print(
        f"{tensors} tensors, {found.whole_bytes:,} bytes in all; rank 0 received {found.received_bytes:,} bytes, the "
        f"minimum is {found.minimum_bytes:,}",
        highlight=False,
    )
    write_json(
        {
            "ratio_to_ours_one_by_one": together.median / others[0].median,
            "ratio_to_torch_one_by_one": together.median / others[1].median,
            "ratio_to_bytes_alone": together.median / others[2].median,
            "tensors": tensors,
            "bytes": found.whole_bytes,
            "received_bytes": found.received_bytes,
            "minimum_bytes": found.minimum_bytes,
            "bucket_bytes": bucket_bytes,
            "ranks": ranks,
            "transport": chosen("cpu").name,
            "rounds": len(together.seconds),
            "median_s": {name: times.median for name, times in zip(_NAMES, found.times, strict=True)},
            "fastest_s": {name: times.fastest for name, times in zip(_NAMES, found.times, strict=True)},
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": {**versions(), "machine": platform.platform(), "cores": num_cores()},
        },
        json_to,
    )
    if found.received_bytes != found.minimum_bytes:
        raise click.ClickException("redistribute_many has moved other bytes than single redistributions")


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    many(prog_name="python -m benchmarks.redistribution.many")
