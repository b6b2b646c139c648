"""Many programs: batches in one world of rank threads, failures run again by themselves and minimised."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Adds the counts of another part of the campaign."""
        self.programs += other.programs
        self.statements += other.statements
        self.findings += other.findings
        self.refused.update(other.refused)


# Gives the traces of programs of one size of world.
RunAll = Callable[[Sequence[Program], int], list[list[Trace]]]


class Campaign:
    """Programs by their seeds, run on rank threads or as `run_all` does it, without statements of some kinds."""

    def __init__(
        self, leave_out: Collection[str] = (), *, minimise: bool = True, run_all: RunAll = run_on_threads
    ) -> None:
        self._leave_out, self._minimise, self._run_all = leave_out, minimise, run_all

    def run(self, seeds: Iterable[int]) -> Tally:
        """Runs the programs of seeds, those of one size of world together."""
        tally = Tally()
        programs = sorted((random_program(seed, self._leave_out) for seed in seeds), key=lambda it: it.world_size)
        for size, of_size in groupby(programs, key=lambda it: it.world_size):
            for program, report in self._reports(list(of_size), size):
                tally.programs += 1
                tally.statements += report.num_statements
                tally.refused.update(report.refused)
                if report.failures:
                    tally.findings.append(self.finding(program, report))
        return tally

    def check(self, program: Program) -> Report:
        """Runs one program in a world of its own, and compares it."""
        try:
            (traces,) = self._run_all([program], program.world_size)
        except Exception as error:  # noqa: BLE001  what ends a rank is a finding
            failure = Failure("world", None, "", f"{type(error).__name__}: {' '.join(str(error).split())}")
            return Report([failure], [], len(program.statements), {})
        return compare(program, traces)

    def _reports(self, programs: Sequence[Program], world_size: int) -> Iterator[tuple[Program, Report]]:
        """The reports of programs in one world; from the first that fails on, of each in one of its own."""
        together: list[list[Trace]] | None = None
        try:
            together = self._run_all(programs, world_size)
        except Exception as error:  # noqa: BLE001  found again below, in a world of the program's own
            sys.stderr.write(f"seeds {programs[0].seed}..{programs[-1].seed}: {error!r}\n")
        for place, program in enumerate(programs):
            report = self.check(program) if together is None else compare(program, together[place])
            if report.failures and together is not None:
                # A program whose ranks disagree leaves messages behind: what follows it is not its own fault.
                together = None
                alone = self.check(program)
                report = alone if alone.failures else report
            yield program, report

    def finding(self, program: Program, report: Report) -> Finding:
        """The finding of a failing program."""
        failure = report.failures[0]
        if not self._minimise:
            return Finding(program, program, failure, report.tolerances)
        minimal = minimised(program, lambda it: self._fails_alike(it, failure))
        smallest = self.check(minimal)
        found = smallest.failures[0] if smallest.failures else failure
        return Finding(program, minimal, found, smallest.tolerances)

    def _fails_alike(self, program: Program, failure: Failure) -> bool:
        """Whether a simpler program fails in the same way."""
        report = self.check(program)
        return bool(report.failures) and signature(report.failures[0]) == signature(failure)


def signature(failure: Failure) -> str:
    """What two failures of one cause have in common: their kind, and what was raised."""
    raised = failure.text.partition(":")[0] if failure.kind in ("error", "end", "world", "accepts") else ""
    return f"{failure.kind} {raised}"
