"""Timing of several implementations of one job on all ranks, in turns, so that noise meets all of them alike.

Ratios of times have confidence intervals, by resampling of iterations."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

import torch
import torch.distributed as dist

from tritondt.cli.bench import SLOWEST_RANK, WARM_UP_ROUNDS

Run = Callable[[], object]
Result = TypeVar("Result")

# A median of fewer rounds says little on a machine that does other things.
_FEWEST_ROUNDS = 9
# nccl-tests' numbers for which of the ranks' times is reported.
_RANK_0, _MEAN, _FASTEST_RANK = range(SLOWEST_RANK)
_REDUCTIONS = {_MEAN: dist.ReduceOp.SUM, _FASTEST_RANK: dist.ReduceOp.MIN, SLOWEST_RANK: dist.ReduceOp.MAX}


def percentile(values: Sequence[float], percent: float) -> float:
    """Smallest value that is at least as large as `percent` of all, the nearest rank.

    >>> percentile([4, 1, 3, 2], 50), percentile([4, 1, 3, 2], 99)
    (2, 4)
    """
    return sorted(values)[max(ceil(percent / 100 * len(values)) - 1, 0)]


def ms_text(seconds: float) -> str:
    """Milliseconds, with three digits behind the point below 10 ms and one above.

    >>> ms_text(0.00123456), ms_text(0.0123456)
    ('1.235', '12.3')
    """
    return f"{seconds * 1e3:.3f}" if seconds < 10e-3 else f"{seconds * 1e3:.1f}"


def synchronized(run: Callable[[], Result]) -> Callable[[], Result]:
    """A run that ends when the GPU has done what it asked for."""

    def run_to_its_end() -> Result:
        result = run()
        torch.cuda.synchronize()
        return result

    return run_to_its_end


@dataclass(frozen=True)
class Times:
    """Seconds of every round: of its slowest rank, where nothing else was asked for."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the middle round."""
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """Seconds of the best round, the figure that other programs on the machine disturb least."""
        return min(self.seconds)


def time_interleaved(
    runs: Sequence[Run],
    most_rounds: int,
    budget_s: float,
    warm_up_rounds: int = WARM_UP_ROUNDS,
    average: int = SLOWEST_RANK,
) -> list[Times]:
    """Times of every implementation, from the same rounds; a collective call, with one result on all ranks.

    As many rounds as `budget_s` seconds have room for, but at least 9, and never above `most_rounds`. `average` says
    which of the ranks' times is a round's, by nccl-tests' number (`-a`).
    """
    warm_up = _rounds(runs, warm_up_rounds, SLOWEST_RANK)
    seconds = sum(times.seconds[-1] for times in warm_up)
    return _rounds(runs, min(most_rounds, max(_FEWEST_ROUNDS, int(budget_s / seconds))), average)


def _rounds(runs: Sequence[Run], num_rounds: int, average: int) -> list[Times]:
    own_s = own_seconds(runs, num_rounds)
    if average == _RANK_0:
        dist.broadcast(own_s, 0)
    else:
        dist.all_reduce(own_s, _REDUCTIONS[average])
    if average == _MEAN:
        own_s /= dist.get_world_size()
    return [Times(tuple(found)) for found in own_s.tolist()]


