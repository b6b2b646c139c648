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

from tritondt.cli.bench.harness import FEWEST_ITERATIONS, own_seconds
from tritondt.comm.objects import gather_objects

# Starts a collective, and returns what waits for its end.
Issue = Callable[[], Callable[[], object]]

# A product of this size takes some 20 us on a core, so that a millisecond is met within a few percent.
_LENGTH = 96
_NUM_TRIALS = 200
# Standard error of a median, in units of the interquartile range over the root of the number of samples, of a normal
# distribution: 1.253 sigma, of which the range has 1.349.
_ERROR_OF_MEDIAN = 1.253 / 1.349


@dataclass(frozen=True)
class Overlap:
    """Medians over iterations of the slowest rank's time: the collective alone, the compute alone, and both at once.

    `noise_s` is how far chance may have moved the time that both save: twice the standard error of the median, over
    iterations, of call + compute - both. It is None with fewer than 5 iterations.
    """

    alone_s: float
    compute_s: float
    both_s: float
    noise_s: float | None

    @classmethod
    def of(cls, alone: Sequence[float], compute: Sequence[float], both: Sequence[float]) -> Overlap:
        """Overlap of seconds that were taken in turns, iteration by iteration.

        >>> Overlap.of([2.0] * 9, [4.0] * 9, [5.0] * 9)
        Overlap(alone_s=2.0, compute_s=4.0, both_s=5.0, noise_s=0.0)
        """
        saved = [one + other - at_once for one, other, at_once in zip(alone, compute, both, strict=True)]
        noise_s = None
        if len(saved) >= FEWEST_ITERATIONS:
            low, _, high = statistics.quantiles(saved, n=4)
            noise_s = 2 * _ERROR_OF_MEDIAN * (high - low) / math.sqrt(len(saved))
        return cls(statistics.median(alone), statistics.median(compute), statistics.median(both), noise_s)

    @property
    def share(self) -> float | None:
        """Share of the shorter that ran beside the longer, from 0 to 1; 0 where both took longer than in turn.

        None where it cannot be measured: the noise is more than half of the shorter, or not known, or both at once took
        less time than the longer alone by more than the noise.

        >>> Overlap(0.002, 0.004, 0.005, 0.0001).share, Overlap(0.002, 0.004, 0.007, 0.0001).share
        (0.5, 0.0)
        >>> Overlap(0.002, 0.004, 0.005, 0.0011).share, Overlap(0.002, 0.004, 0.003, 0.0001).share
        (None, None)
        """
        shorter, hidden_s = min(self.alone_s, self.compute_s), self.alone_s + self.compute_s - self.both_s
        if self.noise_s is None or self.noise_s > shorter / 2 or hidden_s > shorter + self.noise_s:
            return None
        return min(max(hidden_s / shorter, 0.0), 1.0)


def overlaps(issues: Sequence[Issue], compute_s: float, num_iterations: int) -> list[Overlap]:
    """Overlap of each call with a compute of so many seconds, all timed in turns; a collective call."""
    compute = _compute(compute_s)
    timed = [compute, *(part for issue in issues for part in (_waited(issue), _beside(issue, compute)))]
    own_seconds(timed, 1)
    own = own_seconds(timed, num_iterations)
    slowest = torch.tensor(gather_objects(own.tolist()), dtype=torch.float64).amax(0)
    computed, *others = slowest.tolist()
    return [Overlap.of(alone, computed, both) for alone, both in zip(others[::2], others[1::2], strict=True)]


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
