"""Summary of measured redistributions against each other implementation: geometric means, and the worst case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from tritondt.cli.bench.harness import ms_text
from tritondt.cli.bench.measure import Measured, Ratio

# Single cases are judged only where the reference takes this long: below, the machine's noise alone
# makes torch differ from itself by 10 % in a third of the cases.
JUDGED_SECONDS = 5e-3


@dataclass(frozen=True)
class SizeMean:
    """Geometric means of our times over theirs, of all cases of one size.

    `ratio_median_up_to` takes in all smaller sizes as well.
    """

    size: str
    num_cases: int
    ratio: Ratio
    ratio_median_up_to: float


@dataclass(frozen=True)
class Summary:
    """Means over all cases, per size in ascending order, and the worst case that can be judged alone."""

    other: str
    ratio: Ratio
    sizes: tuple[SizeMean, ...]
    worst: Measured | None


def summarise(found: Sequence[Measured]) -> list[Summary]:
    """A summary for each other implementation, in the order in which they were asked for; none without a check."""
    others = dict.fromkeys(name for item in found for name in item.ratios)
    return [_summary(name, [item for item in found if name in item.ratios]) for name in others]


def _summary(other: str, compared: Sequence[Measured]) -> Summary:
    sizes = sorted({(item.case.numel, item.case.size) for item in compared})
    means = []
    for numel, size in sizes:
        own = [item for item in compared if item.case.size == size]
        up_to = [item for item in compared if item.case.numel <= numel]
        means.append(SizeMean(size, len(own), _mean(other, own), _mean(other, up_to).median))
    judged = [item for item in compared if item.others[other].fastest >= JUDGED_SECONDS]
    worst = max(judged, key=lambda item: item.ratios[other].fastest, default=None)
    return Summary(other, _mean(other, compared), tuple(means), worst)


def _mean(other: str, found: Sequence[Measured]) -> Ratio:
    ratios = [item.ratios[other] for item in found]
    return Ratio(geometric_mean(each.median for each in ratios), geometric_mean(each.fastest for each in ratios))


def summary_lines(summary: Summary, num_cases: int) -> list[str]:
    """A summary as text."""
    other, worst = summary.other, summary.worst
    lines = [
        f"time / {other}'s, geometric mean of {num_cases} cases: {summary.ratio.median:.3f} by medians, "
        f"{summary.ratio.fastest:.3f} by fastest"
    ]
    lines += [
        f"  {size.size}, {size.num_cases} cases: {size.ratio.median:.3f} by medians, "
        f"{size.ratio.fastest:.3f} by fastest; with all smaller sizes {size.ratio_median_up_to:.3f} by medians"
        for size in summary.sizes
    ]
    limit = f"{JUDGED_SECONDS * 1e3:.0f} ms"
    if worst is None:
        return [*lines, f"no case in which {other} takes {limit} or more"]
    return [
        *lines,
        f"worst by fastest where {other} takes {limit} or more: {worst.ratios[other].fastest:.3f} in {worst.case} "
        f"({ms_text(worst.ours.fastest)} ms, {other} {ms_text(worst.others[other].fastest)} ms, "
        f"{len(worst.ours.seconds)} rounds)",
    ]


def summary_fields(summary: Summary) -> dict[str, Any]:
    """A summary as fields of JSON, but for its worst case."""
    return {
        "ratio_median": summary.ratio.median,
        "ratio_fastest": summary.ratio.fastest,
        "sizes": {
            size.size: {
                "cases": size.num_cases,
                "ratio_median": size.ratio.median,
                "ratio_fastest": size.ratio.fastest,
                "ratio_median_up_to": size.ratio_median_up_to,
            }
            for size in summary.sizes
        },
    }
