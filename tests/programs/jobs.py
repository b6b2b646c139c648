"""Campaigns side by side: worker processes that are given families of seeds, and ended when one hangs."""

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.programs.campaign import Campaign, Finding, Tally
from tests.programs.comparison import Failure
from tests.programs.generator import FAMILY, random_program
from tests.programs.ranks import quieten

# A family takes some 5 seconds, and a minimisation some 30; on a busy machine, many times that.
FAMILY_LIMIT_S = 600.0
SEED_LIMIT_S = 120.0


@dataclass
class _Worker:
    """A worker process, and the seeds that it has under way."""

    process: Any
    pipe: Connection
    seeds: Sequence[int] = ()
    since: float = 0.0

    def is_late(self) -> bool:
        """Whether it has had more than enough time."""
        limit_s = FAMILY_LIMIT_S if len(self.seeds) > 1 else SEED_LIMIT_S
        return bool(self.seeds) and time.time() - self.since > limit_s

    def told(self) -> Tally | None:
        """What it found; None where its process ended before it said."""
        try:
            tally: Tally = self.pipe.recv()
        except EOFError:
            self.process.join()
            return None
        return tally


def run_families(
    seeds: Sequence[int],
    num_jobs: int,
    leave_out: Sequence[str] = (),
    *,
    minimise: bool = True,
    until: float | None = None,
) -> Iterator[Tally]:
    """The tallies of families of seeds as they come; none is begun after the time `until`."""
    return _Workers(seeds, num_jobs, leave_out, minimise).run(until)


class _Workers:
    """Worker processes, and the families of seeds that none has been given yet."""

    def __init__(self, seeds: Sequence[int], num_jobs: int, leave_out: Sequence[str], minimise: bool) -> None:
        self._leave_out, self._minimise = leave_out, minimise
        starts = range(0, len(seeds), FAMILY)
        self._waiting: Iterator[Sequence[int]] = (seeds[start : start + FAMILY] for start in starts)
        self._workers = [_started(leave_out, minimise) for _ in range(min(num_jobs, len(starts)))]

    def run(self, until: float | None) -> Iterator[Tally]:
        """The tallies as they come."""
        try:
            while self._are_busy(until):
                ready = wait([worker.pipe for worker in self._workers if worker.seeds], timeout=1.0)
                for place, worker in enumerate(self._workers):
                    if worker.pipe in ready:
                        tally = worker.told()
                        if tally is None:
                            yield from self._replace(place)
                        else:
                            worker.seeds = ()
                            yield tally
                    elif worker.is_late():
                        yield from self._replace(place)
        finally:
            for worker in self._workers:
                _end(worker)

    def _are_busy(self, until: float | None) -> bool:
        """Gives seeds to idle workers; whether any has something to do."""
        if until is not None and time.time() > until:
            self._waiting = iter(())
        for worker in self._workers:
            given = () if worker.seeds else next(self._waiting, ())
            if given:
                worker.seeds, worker.since = given, time.time()
                worker.pipe.send(given)
        return any(worker.seeds for worker in self._workers)

    def _replace(self, place: int) -> Iterator[Tally]:
        """Starts a worker in place of one that hangs or has ended; its seeds are run one by one, to find which does."""
        worker = self._workers[place]
        status = worker.process.exitcode
        _end(worker)
        self._workers[place] = _started(self._leave_out, self._minimise)
        if len(worker.seeds) == 1:
            yield _lost(worker.seeds[0], self._leave_out, status)
        else:
            self._waiting = chain([[seed] for seed in worker.seeds], self._waiting)


def _lost(seed: int, leave_out: Sequence[str], status: int | None) -> Tally:
    """What is told of a program whose process hung, or ended with a status."""
    program = random_program(seed, leave_out)
    failure = Failure("hang", None, "", f"no end within {SEED_LIMIT_S:g} s")
    if status is not None:
        failure = Failure("crash", None, "", f"the process ended with status {status}")
    return Tally(1, len(program.statements), Counter(), [Finding(program, program, failure, {})])


def _started(leave_out: Sequence[str], minimise: bool) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, leave_out, minimise), daemon=True)
    process.start()
    return _Worker(process, ours)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()


def _serve(pipe: Connection, leave_out: Sequence[str], minimise: bool) -> None:
    """Runs what the pipe asks for, until it is closed.

    Garbage is collected between families: of torch's million objects, collections take a quarter of a family's time.
    """
    quieten()
    campaign = Campaign(leave_out, minimise=minimise)
    gc.disable()
    gc.freeze()
    while True:
        pipe.send(campaign.run(pipe.recv()))
        gc.collect()
