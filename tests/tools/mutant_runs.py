"""Tests run on mutants: each in a forked child of a process that has collected the tests and run none of them."""

import functools
import gc
import os
import pickle
import resource
import select
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.tools.mutants import Mutant

# A test may take so many times the CPU time that it took before, and a little more: beyond, a loop does not end.
SLOWER = 5
LEAST_CPU_S = 2.0
# What waits without computing (ranks for each other) ends so; high, as other processes may have the cores.
LEAST_WALL_S = 60.0
# Memory that a child may take beyond what it starts with: lists without end.
MEMORY_BYTES = 2 << 30


class MutantRuns:
    """Plugin of pytest that runs `then` in place of the tests, which may call `run` for mutants of the `files`."""

    def __init__(self, files: set[str], budget_s: float) -> None:
        self.files = files
        self.budget_s = budget_s
        self.then: Callable[[], None] = lambda: None
        self.is_done = False
        self._items: list[pytest.Item] = []
        self._seconds: dict[int, float] = {}
        self._on_line: dict[tuple[str, int], set[int]] = {}
        self._functions: dict[CodeType, list[FunctionType]] = {}
        self._caches: list[Any] = []
        self._has_found: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Has hypothesis stop at its first finding, where nobody reads the smallest."""
        settings.register_profile("mutants", settings(phases=(Phase.explicit, Phase.generate)))
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Notes which lines each test runs, then goes over to the mutants."""
        if session.testsfailed:
            return False
        self._items = session.items
        self._prepare()
        found = in_child(self._coverage, wall_s=None)
        assert isinstance(found, tuple), "the tests did not come to their end without a mutant"
        self._seconds, self._on_line = found
        failed = [item.nodeid for number, item in enumerate(self._items) if number not in self._seconds]
        sys.stdout.write(f"{len(self._seconds)} tests, {sum(self._seconds.values()):.0f} s of CPU time\n")
        sys.stdout.write("".join(f"left out, fails without a mutant: {name}\n" for name in failed))
        sys.stdout.flush()
        self.then()
        self.is_done = True
        return True

    def _prepare(self) -> None:
        for thing in gc.get_objects():
            kind = type(thing)  # isinstance asks the thing, and torch has some that warn
            if kind is FunctionType and thing.__code__.co_filename in self.files:
                self._functions.setdefault(thing.__code__, []).append(thing)
            elif kind is functools._lru_cache_wrapper:
                self._caches.append(thing)
        gc.freeze()  # a child's collections then leave these pages to be shared

    def _coverage(self) -> tuple[dict[int, float], dict[tuple[str, int], set[int]]]:
        seconds: dict[int, float] = {}
        on_line: dict[tuple[str, int], set[int]] = {}
        for number, item in enumerate(self._items):
            lines: set[tuple[str, int]] = set()
            trace = _tracer(self.files, lines)
            self._forget()
            threading.settrace(trace)
            sys.settrace(trace)
            started = time.process_time()
            try:
                is_passed = _passes(item, self._after(number))
            finally:
                sys.settrace(None)
                threading.settrace(None)
            if is_passed:
                seconds[number] = time.process_time() - started
                for line in lines:
                    on_line.setdefault(line, set()).add(number)
        return seconds, on_line

    def _after(self, number: int) -> pytest.Item | None:
        return self._items[number + 1] if number + 1 < len(self._items) else None

    def _forget(self) -> None:
        for cache in self._caches:
            cache.cache_clear()

    def run(self, mutant: Mutant, path: str, *, is_changed: bool = True) -> tuple[str, str, float]:
        """The outcome, the test that told, and seconds; without the change where a run is to be seen to pass."""
        found_by = self._has_found[mutant.function]
        numbers: set[int] = set().union(*(self._on_line.get((path, line), set()) for line in mutant.lines))
        chosen: list[int] = []
        left_s = self.budget_s
        for number in sorted(numbers, key=lambda number: (-found_by[number], self._seconds[number])):
            if not chosen or left_s >= self._seconds[number]:
                left_s -= self._seconds[number]
                chosen.append(number)
        started = time.perf_counter()
        if not chosen:
            return "not run", "", 0.0
        wall_s = LEAST_WALL_S + 2 * SLOWER * sum(self._seconds[number] for number in chosen)
        found = in_child(lambda: self._first_to_fail(mutant, path, chosen, is_changed), wall_s)
        seconds = round(time.perf_counter() - started, 3)
        if not isinstance(found, tuple):
            return "timed out", "", seconds
        if found[0] is None:
            return "survived", "", seconds
        found_by[found[0]] += 1
        return "found", self._items[found[0]].nodeid, seconds

    def _first_to_fail(self, mutant: Mutant, path: str, numbers: list[int], is_changed: bool) -> tuple[int | None]:
        """Number of the first test that fails, None where none does."""
        changed = mutant.code(path, is_changed=is_changed)
        replaced = [
            function
            for code, functions in self._functions.items()
            for function in functions
            if (code.co_filename, function.__qualname__, code.co_firstlineno) == (path, *mutant.function)
        ]
        assert replaced, f"no function {mutant.function} of {path} is there"
        for function in replaced:
            function.__code__ = changed
        self._forget()
        soft = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))
        for place, number in enumerate(numbers):
            following = self._items[numbers[place + 1]] if place + 1 < len(numbers) else None
            # Its signal ends the process where the time is over.
            signal.setitimer(signal.ITIMER_PROF, LEAST_CPU_S + SLOWER * self._seconds[number])
            if not _passes(self._items[number], following):
                return (number,)
        return (None,)


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    return not any(found.failed for found in runtestprotocol(item, nextitem=following, log=False))


def _tracer(files: set[str], lines: set[tuple[str, int]]) -> Callable[[FrameType, str, Any], Any]:
    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return in_function

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return in_function if frame.f_code.co_filename in files else None

    return at_call


def in_child(task: Callable[[], object], wall_s: float | None) -> object:
    """What `task` returns in a forked child, None where the child was ended or took more than `wall_s` seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(silent, stream)
        try:
            with os.fdopen(writer, "wb") as file:
                pickle.dump(task(), file)
        finally:
            os._exit(0)  # neither pytest's end nor atexit functions are this child's
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as file:
            is_there, _, _ = select.select([file], [], [], wall_s)
            said = file.read() if is_there else b""
    finally:
        if not said:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return pickle.loads(said) if said else None
