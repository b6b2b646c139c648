"""Many programs: batches in one world of rank threads, failures run again by themselves and minimised."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from tests.programs.comparison import Failure, Report, compare
from tests.programs.generator import random_program
from tests.programs.minimise import minimised
from tests.programs.ranks import Trace, run_on_threads
from tests.programs.statements import Program


class Finding(NamedTuple):
    """A failing program, and the smallest that was found to fail in the same way."""

    program: Program
    minimal: Program
    failure: Failure
    tolerances: dict[str, float]


@dataclass
class Tally:
    """Counts of a campaign."""

    programs: int = 0
    statements: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Adds the counts of another part of the campaign."""
        self.programs += other.programs
        self.statements += other.statements
        self.findings += other.findings
        for text, count in other.refused.items():
            self.refused[text] = self.refused.get(text, 0) + count


def check(program: Program) -> Report:
    """Runs one program in a world of its own, and compares it."""
    try:
        (traces,) = run_on_threads([program], program.world_size)
    except Exception as error:  # noqa: BLE001  what ends a rank is a finding
        failure = Failure("world", None, "", f"{type(error).__name__}: {' '.join(str(error).split())}")
        return Report([failure], [], len(program.statements), {})
    return compare(program, traces)


def run_seeds(seeds: Iterable[int], leave_out: Collection[str] = (), *, minimise: bool = True) -> Tally:
    """Runs the programs of seeds, those of one size of world together."""
    tally = Tally()
    programs = sorted((random_program(seed, leave_out) for seed in seeds), key=lambda it: it.world_size)
    for size, of_size in groupby(programs, key=lambda it: it.world_size):
        for program, report in _reports(list(of_size), size):
            tally.programs += 1
            tally.statements += report.num_statements
            for text in report.refused:
                tally.refused[text] = tally.refused.get(text, 0) + 1
            if report.failures:
                tally.findings.append(finding_of(program, report, minimise=minimise))
    return tally


def _reports(programs: Sequence[Program], world_size: int) -> Iterator[tuple[Program, Report]]:
    """The reports of programs in one world; where any fails, it and what follows is run again apart."""
    together: list[list[Trace]] | None = None
    try:
        together = run_on_threads(programs, world_size)
    except Exception as error:  # noqa: BLE001  found again below, in a world of the program's own
        warnings.warn(f"a world ended with {error!r}", stacklevel=2)
    is_sound = together is not None
    for place, program in enumerate(programs):
        report = compare(program, together[place]) if is_sound and together is not None else check(program)
        if report.failures and is_sound:
            # A program whose ranks disagree leaves messages behind.
            is_sound = False
            report = check(program)
        yield program, report


def finding_of(program: Program, report: Report, *, minimise: bool = True) -> Finding:
    """The finding of a failing program."""
    failure = report.failures[0]
    if not minimise:
        return Finding(program, program, failure, report.tolerances)
    minimal = minimised(program, lambda it: _fails_alike(it, failure))
    smallest = check(minimal)
    found = smallest.failures[0] if smallest.failures else failure
    return Finding(program, minimal, found, smallest.tolerances)


def _fails_alike(program: Program, failure: Failure) -> bool:
    """Whether a simpler program fails in the same way."""
    report = check(program)
    return bool(report.failures) and signature(report.failures[0]) == signature(failure)


def signature(failure: Failure) -> str:
    """What two failures of one cause have in common: their kind, and what was raised."""
    raised = failure.text.partition(":")[0] if failure.kind in ("error", "end", "world", "accepts") else ""
    return f"{failure.kind} {raised}"
