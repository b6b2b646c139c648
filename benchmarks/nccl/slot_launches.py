"""Time of packs and unpacks of slots, which await and publish in 32 programs: on one GPU, against plain copies.

    python -m benchmarks.nccl.slot_launches [--ranks N] [--rows N] [--columns N] [--rounds N] [--dry] [--json FILE]

All ranks are in one process and their launches in one stream, each behind those that it awaits: nobody waits, and no
link is crossed. The plain side copies the same bytes between the same places, without signals and with as many programs
as there are tiles. Both are checked to give the same, and timed in turns by the device's clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.harness.doubled import doubled
from tests.harness.slots_of_ranks import SlotsOfRanks
from tritondt.cli.surroundings import surroundings
from tritondt.kernels.tables import TritonMaker

_CASES = (("S0", "S1"), ("S1", "S0"), ("S0", "R"), ("P", "S0"))
SLOTS, PLAIN = "slots", "plain copies"


class PlainMaker(TritonMaker):
    """Tables of the same boxes that await and publish nothing, and always take the first slot."""

    def copy_table(self, boxes: Any, device: torch.device, slots: Any = None) -> Any:
        """A table of copies."""
        return super().copy_table(boxes, device)

    def reduce_table(
        self, boxes: Any, op: str, dtype: str, divisor: int, device: torch.device, slots: Any = None
    ) -> Any:
        """A table of reductions."""
        return super().reduce_table(boxes, op, dtype, divisor, device)


class Side:
    """A redistribution on all ranks, by tables of one maker."""

    def __init__(self, maker: TritonMaker, source: str, target: str, size: int, whole: torch.Tensor) -> None:
        with doubled(whole.device.type, table_maker=maker):
            self.ranks = SlotsOfRanks(size, 4 * size * whole.nbytes + (1 << 16), whole.device)
            self.plans = self.ranks.plans(source, target, whole)
        parts = [self.ranks.part(whole, source, rank) for rank in range(size)]
        self.held = [part * (rank + 1) for rank, part in enumerate(parts)]
        self.results = [torch.zeros_like(self.ranks.part(whole, target, rank)) for rank in range(size)]

    def run(self) -> None:
        """Packs on all ranks, then unpacks."""
        for plan, local in zip(self.plans, self.held, strict=True):
            self.ranks.pack(plan, local)
        for plan, local, result in zip(self.plans, self.held, self.results, strict=True):
            self.ranks.unpack(plan, local, result)

    @property
    def num_launches(self) -> int:
        """Launches of a rank; of the one that has most."""
        return max(
            sum(getattr(table, "num_launches", 1) for table in (plan.pack, plan.unpack, *plan.reduces) if table)
            for plan in self.plans
        )


def timed(runs: Sequence[Callable[[], None]], rounds: int, device: torch.device) -> list[float]:
    """Median seconds of each, in turns."""
    if device.type == "cuda":
        from tritondt.kernels.gpu.device_time import device_seconds  # noqa: PLC0415  it needs a GPU

        found = [[device_seconds(run, repeats=3) for run in runs] for _ in range(rounds)]
    else:
        found = [[_host_seconds(run) for run in runs] for _ in range(rounds)]
    return [median(times) for times in zip(*found, strict=True)]


def _host_seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measured(source: str, target: str, size: int, shape: tuple[int, int], rounds: int, kind: str) -> dict[str, Any]:
    """Seconds by side, launches and ratio; AssertionError where the sides differ."""
    device = torch.device(kind)
    whole = (torch.arange(shape[0] * shape[1], device=device) % 1009).to(torch.float32).reshape(shape)
    sides = {SLOTS: Side(TritonMaker(), source, target, size, whole)}
    sides[PLAIN] = Side(PlainMaker(), source, target, size, whole)
    for _ in range(3):  # both slots, and the first again
        for side in sides.values():
            for result in side.results:
                result.fill_(-1)
            side.run()
        found, expected = (side.results for side in sides.values())
        if not all(torch.equal(own, other) for own, other in zip(found, expected, strict=True)):
            raise AssertionError(f"{source} -> {target} of {shape} on {size} ranks: slots and plain copies differ")
    seconds = dict(zip(sides, timed([side.run for side in sides.values()], rounds, device), strict=True))
    return {
        "case": f"{source} -> {target}",
        "seconds": seconds,
        "launches": sides[SLOTS].num_launches,
        "ratio": seconds[SLOTS] / seconds[PLAIN],
    }


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nccl.slot_launches", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="ranks, all in this process  [default: 4]")
    add("--rows", type=int, default=1024, help="rows of the tensor, float32  [default: 1024]")
    add("--columns", type=int, default=1024, help="columns of the tensor  [default: 1024]")
    add("--rounds", type=int, default=9, help="times that each side takes its turn  [default: 9]")
    add("--dry", action="store_true", help="on the CPU, by Triton's interpreter: that it runs")
    add("--json", type=Path, help="file for the measurements")
    given = parser.parse_args(arguments)
    if not given.dry and not torch.cuda.is_available():
        sys.stderr.write("Error: this benchmark needs a CUDA device; --dry runs it without one, interpreted\n")
        return 1
    kind, shape = "cpu" if given.dry else "cuda", (given.rows, given.columns)
    found = [measured(*case, given.ranks, shape, given.rounds, kind) for case in _CASES]
    for each in found:
        times = ", ".join(f"{side} {seconds * 1e6:.1f} us" for side, seconds in each["seconds"].items())
        sys.stdout.write(f"  {each['case']}: {times}\n")
    ratios = ", ".join(f"{each['case']} {each['ratio']:.2f}" for each in found)
    most = max(each["launches"] for each in found)
    sys.stdout.write(f"slots of {given.ranks} ranks: {most} launches an exchange; time over plain copies: {ratios}\n")
    if given.json is not None:
        told = {"benchmark": "nccl_slot_launches", **surroundings(), "ranks": given.ranks, "shape": shape}
        given.json.write_text(json.dumps({**told, "cases": found}) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
