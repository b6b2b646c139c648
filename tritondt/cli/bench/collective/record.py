"""The request of a benchmark, alike on all ranks, records of its measurements, and the figures that follow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tritondt.cli.bench.breakdown import Breakdown
from tritondt.cli.bench.collective.case import Case
from tritondt.cli.bench.collective.overlap import Overlap


@dataclass(frozen=True)
class Timing:
    """Seconds of every iteration on every rank, and the number of wrong elements, None where nothing was checked."""

    seconds: tuple[tuple[float, ...], ...]
    num_wrong: int | None

    def time_s(self, average: int) -> float:
        """Time of an iteration: its mean on each rank, and of those what `-a` says."""
        means = self.rank_means_s
        return (means[0], statistics.fmean(means), min(means), max(means))[average]

    @property
    def rank_means_s(self) -> tuple[float, ...]:
        """Mean time of an iteration on each rank."""
        return tuple(map(statistics.fmean, self.seconds))

    @property
    def slowest_s(self) -> tuple[float, ...]:
        """Time of each iteration on the rank that took longest in it."""
        return tuple(map(max, zip(*self.seconds, strict=True)))

    @property
    def variation(self) -> float:
        """Standard deviation of `slowest_s` in units of its mean."""
        slowest = self.slowest_s
        return statistics.pstdev(slowest) / statistics.fmean(slowest)

    @property
    def rank_spread(self) -> float:
        """Slowest rank's mean minus the fastest one's, in units of the mean of all."""
        means = self.rank_means_s
        return (max(means) - min(means)) / statistics.fmean(means)

    @property
    def is_right(self) -> bool:
        """Whether the result was checked, and right."""
        return self.num_wrong == 0


@dataclass(frozen=True)
class Row:
    """Measurements of one case by one implementation; None where it was not run so.

    `note` says why there is nothing at all.
    """

    case: Case
    side: str
    out_of_place: Timing | None
    in_place: Timing | None
    note: str | None = None
    parts: Breakdown | None = None
    overlap: Overlap | None = None

    @property
    def timings(self) -> dict[str, Timing]:
        """The timings that the row has, by place."""
        both = {"out": self.out_of_place, "in": self.in_place}
        return {place: timing for place, timing in both.items() if timing is not None}


def num_wrong(rows: Sequence[Row]) -> int:
    """Number of wrong elements in all rows."""
    return sum(timing.num_wrong or 0 for row in rows for timing in row.timings.values())


def average_bus_bandwidth(rows: Sequence[Row], side: str, average: int) -> float | None:
    """Mean bus bandwidth of all rows of a side, out of place and in place, in 1e9 bytes a second; None without any."""
    found = [
        row.case.kind.bandwidths(row.case.size, row.case.num_ranks, timing.time_s(average))[1]
        for row in rows
        if row.side == side
        for timing in row.timings.values()
    ]
    return statistics.fmean(found) if found else None


@dataclass(frozen=True)
class Request:
    """Cases, and the names of the implementations that take turns in each.

    `device` is cpu or cuda; `check` is how often each is run and compared before it is timed, `iterations` how often
    it is timed after `warmup` runs that are not. With `breaks_down`, parts of the engine's moves are timed as well.
    `step` says how one size follows from the one before: times a factor, plus a number of bytes, or not at all (None).
    With `compute_ms`, each is issued beside a compute of so many milliseconds as well.
    """

    collective: str
    cases: tuple[Case, ...]
    sides: tuple[str, ...]
    iterations: int = 20
    warmup: int = 1
    check: int = 1
    average: int = 1
    device: str = "cpu"
    num_threads: int = 1
    breaks_down: bool = False
    step: float | int | None = None
    compute_ms: float = 0.0

    @property
    def step_text(self) -> str | None:
        """The step as nccl-tests' header says it; None where there is one size."""
        if self.step is None:
            return None
        return f"{self.step}(bytes)" if isinstance(self.step, int) else f"{self.step:g}(factor)"

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all cases."""
        return self.cases[0].num_ranks

    @property
    def buffer_bytes(self) -> int:
        """Most bytes that all ranks hold at once: inputs, results, both once more in place, and what is correct."""
        ranks = range(self.num_ranks)
        return max(
            sum(3 * case.itemsize * (case.input_length(rank) + case.output_length(rank)) for rank in ranks)
            for case in self.cases
        )


# Tables of 80 columns have room for nine letters.
_SHORT = {"shared-memory": "shared"}


def label(side: str) -> str:
    """Name of an implementation in tables: of one's own, the function's."""
    return _SHORT.get(side, side.rpartition(":")[2])
