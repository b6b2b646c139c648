"""The host's time of calls that return something to wait for."""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

CALLS = 20
_PROFILED_CALLS = 3000

Issue = Callable[[], Any]  # what it returns has a method `wait`


class Times(NamedTuple):
    """Microseconds of a call until it returns, and until the wait for it has too; and the latter's fastest round."""

    issued_us: float
    waited_us: float
    fastest_us: float


def times_in_turns(sides: Mapping[str, Issue], rounds: int) -> dict[str, Times]:
    """Medians over rounds, in which the sides take turns; a round's time is the mean of its calls'."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            for _ in range(rounds + 1):
                for name, issue in sides.items():
                    found[name].append(_round(issue))
    finally:
        gc.enable()
    return {name: _summary(rounds_of_it[1:]) for name, rounds_of_it in found.items()}


def _round(issue: Issue) -> tuple[float, float]:
    """Microseconds until a call returns, and until the wait has."""
    started, waiting = time.perf_counter(), 0.0
    for _ in range(CALLS):
        work = issue()
        came_back = time.perf_counter()
        work.wait()
        waiting += time.perf_counter() - came_back
    both = time.perf_counter() - started
    return (both - waiting) / CALLS * 1e6, both / CALLS * 1e6


def _summary(rounds: list[tuple[float, float]]) -> Times:
    issued, waited = zip(*rounds, strict=True)
    return Times(statistics.median(issued), statistics.median(waited), min(waited))


def profile_of(issue: Issue) -> str:
    """Where the time of a call and its wait goes, by function."""
    profile = cProfile.Profile()
    with torch.no_grad(), profile:
        for _ in range(_PROFILED_CALLS):
            issue().wait()
    lines: list[str] = []
    stream: Any = type("Lines", (), {"write": lambda _, text: lines.append(text)})()
    pstats.Stats(profile, stream=stream).sort_stats("tottime").print_stats(45)
    return "".join(lines)
