"""Figures and ratios of the times of all ranks, and whether they keep their limits. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

TORCH = "torch"
Seconds = Mapping[str, Sequence[float]]


class Limit(NamedTuple):
    """The most that a value may be, and the figure of all rounds that it is made of."""

    most: float
    figure: str


# By kind and number of ranks. "time" and "redistribution" are seconds over torch's until all has run, "host" the same
# until calls have returned; "overhead" is in microseconds, and "slots" over NCCL's messages. Two ranks on one GPU take
# turns, which the fastest round shows least.
LIMITS = {
    ("time", 1): Limit(1.05, "median"),
    ("host", 1): Limit(0.7, "median"),
    ("time", 2): Limit(1.15, "fastest"),
    ("redistribution", 2): Limit(0.6, "fastest"),
    ("overhead", 2): Limit(25.0, "median"),
    ("slots", 2): Limit(1.0, "fastest"),
}
_FIGURES: dict[str, Callable[[Sequence[float]], float]] = {"median": statistics.median, "fastest": min}


@dataclass(frozen=True)
class Measured:
    """Seconds of a call by side, and the values that are held against the limit, by side of ours."""

    kind: str
    case: str
    seconds: dict[str, float]
    values: dict[str, float]
    limit: float
    figure: str

    @property
    def holds(self) -> bool:
        """Whether every value is at its limit or below."""
        return all(value <= self.limit for value in self.values.values())


def slowest(of_ranks: Sequence[Seconds]) -> dict[str, list[float]]:
    """Each round's slowest rank.

    >>> slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}])
    {'a': [2.0, 5.0]}
    """
    return {side: [max(each) for each in zip(*(own[side] for own in of_ranks), strict=True)] for side in of_ranks[0]}


def judged(kind: str, case: str, of_ranks: Sequence[Seconds]) -> Measured:
    """Ours over torch's; for "overhead", microseconds of a redistribution beyond those of NCCL's calls."""
    limit = LIMITS[kind, len(of_ranks)]
    figure = _FIGURES[limit.figure]
    seconds = {side: float(figure(found)) for side, found in slowest(of_ranks).items()}
    if kind == "overhead":
        values = {"redistribution": (seconds["redistribution"] - seconds["nccl"]) * 1e6}
    else:
        other = "messages" if kind == "slots" else TORCH
        values = {side: own / seconds[other] for side, own in seconds.items() if side != other}
    return Measured(kind, case, seconds, values, limit.most, limit.figure)


def worst(found: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """By kind and side: the highest value, its case and the limit."""
    highest: dict[str, dict[str, Any]] = {}
    for item in found:
        for side, value in item.values.items():
            name = f"{item.kind}, {side}"
            if name not in highest or value > highest[name]["value"]:
                highest[name] = {"value": value, "limit": item.limit, "case": item.case}
    return highest


def table_of(found: Sequence[Measured]) -> str:
    """A line for each case."""
    rows = [("kind", "case", "us of a call", "value", "at most", "")]
    for item in found:
        seconds = ", ".join(f"{side} {own * 1e6:.1f}" for side, own in item.seconds.items())
        values = ", ".join(f"{side} {value:.2f}" for side, value in item.values.items())
        rows.append((item.kind, item.case, seconds, values, f"{item.limit:g}", "" if item.holds else "missed"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
