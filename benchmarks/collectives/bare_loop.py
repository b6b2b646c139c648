"""Times that `python -m tritondt bench` reports of Gloo, against a loop of torch.distributed alone.

python -m benchmarks.collectives.bare_loop [--ranks N] [--rounds N] [--attempts N] [--json [FILE]]

Both call Gloo on the same tensors through the same group, whose connections are as fast for one as for the other. They
take turns, call by call, in orders drawn at random. A round is the mean of so many calls of each as fill 1.5 seconds:
single calls are up to 30 % apart, and the fastest of 25 rounds of a fifth of a second up to 10 %. Their fastest rounds,
each as long as its slowest rank, may differ by 5 % where the bare loop takes 5 ms or more. The bare loop has two turns,
as if it were two loops: where these differ by more than half of that, the machine and not the harness would decide, and
the case is measured again. Status 1 where a case differs, or stays undecided.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
import torch.distributed as dist

from tritondt.cli.bench.collective import backends
from tritondt.cli.bench.collective.case import make_case
from tritondt.cli.bench.collective.data import given
from tritondt.cli.bench.collective.sides import Call
from tritondt.cli.bench.harness import timed, turns
from tritondt.cli.bench.json_result import is_printed, json_option, write_json
from tritondt.cli.bench.sizes import bytes_text, parse_bytes
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.surroundings import surroundings

# torch 2.13's name, and that of before, which warns there.
_all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
COLLECTIVES = ("all_reduce", "all_gather", "broadcast")
_SIZES = ("16M", "64M")
# A case that is judged, how far harness and loop may be apart, and how far the loop may be from itself.
_JUDGED_S, _LIMIT, _LIMIT_OF_NOISE = 5e-3, 0.05, 0.025
# Calls of each side before the first round, and how long a round's calls of one side are to take together.
_WARM_UP_CALLS, _ROUND_S = 5, 1.5


@dataclass(frozen=True)
class Found:
    """Fastest rounds of one case, in seconds of a call on the slowest rank; the bare loop has two turns."""

    collective: str
    size: int
    attempt: int
    calls_a_round: int
    harness_s: float
    bare_s: float
    bare_again_s: float

    @property
    def difference(self) -> float:
        """Harness's time over the loop's, minus one."""
        return self.harness_s / self.bare_s - 1

    @property
    def noise(self) -> float:
        """Time of the loop's second turn over that of its first, minus one."""
        return self.bare_again_s / self.bare_s - 1

    @property
    def verdict(self) -> str:
        """The verdict of the case on the harness: undecided where the loop's two turns are too far apart."""
        if self.bare_s < _JUDGED_S:
            return "not judged"
        if abs(self.noise) > _LIMIT_OF_NOISE:
            return "undecided"
        return "agrees" if abs(self.difference) <= _LIMIT else "differs"


def measure(send: Callable[[object], None], rounds: int, attempts: int) -> None:
    """Measures every case on a rank, until it is decided, and sends each Found from rank 0."""
    for name in COLLECTIVES:
        for size in _SIZES:
            for attempt in range(1, attempts + 1):
                found = _measure(name, parse_bytes(size), attempt, rounds)
                if dist.get_rank() == 0:
                    send(found)
                if found.verdict != "undecided":
                    break


def _measure(name: str, size: int, attempt: int, rounds: int) -> Found:
    """A case on a group of its own; a collective call with one result."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = make_case(name, num_ranks, ("float", 4), "sum", 0, size, 0.0)
    assert case is not None, f"{size} bytes are enough for {num_ranks} ranks"
    group = dist.new_group(backend="gloo")
    assert group is not None, "all ranks are in the group"
    x = given(case, rank)
    out = x if name != "all_gather" else torch.empty(case.total)
    run = backends.bind(Call(case, rank, x, out, name != "all_gather", group))
    sides = (lambda: timed(run)), bare_loop(name, x, out, group), bare_loop(name, x, out, group)
    gc.collect()
    gc.disable()  # as the benchmark does
    calls = _calls_a_round(_seconds(sides, 1, _WARM_UP_CALLS))
    seconds = _seconds(sides, rounds, calls)
    gc.enable()
    dist.destroy_process_group(group)
    return Found(name, case.size, attempt, calls, *seconds.min(dim=1).values.tolist())


def _calls_a_round(warm_up: torch.Tensor) -> int:
    """Calls of each side that fill a round, by how long they took at first; equal on all ranks, as those times are."""
    return max(1, math.ceil(_ROUND_S / float(warm_up.min())))


def _seconds(sides: Sequence[Callable[[], float]], rounds: int, calls: int) -> torch.Tensor:
    """Seconds of a mean call of each side (dim 0) in each round (dim 1), of the slowest rank; a collective call."""
    seconds = torch.zeros(len(sides), rounds, calls, dtype=torch.float64)
    for place, order in zip(range(rounds * calls), turns(len(sides)), strict=False):
        for which in order:
            seconds[which, place // calls, place % calls] = sides[which]()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.mean(dim=2)


def bare_loop(name: str, x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], float]:
    """One turn of the loop: a barrier, the clock, one call, the clock."""

    def turn() -> float:
        dist.barrier()
        started = time.perf_counter()
        if name == "all_reduce":
            dist.all_reduce(x, group=group)
        elif name == "broadcast":
            dist.broadcast(x, 0, group)
        else:
            _all_gather_single(out, x, group)
        return time.perf_counter() - started

    return turn


@click.command(context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(2), default=2, help="Processes to start.")
@click.option("--rounds", type=click.IntRange(2), default=25, help="Rounds of each case.")
@click.option("--attempts", type=click.IntRange(1), default=5, help="Measurements of a case that stays undecided.")
@json_option
def main(ranks: int, rounds: int, attempts: int, json_to: str | None) -> None:
    """Time Gloo by the benchmark's harness and by a bare loop, in turns."""
    found: list[Found] = []

    def add(message: object) -> None:
        assert isinstance(message, Found), f"ranks send cases, not {message!r}"
        found.append(message)
        text = f"{message.collective:<11} {bytes_text(message.size):>5}  harness {message.harness_s * 1e3:8.2f} ms"
        text += f"  bare loop {message.bare_s * 1e3:8.2f} ms  {message.difference:+6.1%}"
        click.echo(f"{text}  bare loop again {message.noise:+6.1%}  {message.verdict}", err=is_printed(json_to))

    run_on_ranks(ranks, measure, rounds, attempts, on_message=add)
    last = {(case.collective, case.size): case for case in found}
    verdicts = [case.verdict for case in last.values()]
    result = {"benchmark": "bare_loop", **surroundings(), "ranks": ranks, "rounds": rounds}
    cases = [asdict(case) | {"difference": case.difference, "verdict": case.verdict} for case in found]
    write_json({**result, "cases": cases}, json_to)
    counted = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    click.echo(f"{len(verdicts)} cases, within {_LIMIT:.0%}: {counted}", err=is_printed(json_to))
    if {"differs", "undecided"} & set(verdicts):
        raise click.exceptions.Exit(1)


# The ranks that the benchmark starts import this file again, under another name.
if __name__ == "__main__":
    main(prog_name="python -m benchmarks.collectives.bare_loop")
