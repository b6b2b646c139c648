"""Overlap of a collective and a compute of given length: each alone, and both at once (`--compute-overlap MS`).

The collective is issued with async_op=True, matrices are multiplied, and it is waited for.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tritondt.cli.bench.harness import own_seconds
from tritondt.comm.objects import gather_objects

# Starts a collective, and returns what waits for its end.
Issue = Callable[[], Callable[[], object]]

# A product of this size takes some 20 us on a core, so that a millisecond is met within a few percent.
_LENGTH = 96
_NUM_TRIALS = 200


@dataclass(frozen=True)
class Overlap:
    """Medians over iterations of the slowest rank's time: the collective alone, the compute alone, and both at once."""

    alone_s: float
    compute_s: float
    both_s: float

    @property
    def share(self) -> float:
        """Share of the shorter that ran beside the longer; below 0 where both at once took longer than in turn.

        >>> Overlap(0.002, 0.004, 0.005).share
        0.5
        """
        return (self.alone_s + self.compute_s - self.both_s) / min(self.alone_s, self.compute_s)


def overlaps(issues: Sequence[Issue], compute_s: float, num_iterations: int) -> list[Overlap]:
    """Overlap of each call with a compute of so many seconds, all timed in turns; a collective call."""
    compute = _compute(compute_s)
    timed = [compute, *(part for issue in issues for part in (_waited(issue), _beside(issue, compute)))]
    own_seconds(timed, 1)
    own = own_seconds(timed, num_iterations)
    slowest = torch.tensor(gather_objects(own.tolist()), dtype=torch.float64).amax(0)
    alone, *others = (statistics.median(seconds) for seconds in slowest.tolist())
    return [Overlap(run_s, alone, both_s) for run_s, both_s in zip(others[::2], others[1::2], strict=True)]


def _waited(issue: Issue) -> Callable[[], None]:
    def run() -> None:
        issue()()

    return run


def _beside(issue: Issue, compute: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        wait = issue()
        compute()
        wait()

    return run


def _compute(seconds: float) -> Callable[[], None]:
    """Products of matrices that take so long on this rank; how many is found here, by trial."""
    x, out = torch.ones(_LENGTH, _LENGTH), torch.empty(_LENGTH, _LENGTH)
    torch.mm(x, x, out=out)
    trials = []
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        torch.mm(x, x, out=out)
        trials.append(time.perf_counter() - started)
    number = max(1, math.ceil(seconds / statistics.median(trials)))

    def compute() -> None:
        for _ in range(number):
            torch.mm(x, x, out=out)

    return compute
