"""The command `bench calibrate`: prices of links, launches, copies and matmuls where it runs, for TRITONDT_COSTS."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist

from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.surroundings import surroundings
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.tables import copy_table

Run = Callable[[], object]
Send = Callable[[object], None]
# Messages of two sizes give a line: what one takes of any size, and what each byte adds.
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 24
_COPY_BYTES = 1 << 26
_MATMUL = {"cpu": 1024, "cuda": 8192}


class Asked(NamedTuple):
    """What ranks are asked to measure: on which type of device, in how many rounds, and sizes divided by `shrink`."""

    device_type: str
    rounds: int
    shrink: int


class Figures(NamedTuple):
    """Seconds: of a small and a large message each way, a launch, a copy and a matmul."""

    small_s: float
    large_s: float
    launch_s: float
    copy_s: float
    matmul_s: float


def prices_of(found: Figures, asked: Asked) -> dict[str, Any]:
    """Prices in the form of TRITONDT_COSTS.

    The link is that between ranks 0 and 1. A share of processors that a link keeps busy is not measured, nor a first
    connection. A copy is of bytes that are read and written once; a matmul is in bfloat16 on a GPU, on one thread in
    float32 on the CPU.

    >>> prices_of(Figures(2e-6, 52e-6, 1e-5, 1e-3, 1e-2), Asked("cuda", 1, 1))["host"]
    {'latency_s': 2e-06, 'bandwidth': 335523840000.0}
    """
    large, copied = _LARGE_BYTES // asked.shrink, _COPY_BYTES // asked.shrink
    moved_s = max(found.large_s - found.small_s, 1e-9)
    side = _side(asked)
    return {
        "host": {"latency_s": found.small_s, "bandwidth": round((large - _SMALL_BYTES) / moved_s, 3)},
        "copy_bandwidth": round(copied / max(found.copy_s - found.launch_s, 1e-9), 3),
        "flop_rate": round(2 * side**3 / found.matmul_s, 3),
        "launch_s": found.launch_s if asked.device_type == "cuda" else 0.0,
    }


def _side(asked: Asked) -> int:
    return max(_MATMUL[asked.device_type] // asked.shrink, 16)


def measure_on_rank(send: Send, asked: Asked) -> None:
    """Measures on all ranks side by side, as they would work; rank 0 sends the figures of the slowest."""
    if asked.device_type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        own = torch.tensor(measure(asked), dtype=torch.float64)
    finally:
        torch.set_num_threads(threads)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        send(Figures(*own.tolist()))


def measure(asked: Asked) -> Figures:
    """This rank's figures; a collective call."""
    device = torch.device(asked.device_type)
    # Tensors of a GPU go over NCCL, those of the CPU over the group that is there.
    group = dist.new_group(backend="nccl") if asked.device_type == "cuda" else None
    small, large = (
        _seconds(_swap(num_bytes, device, group), asked) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES // asked.shrink)
    )
    launch, copy = (_seconds(_copy(num_bytes, device), asked) for num_bytes in (64, _COPY_BYTES // asked.shrink))
    dtype = torch.bfloat16 if asked.device_type == "cuda" else torch.float32
    left, right = (torch.ones(_side(asked), _side(asked), dtype=dtype, device=device) for _ in range(2))
    return Figures(small, large, launch, copy, _seconds(lambda: left @ right, asked))


def _swap(num_bytes: int, device: torch.device, group: Any) -> Run:
    """Messages of ranks 0 and 1 to each other; the others wait for the next figure."""
    rank = dist.get_rank()
    if rank > 1:
        return lambda: None
    sent, arrived = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        peer = 1 - rank
        operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, arrived, peer, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


def _copy(num_bytes: int, device: torch.device) -> Run:
    """A copy by a table, as a pack is: rows of 64 bytes from every other place."""
    source = torch.zeros(2 * num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    table = copy_table([CopyBox(0, 0, 0, 0, 16, (num_bytes // 64, 4), (8, 1), (4, 1))], device)
    return lambda: table.run([source.data_ptr()], [target.data_ptr()], 1)


def _seconds(run: Run, asked: Asked) -> float:
    """Median seconds until all of a call has run."""
    synchronize = torch.cuda.synchronize if asked.device_type == "cuda" else _nothing_to_wait_for
    found = []
    for number in range(asked.rounds + 2):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        if number >= 2:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def _nothing_to_wait_for() -> None:
    """On the CPU what was called has run."""


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), help="Processes to start.  [default: 2, or the launcher's]")
@click.option("--device", "device_type", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where tensors are.")
@click.option("-n", "--rounds", type=click.IntRange(min=1), default=25, help="Rounds of each figure.")
@click.option("--shrink", type=click.IntRange(min=1), default=1, help="Sizes are divided by this.")
@json_option
def calibrate(ranks: int | None, device_type: str, rounds: int, shrink: int, json_to: str | None) -> None:
    """Measure the prices that plans are made by, between ranks 0 and 1 and on each, and print them for TRITONDT_COSTS.

    Under torchrun, MPI or srun it runs on the processes that are there.
    """
    if device_type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"prices on cuda were asked for; torch {torch.__version__} sees no CUDA device")
    asked = Asked(device_type, rounds, shrink)
    num_ranks = joined_ranks.join(ranks, 2)
    found: list[Figures] = []

    def add(message: object) -> None:
        assert isinstance(message, Figures), f"ranks send figures, not {message!r}"
        found.append(message)

    status, errors = joined_ranks.run(num_ranks, measure_on_rank, asked, add)
    if status:
        raise click.ClickException("; ".join(errors))
    if joined_ranks.is_first():
        prices = {device_type: prices_of(found[0], asked)}
        click.echo(f"export TRITONDT_COSTS='{json.dumps(prices)}'", err=is_printed(json_to))
        write_json({"benchmark": "calibrate", **surroundings(), "ranks": num_ranks, "prices": prices}, json_to)
    joined_ranks.leave()
