"""Campaigns side by side: worker processes that are given families of seeds, and ended when one hangs."""

import logging
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.programs.campaign import Campaign, Finding, Tally
from tests.programs.comparison import Failure
from tests.programs.generator import FAMILY, random_program

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


def run_families(
    seeds: Sequence[int], num_jobs: int, leave_out: Sequence[str] = (), *, minimise: bool = True, until: float | None = None
) -> Iterator[Tally]:
    """The tallies of families of seeds as they come; none is begun after the time `until`."""
    waiting = [list(seeds[start : start + FAMILY]) for start in range(0, len(seeds), FAMILY)]
    waiting.reverse()
    workers: list[_Worker] = []
    try:
        workers.extend(_started(leave_out, minimise) for _ in range(min(num_jobs, len(waiting))))
        while True:
            if until is not None and time.time() > until:
                waiting.clear()
            for worker in workers:
                if not worker.seeds and waiting:
                    _give(worker, waiting.pop())
            busy = [worker for worker in workers if worker.seeds]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                if worker.pipe in ready:
                    worker_tally: Tally = worker.pipe.recv()
                    worker.seeds = ()
                    yield worker_tally
                elif time.time() - worker.since > (FAMILY_LIMIT_S if len(worker.seeds) > 1 else SEED_LIMIT_S):
                    hung = worker.seeds
                    _end(worker)
                    workers[workers.index(worker)] = _started(leave_out, minimise)
                    if len(hung) > 1:  # to find out which
                        waiting.extend([seed] for seed in hung)
                    else:
                        yield _hang(hung[0], leave_out)
    finally:
        for worker in workers:
            _end(worker)


def _hang(seed: int, leave_out: Sequence[str]) -> Tally:
    program = random_program(seed, leave_out)
    failure = Failure("hang", None, "", f"no end within {SEED_LIMIT_S:g} s")
    return Tally(1, len(program.statements), Counter(), [Finding(program, program, failure, {})])


def _started(leave_out: Sequence[str], minimise: bool) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, leave_out, minimise), daemon=True)
    process.start()
    return _Worker(process, ours)


def _give(worker: _Worker, seeds: Sequence[int]) -> None:
    worker.seeds, worker.since = seeds, time.time()
    worker.pipe.send(seeds)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()


def _serve(pipe: Connection, leave_out: Sequence[str], minimise: bool) -> None:
    """Runs what the pipe asks for, until it is closed."""
    quieten()
    campaign = Campaign(leave_out, minimise=minimise)
    while True:
        pipe.send(campaign.run(pipe.recv()))


def quieten() -> None:
    """Leaves out what torch says of programs that are wrong on purpose, and of deprecated forms; one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
