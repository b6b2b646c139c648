"""The host's time of calls that return something to wait for."""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

CALLS = 20
# After other sides, the first calls are slower: 98, 42 and 36 us down to 28 for the twentieth of a redistribution.
_WARM_UP_CALLS = 20
# How much longer than in its fastest hundredth of rounds the loop may take on a machine at full speed.
_SLOWER = 0.15
_PROFILED_CALLS = 3000

Issue = Callable[[], Any]  # what it returns has a method `wait`
Side = TypeVar("Side", bound=Hashable)


class Times(NamedTuple):
    """Microseconds of a call until it returns, and until the wait for it has too; and the latter's fastest round.

    The first two are medians of the rounds in which the machine was at full speed, as far as this run saw it: a share
    of `full_speed` of all. The loop beside those took `loop_us`, by which runs can be told apart. Where no round was,
    the share is 0, and the medians are of those in which the loop was fastest.
    """

    issued_us: float
    waited_us: float
    fastest_us: float
    full_speed: float
    loop_us: float


class Round(NamedTuple):
    """Microseconds of a round's calls until they return and until their waits have; and the slower loop around it."""

    issued_us: float
    waited_us: float
    loop_us: float


def times_in_turns(sides: Mapping[Side, Issue], rounds: int) -> dict[Side, Times]:
    """Medians over rounds, in which the sides take turns; a round's time is the mean of its calls'.

    A core that shares its units with another program's takes up to twice as long for seconds at a time. So a loop that
    is always the same runs before and after each round, and tells whether the machine was at full speed meanwhile.
    """
    found: dict[Side, list[Round]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            for _ in range(rounds + 1):
                for name, issue in sides.items():
                    before = _loop()
                    issued, waited = _round(issue)
                    found[name].append(Round(issued, waited, max(before, _loop())))
    finally:
        gc.enable()
    loops = sorted(each.loop_us for rounds_of_it in found.values() for each in rounds_of_it)
    at_full_speed = loops[len(loops) // 100] * (1 + _SLOWER)
    return {name: summary(rounds_of_it[1:], at_full_speed) for name, rounds_of_it in found.items()}


def _loop() -> float:
    """Microseconds of a loop in Python, some 30."""
    started, total = time.perf_counter(), 0
    for number in range(1000):
        total += number
    return (time.perf_counter() - started) * 1e6


def _round(issue: Issue) -> tuple[float, float]:
    """Microseconds until a call returns, and until the wait has; of calls whose code is in the core's caches."""
    for _ in range(_WARM_UP_CALLS):
        issue().wait()
    started, waiting = time.perf_counter(), 0.0
    for _ in range(CALLS):
        work = issue()
        came_back = time.perf_counter()
        work.wait()
        waiting += time.perf_counter() - came_back
    both = time.perf_counter() - started
    return (both - waiting) / CALLS * 1e6, both / CALLS * 1e6


def summary(rounds: Sequence[Round], at_full_speed_us: float) -> Times:
    """The times of some rounds, where the loop took no more than `at_full_speed_us` on a machine at full speed."""
    fastest = min(each.loop_us for each in rounds)
    steady = [each for each in rounds if each.loop_us <= max(at_full_speed_us, fastest)]
    return Times(
        statistics.median(each.issued_us for each in steady),
        statistics.median(each.waited_us for each in steady),
        min(each.waited_us for each in rounds),
        len(steady) / len(rounds) if fastest <= at_full_speed_us else 0.0,
        statistics.median(each.loop_us for each in steady),
    )


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
