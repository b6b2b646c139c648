"""Time saved by large results that lie where earlier ones did: redistributions of 64 MB with the pool and without.

python -m benchmarks.redistribution.memory_pool [--ranks N] [--rounds N] [--json [FILE]]

The transport is the environment's (TRITONDT_TRANSPORT). Sides take turns in one run, and drop each result before the
next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean, median
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import tritondt as T
from tritondt import environment
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings
from tritondt.comm.transports.table import chosen
from tritondt.kernels import memory

_PAIRS = (("S0", "R"), ("S1", "R"), ("P", "R"), ("P", "S0"), ("S0", "S1"))
_SHAPE = (4096, 4096)
_WARM_UP_ROUNDS = 2


def measure_on_rank(send: Callable[[object], None], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of every pair with the pool and without, the slowest rank's of each round; a collective call."""
    torch.set_num_threads(1)
    mesh = T.Mesh((dist.get_world_size(),))
    bound = environment.pool_bytes()
    found = []
    for source, target in _PAIRS:
        held = T.full(_SHAPE, 1.0, device_mesh=mesh, placements=T.parse_placements(source))
        call = partial(held.redistribute, placements=T.parse_placements(target))
        sides: dict[int, list[float]] = {bound: [], 0: []}
        for number in range(_WARM_UP_ROUNDS + rounds):
            for most_bytes in (bound, 0) if number % 2 else (0, bound):
                memory.pool.most_bytes = most_bytes
                if not most_bytes:
                    memory.empty_cache()
                else:
                    call()  # fills the pool, which the other side has emptied
                taken_ms = _round_ms(call)
                if number >= _WARM_UP_ROUNDS:
                    sides[most_bytes].append(taken_ms)
        found.append({"source": source, "target": target, "pool_ms": sides[bound], "fresh_ms": sides[0]})
    return found


def _round_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of a call that begins on all ranks at once, of the slowest."""
    dist.barrier()
    start = time.perf_counter()
    call()
    taken = torch.tensor(1e3 * (time.perf_counter() - start))
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(min=2), default=4, help="Processes to start.")
@click.option("--rounds", type=click.IntRange(min=3), default=15, help="Rounds of each pair, on either side.")
@json_option
def memory_pool(ranks: int, rounds: int, json_to: str | None) -> None:
    """Time redistributions of 64 MB whose results lie where earlier ones did, and in new memory."""
    console = Console(stderr=is_printed(json_to))
    cases: Any = run_on_ranks(ranks, measure_on_rank, rounds, on_message=lambda _: None)[0]
    table = Table("case", "pool ms", "new memory ms", "medians", "fastest")
    for case in cases:
        pool, fresh = case["pool_ms"], case["fresh_ms"]
        case["ratio"], case["fastest_ratio"] = median(pool) / median(fresh), min(pool) / min(fresh)
        numbers = f"{median(pool):.1f}", f"{median(fresh):.1f}", f"{case['ratio']:.2f}", f"{case['fastest_ratio']:.2f}"
        table.add_row(f"{case['source']} -> {case['target']}", *numbers)
    result = {
        "benchmark": "memory_pool",
        **surroundings(),
        "transport": chosen("cpu").name,
        "ranks": ranks,
        "rounds": rounds,
        "shape": _SHAPE,
        "ratio": geometric_mean(case["ratio"] for case in cases),
        "fastest_ratio": geometric_mean(case["fastest_ratio"] for case in cases),
        "cases": cases,
    }
    console.print(table)
    console.print(f"geometric means: {result['ratio']:.2f} by medians, {result['fastest_ratio']:.2f} by fastest rounds")
    write_json(result, json_to)


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    memory_pool(prog_name="python -m benchmarks.redistribution.memory_pool")