def own_seconds(runs: Sequence[Run], num_rounds: int) -> torch.Tensor:
    """Seconds on this rank, of each run (dim 0) in each round (dim 1); a collective call.

    The runs take turns in the orders of `turns`, and a barrier that is not timed precedes each run.
    """
    own_s = torch.zeros(len(runs), num_rounds, dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        for number, order in zip(range(num_rounds), turns(len(runs)), strict=False):
            for which in order:
                own_s[which, number] = timed(runs[which])
    finally:
        gc.enable()
    return own_s


def turns(num_runs: int) -> Iterator[tuple[int, ...]]:
    """Orders of the runs in round after round, without end: drawn at random, alike on all ranks, and then reversed.

    A disturbance that comes back every few calls, as states of a connection do, would otherwise meet the same run again
    and again: on Gloo two equal loops were 20 % apart where six orders came in turn.

    >>> from itertools import islice
    >>> list(islice(turns(3), 4))
    [(0, 2, 1), (1, 2, 0), (1, 2, 0), (0, 2, 1)]
    """
    order, draw = list(range(num_runs)), random.Random(0)
    while True:
        draw.shuffle(order)
        yield tuple(order)
        yield tuple(reversed(order))


def timed(run: Run) -> float:
    """Seconds of one run on this rank, after a barrier; its result is freed after the clock has stopped."""
    dist.barrier()
    started = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - started
    del result
    return seconds


# Fewer iterations say too little of their own spread for an interval.
FEWEST_ITERATIONS = 5
_NUM_RESAMPLES = 1000
_CONFIDENCE = 0.95

Samples = Sequence[float]


@dataclass(frozen=True)
class Ratio:
    """Geometric mean, over cases, of one side's median time in units of the other's; with a 95 % interval.

    The interval is None where a case has fewer than 5 iterations.
    """

    mean: float
    interval: tuple[float, float] | None
    num_cases: int

    @property
    def verdict(self) -> str:
        """Verdict of the interval: faster, slower, no difference, or too few iterations where there is none.

        >>> Ratio(0.8, (0.7, 0.9), 3).verdict, Ratio(0.98, (0.9, 1.1), 3).verdict
        ('faster', 'no difference')
        """
        if self.interval is None:
            return "too few iterations"
        low, high = self.interval
        return "faster" if high < 1 else "slower" if low > 1 else "no difference"

    def __str__(self) -> str:
        cases = f"{self.num_cases} case{'s' if self.num_cases != 1 else ''}"
        if self.interval is None:
            return (
                f"{self.mean:.3f} over {cases}; {self.verdict} for an interval: {FEWEST_ITERATIONS} or more are needed"
            )
        low, high = self.interval
        return f"{self.mean:.3f} (95 % interval {low:.3f} to {high:.3f}) over {cases}: {self.verdict}"


def ratio_of(pairs: Sequence[tuple[Samples, Samples]], in_turns: bool) -> Ratio:
    """Ratio of the first to the second times of each case.

    `in_turns` says that times of one place were measured one after the other: they are drawn together, so that what
    disturbed both disturbs the ratio no more.

    >>> ratio_of([([1.0] * 9, [2.0] * 9), ([2.0] * 9, [1.0] * 9)], in_turns=True)
    Ratio(mean=1.0, interval=(1.0, 1.0), num_cases=2)
    """
    generator = torch.Generator().manual_seed(0)
    logs, resampled = [], torch.zeros(_NUM_RESAMPLES, dtype=torch.float64)
    for ours, theirs in pairs:
        own, other = (torch.tensor(seconds, dtype=torch.float64) for seconds in (ours, theirs))
        logs.append((own.quantile(0.5) / other.quantile(0.5)).log())
        drawn = torch.randint(len(own), (_NUM_RESAMPLES, len(own)), generator=generator)
        together = in_turns and len(own) == len(other)
        drawn_other = (
            drawn if together else torch.randint(len(other), (_NUM_RESAMPLES, len(other)), generator=generator)
        )
        resampled += (own[drawn].quantile(0.5, dim=1) / other[drawn_other].quantile(0.5, dim=1)).log()
    mean = float(torch.stack(logs).mean().exp())
    if min(min(len(ours), len(theirs)) for ours, theirs in pairs) < FEWEST_ITERATIONS:
        return Ratio(mean, None, len(pairs))
    tail = (1 - _CONFIDENCE) / 2
    low, high = ((resampled / len(pairs)).quantile(q).exp().item() for q in (tail, 1 - tail))
    return Ratio(mean, (low, high), len(pairs))
