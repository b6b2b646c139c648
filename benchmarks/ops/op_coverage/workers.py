"""Measures operators in several processes; one that takes too long, or brings its process down, is given up."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

import torch

from benchmarks.ops.op_coverage.measuring import Measured, measure
from benchmarks.ops.op_coverage.operators import operators
from benchmarks.ops.op_coverage.sides import Torchs
from benchmarks.ops.op_coverage.trial import RAISES, Outcome
from tritondt.ops import set_fallback
from tritondt.ops.propagation.fallback import Mode

_READY = "ready"


class _Worker:
    """A process that measures one operator at a time, started anew when it had to be stopped."""

    def __init__(self, num_trials: int, fallback: str, *, with_torch: bool) -> None:
        self._arguments = (num_trials, fallback, with_torch)
        self.name: str | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.connection.recv()  # the import of op_db is no operator's time

    def give(self, name: str, *, alone: bool) -> None:
        self.name, self.started = name, time.monotonic()
        self.connection.send((name, alone))

    def take(self) -> Measured:
        """The result that has come; what is known of the operator where the process died over it."""
        try:
            found: Measured = self.connection.recv()
        except EOFError:
            return self.give_up("its process died")
        self.name = None
        return found

    def give_up(self, why: str) -> Measured:
        assert self.name is not None, "only an operator is given up"
        found = Measured(self.name)
        found.add(Outcome(RAISES, why), "all")
        self.end()
        self._start()
        self.name = None
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, num_trials: int, fallback: Mode, with_torch: bool) -> None:
    torch.set_num_threads(1)
    set_fallback(fallback)
    known = operators()
    other = Torchs() if with_torch else None
    connection.send(_READY)
    while True:
        name, alone = connection.recv()
        connection.send(measure(known[name], num_trials, None if alone else other))


def measure_all(
    names: Sequence[str],
    num_trials: int,
    fallback: str,
    *,
    with_torch: bool,
    num_processes: int,
    limit_s: float,
    on_measured: Callable[[Measured], None],
) -> list[Measured]:
    """All operators, each within `limit_s` seconds, in the order of `names`; without torch where that is too long.

    Torch's ranks wait for each other without a limit.
    """
    left, found = list(reversed(names)), dict[str, Measured]()
    of_torch = dict[str, Measured]()
    workers = [_Worker(num_trials, fallback, with_torch=with_torch) for _ in range(min(num_processes, len(names)))]
    while left or any(worker.name for worker in workers):
        for worker in workers:
            if worker.name is None and left:
                name = left.pop()
                worker.give(name, alone=name in of_torch)
        ready = wait([worker.connection for worker in workers if worker.name], timeout=1)
        for worker in workers:
            measured = None
            if worker.connection in ready:
                measured = worker.take()
            elif worker.name and time.monotonic() - worker.started > limit_s:
                measured = worker.give_up(f"took more than {limit_s:g} s")
                if with_torch and measured.name not in of_torch:
                    of_torch[measured.name] = measured
                    left.append(measured.name)
                    continue
            if measured is not None:
                measured.other = of_torch.get(measured.name, measured.other)
                found[measured.name] = measured
                on_measured(measured)
    for worker in workers:
        worker.end()
    return [found[name] for name in names]
