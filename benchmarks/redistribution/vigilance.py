"""Cost of a watch over exchanges that do not fail: watchdog, flight recorder and the order of issue together.

python -m benchmarks.redistribution.vigilance [--ranks N] [--calls N] [--json [FILE]]

The other side is the same communicator with an `exchange` that checks devices and moves: nothing is recorded, no
thread is refused, no queue is asked. The watchdog's thread sleeps beside both: it looks twice a second.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import geometric_mean
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import tritondt as T
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings
from tritondt.comm import world
from tritondt.comm.communicator import Transfer
from tritondt.planning.exchange import Exchange

_PAIRS = (("S0", "R"), ("S0", "S1"), ("P", "R"), ("P", "S1"))
_SIZES = ((64, 96), (1023, 1025), (1024, 1024))
_CALLS, _TURNS = 500, 100
_WARM_UP_CALLS = 20
_MOST_ADDED_US = 1.0
_MOST_RATIO = 1.02
_NOTHING = Transfer(Exchange((), (), (), (1,)), ((),), ((),), (torch.float32,), (None,), 1, "nothing")


class NoRecorder:
    """A recorder that records nothing, as the communicator calls it."""

    def state(self, record: int, state: int, peer: int = -1) -> None:
        """Nothing."""


@contextmanager
def careless(communicator: Any) -> Iterator[None]:
    """Takes recording and order away from a communicator."""
    recorder = communicator._recorder

    def exchange(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], transfer: Transfer) -> None:
        communicator._check_devices(sources, transfer)
        plan, record = communicator._plan(transfer)
        communicator._move(sources, targets, plan, record, transfer)

    communicator._recorder, communicator.exchange = NoRecorder(), exchange
    try:
        yield
    finally:
        del communicator.exchange
        communicator._recorder = recorder


def call_us(communicator: Any) -> tuple[float, float]:
    """Microseconds of an exchange that moves nothing, watched and not: the fastest of many short turns."""
    tensor = [torch.empty(0)]

    def turn() -> float:
        return timeit.timeit(lambda: communicator.exchange(tensor, tensor, _NOTHING), number=_CALLS) / _CALLS * 1e6

    turn()
    watched, unwatched = [], []
    for _ in range(_TURNS):
        watched.append(turn())
        with careless(communicator):
            unwatched.append(turn())
    return min(watched), min(unwatched)


def measure_on_rank(send: Callable[[object], None], calls: int) -> tuple[float, float, list[tuple[float, float]]]:
    """Microseconds of a call with and without watching, then those of every case with and without."""
    torch.set_num_threads(1)
    mesh = T.Mesh((dist.get_world_size(),))
    communicator: Any = world.current().communicator(mesh.ranks)
    return *call_us(communicator), [_times_us(communicator, mesh, *case, calls) for case in cases()]


def cases() -> list[tuple[str, str, tuple[int, int]]]:
    """Source, target and shape of everything that is redistributed."""
    return [(source, target, shape) for shape in _SIZES for source, target in _PAIRS]


def _times_us(
    communicator: Any, mesh: T.Mesh, source: str, target: str, shape: tuple[int, int], calls: int
) -> tuple[float, float]:
    """Median microseconds of a redistribution, watched and not, of the ranks' mean; a collective call."""
    meta = T.TensorMeta.contiguous(shape)
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
    local = torch.zeros(before.local_shape)
    own_ns = torch.zeros(2, calls, dtype=torch.float64)

    def run() -> int:
        start = time.perf_counter_ns()
        T.redistribute(local, before, after)
        return time.perf_counter_ns() - start

    for _ in range(_WARM_UP_CALLS):
        run()
    # One call of either, and who is first changes: whatever else the machine does meets both.
    for call in range(calls):
        for is_watched in (True, False) if call % 2 else (False, True):
            if is_watched:
                own_ns[0, call] = run()
            else:
                with careless(communicator):
                    own_ns[1, call] = run()
    dist.all_reduce(own_ns)
    watched, unwatched = (own_ns / dist.get_world_size() / 1e3).median(dim=1).values.tolist()
    return watched, unwatched


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--calls", type=click.IntRange(min=9), default=1001, help="Calls of each case, of either kind.")
@json_option
def vigilance(ranks: int, calls: int, json_to: str | None) -> None:
    """Time redistribution with and without watchdog, flight recorder and order of issue."""
    console = Console(stderr=is_printed(json_to))
    found: Any = run_on_ranks(ranks, measure_on_rank, calls, on_message=lambda _: None)[0]
    with_us, without_us, times = found
    table = Table("case", "watched us", "unwatched us", "ratio")
    rows = []
    for (source, target, shape), (watched, unwatched) in zip(cases(), times, strict=True):
        ratio = watched / unwatched
        rows.append({"source": source, "target": target, "shape": shape, "ratio": ratio})
        table.add_row(
            f"{shape[0]} x {shape[1]}, {source} -> {target}",
            f"{watched:.1f}",
            f"{unwatched:.1f}",
            f"{ratio:.3f}",
        )
    result = {
        "benchmark": "vigilance",
        **surroundings(),
        "ranks": ranks,
        "calls": calls,
        "added_us": with_us - without_us,
        "added_us_limit": _MOST_ADDED_US,
        "ratio": geometric_mean(row["ratio"] for row in rows),
        "ratio_limit": _MOST_RATIO,
        "cases": rows,
    }
    console.print(table)
    console.print(f"a call: {with_us:.2f} us watched, {without_us:.2f} us not: {result['added_us']:.2f} us more")
    console.print(f"geometric mean of the ratios: {result['ratio']:.3f} (at most {_MOST_RATIO})")
    write_json(result, json_to)


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    vigilance(prog_name="python -m benchmarks.redistribution.vigilance")
