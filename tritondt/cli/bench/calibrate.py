"""The command `bench calibrate`: prices of links, collectives, launches, copies and matmuls, for TRITONDT_COSTS."""

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
from tritondt.cli.bench.json_result import is_printed, write_json
from tritondt.cli.outputs import is_first
from tritondt.cli.surroundings import surroundings
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.tables import copy_table

Run = Callable[[], object]
Send = Callable[[object], None]
# Messages of two sizes give a line: what one takes of any size, and what each byte adds.
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 24
_COPY_BYTES = 1 << 26
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name from 2.13 on
_MATMUL = {"cpu": 1024, "cuda": 8192}


class Asked(NamedTuple):
    """The measurement that ranks are asked for: type of device, number of rounds, and sizes divided by `shrink`.

    Collectives are measured where plans may have them: on GPUs, by NCCL.
    """

    device_type: str
    rounds: int
    shrink: int
    num_ranks: int = 2
    collectives: bool = False


class Figures(NamedTuple):
    """Seconds: of a small and a large message each way, a launch, a copy, a matmul, and a small and a large all_gather.

    The last two are 0 where collectives are not measured.
    """

    small_s: float
    large_s: float
    launch_s: float
    copy_s: float
    matmul_s: float
    small_gather_s: float = 0.0
    large_gather_s: float = 0.0


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
    side, bandwidth = _side(asked), (large - _SMALL_BYTES) / moved_s
    return {
        "host": {"latency_s": found.small_s, "bandwidth": round(bandwidth, 3)},
        "copy_bandwidth": round(copied / max(found.copy_s - found.launch_s, 1e-9), 3),
        "flop_rate": round(2 * side**3 / found.matmul_s, 3),
        "launch_s": found.launch_s if asked.device_type == "cuda" else 0.0,
        **(_collective_prices(found, asked, bandwidth) if asked.collectives else {}),
    }


def _collective_prices(found: Figures, asked: Asked, bandwidth: float) -> dict[str, float]:
    """Seconds that a collective takes beside a ring's messages, and how much faster than those it moves bytes.

    >>> asked = Asked("cuda", 1, 1, 8, True)
    >>> gathered_s = [5e-6 + 7 * (2e-6 + part / 6e11) for part in (_SMALL_BYTES, _LARGE_BYTES // 8)]
    >>> _collective_prices(Figures(2e-6, 5e-5, 1e-5, 1e-3, 1e-2, *gathered_s), asked, 3e11)
    {'collective_launch_s': 5e-06, 'collective_speedup': 2.0}
    """
    hops, small, large = asked.num_ranks - 1, _SMALL_BYTES, _gathered_bytes(asked)
    byte_s = max(found.large_gather_s - found.small_gather_s, 1e-9) / (hops * (large - small))
    launch_s = found.small_gather_s - hops * (found.small_s + small * byte_s)
    return {
        "collective_launch_s": max(round(launch_s, 9), 0.0),
        "collective_speedup": max(round(1 / (byte_s * bandwidth), 3), 1e-3),
    }


def _gathered_bytes(asked: Asked) -> int:
    """Bytes that each rank gives in a large all_gather, more than in a small one."""
    return max(_LARGE_BYTES // asked.shrink // asked.num_ranks, 2 * _SMALL_BYTES)


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
    matmul, gathers = _seconds(lambda: left @ right, asked), (0.0, 0.0)
    if asked.collectives:
        small_gather, large_gather = (
            _seconds(_gather(num_bytes, device, group), asked) for num_bytes in (_SMALL_BYTES, _gathered_bytes(asked))
        )
        gathers = small_gather, large_gather
    return Figures(small, large, launch, copy, matmul, *gathers)


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


def _gather(num_bytes: int, device: torch.device, group: Any) -> Run:
    """An all_gather of so many bytes from each rank."""
    given = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    gathered = torch.zeros(num_bytes * dist.get_world_size(), dtype=torch.uint8, device=device)
    return lambda: _all_gather(gathered, given, group)


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


def calibrate(ranks: int | None, device_type: str, rounds: int, shrink: int, json_to: str | None) -> None:
    """Measures prices, and prints them for TRITONDT_COSTS."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"prices on cuda were asked for; torch {torch.__version__} sees no CUDA device")
    num_ranks = joined_ranks.join(ranks, 2)
    asked = Asked(device_type, rounds, shrink, num_ranks, collectives=device_type == "cuda")
    found: list[Figures] = []

    def add(message: object) -> None:
        assert isinstance(message, Figures), f"ranks send figures, not {message!r}"
        found.append(message)

    status, errors = joined_ranks.run(num_ranks, measure_on_rank, asked, add)
    if status:
        raise click.ClickException("; ".join(errors))
    if is_first():
        prices = {device_type: prices_of(found[0], asked)}
        click.echo(f"export TRITONDT_COSTS='{json.dumps(prices)}'", err=is_printed(json_to))
        write_json({"benchmark": "calibrate", **surroundings(), "ranks": num_ranks, "prices": prices}, json_to)
    joined_ranks.leave()
