"""Ratios of times with their confidence intervals, by resampling of iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
