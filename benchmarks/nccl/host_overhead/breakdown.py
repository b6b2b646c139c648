"""Where the host's time of an asynchronous redistribution goes, by parts of the library, without what measures it."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from benchmarks.nccl.host_overhead.timing import Issue
from benchmarks.nccl.stub_cuda import StubStreams
from tritondt.comm.nccl import stream_queue, streams
from tritondt.comm.nccl.stream_queue import StreamQueue
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.kernels.gpu.device_table import DeviceTable, Launch
from tritondt.redistribution import run

_CALLS = 4000
REST = "dispatch, the pending tensor, what holds the parts together"
# The time of a part is without that of other parts that it calls.
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "look-up of the plan": ((run, "compile_plan"),),
    "an exchange's program: fields, records, watch, messages": ((NcclCommunicator, "_issue"),),
    "pointers of the tables": ((DeviceTable, "run"),),
    "launches": ((DeviceTable, "launch"), (Launch, "run")),
    "events and streams": (
        (StubStreams, "follow"),
        (StubStreams, "on"),
        (StubStreams, "current"),
        (StubStreams, "is_capturing"),
        (StubStreams, "record"),
        (streams._On, "__enter__"),
        (streams._On, "__exit__"),
        (StreamQueue, "_let_go_ended"),
    ),
    "allocations": ((run, "allocate"), (stream_queue, "allocate")),
}


class _Stopwatch:
    """Nanoseconds of each part, and its calls."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        self.spent: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self.within: dict[str, int] = defaultdict(int)  # timed calls made by the part
        self._stack: list[list[Any]] = [[REST, 0]]

    @property
    def spent_in_parts(self) -> int:
        """Nanoseconds in timed calls that no other timed call made."""
        found: int = self._stack[0][1]
        return found

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is the part's."""

        def call(*arguments: Any, **named: Any) -> Any:
            frame = [part, 0]
            self._stack.append(frame)
            started = time.perf_counter_ns()
            try:
                return function(*arguments, **named)
            finally:
                took = time.perf_counter_ns() - started
                self._stack.pop()
                around = self._stack[-1]
                around[1] += took
                self.spent[part] += took - frame[1]
                self.calls[part] += 1
                self.within[around[0]] += 1

        return call


def _costs_of_timing() -> tuple[float, float]:
    """Nanoseconds that a timed call adds to its own part, and to the part around it."""
    clock = _Stopwatch()
    nothing: Callable[[], None] = lambda: None  # noqa: E731  what is timed is the call
    timed = clock.timed("nothing", nothing)
    own, around = [], []
    for _ in range(_CALLS):
        clock.reset()
        started = time.perf_counter_ns()
        timed()
        between = time.perf_counter_ns()
        nothing()
        ended = time.perf_counter_ns()
        spent, bare = clock.spent["nothing"], ended - between
        own.append(spent - bare)
        around.append(between - started - spent)
    return statistics.median(own), statistics.median(around)


def breakdown_of(issue: Issue, num_calls: int = _CALLS, streams_type: type = StubStreams) -> dict[str, float]:
    """Microseconds of a call until it returns, by part; the wait is not in it. Medians, and so not quite a sum.

    `streams_type` is the class whose methods are timed: the stub's, or the library's own on a GPU.
    """
    clock = _Stopwatch()
    own_ns, around_ns = _costs_of_timing()
    found: dict[str, list[float]] = {part: [] for part in (*_PARTS, REST)}
    issue().wait()
    with ExitStack() as stack:
        for part, functions in _PARTS.items():
            for usual, name in functions:
                place = streams_type if usual is StubStreams else usual
                stack.enter_context(patch.object(place, name, clock.timed(part, getattr(place, name))))
        for _ in range(num_calls):
            clock.reset()
            started = time.perf_counter_ns()
            work = issue()
            clock.spent[REST] = time.perf_counter_ns() - started - clock.spent_in_parts
            for part, times in found.items():
                times.append(clock.spent[part] - clock.calls[part] * own_ns - clock.within[part] * around_ns)
            work.wait()
    return {part: statistics.median(times) / 1000 for part, times in found.items()}
