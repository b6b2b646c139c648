"""Every fault at every moment on every kind of ranks, and the table of docs/failures.md that says what the others are told.

python -m tests.harness.fault_matrix        # prints the table, in about a minute
"""

import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from tests.harness import fault_threads
from tests.harness.fault_ranks import FaultRanks
from tests.harness.faults import FAULTS, MOMENTS, RANKS, Case, Fault, Moment, Observation, Ranks, cases_of

Observed = list[tuple[Case, Observation]]
Job = tuple[Fault, Ranks]

# Groups of processes that run at a time; most of them wait most of the time.
_AT_ONCE = 4
JOBS: tuple[Job, ...] = tuple((fault, ranks) for fault in FAULTS for ranks in RANKS if cases_of(fault, ranks))


def start(jobs: Iterable[Job]) -> dict[Job, "Future[Observed]"]:
    """Runs jobs in their order, those of processes a few at a time."""
    asked, pool = tuple(jobs), ThreadPoolExecutor(_AT_ONCE)
    on_threads = {job: _done(job) for job in asked if job[1] == "threads"}
    on_processes = {job: pool.submit(_on_processes, *job) for job in asked if job[1] != "threads"}
    pool.shutdown(wait=False)
    return {**on_threads, **on_processes}


def _done(job: Job) -> "Future[Observed]":
    """That of threads, at once: they take a tenth of a second, and count the threads of this process."""
    made: Future[Observed] = Future()
    made.set_result([(case, fault_threads.observe(case)) for case in cases_of(*job)])
    return made


def _on_processes(fault: Fault, ranks: Ranks) -> Observed:
    with FaultRanks(ranks, fault) as processes:
        return [(case, processes.observe(case)) for case in cases_of(fault, ranks)]


def table(found: Mapping[Job, Observed]) -> str:
    """The matrix in Markdown."""
    lines = [f"| {' | '.join(['fault', *MOMENTS])} |", "|---" * (1 + len(MOMENTS)) + "|"]
    for fault in FAULTS:
        cells = [_cell(fault, moment, found) for moment in MOMENTS]
        lines.append(f"| {' | '.join([fault.name, *cells])} |")
    return "\n".join(lines)


def words_of(fault: Fault) -> str:
    """What a cell says before its numbers."""
    told = dict.fromkeys(fault.told_on(ranks) for ranks in RANKS if cases_of(fault, ranks))
    return " or ".join(told)


def _cell(fault: Fault, moment: Moment, found: Mapping[Job, Observed]) -> str:
    seconds = [_seconds(moment, found[fault, ranks]) if (fault, ranks) in found else "-" for ranks in RANKS]
    return f"{words_of(fault)}: {', '.join(seconds)} s"


def _seconds(moment: Moment, observed: Observed) -> str:
    """Until the last of the others was told, in any of the cases."""
    others = [
        outcome.seconds
        for case, observation in observed
        for rank, outcome in observation.outcomes.items()
        if case.moment == moment and rank != case.fault.culprit
    ]
    return f"{max(others):.1f}"


if __name__ == "__main__":
    running = start(JOBS)
    sys.stdout.write(table({job: result.result() for job, result in running.items()}) + "\n")
