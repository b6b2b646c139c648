"""Mutation testing of the pure core: each small change of its source is to be noticed by a test (`make mutants`).

    python -m tests.tools.mutation                                  # all mutants that have no result yet
    python -m tests.tools.mutation --only sharding/cut --again      # survivors of one module once more
    python -m tests.tools.mutation --report                         # the table, and survivors as changes

One process imports torch and collects the tests. A child of it runs them all once and notes who runs which lines;
each mutant is a child of its own, in which the changed function takes the place of the first, and the tests that run
the changed line follow, the quickest first, until one fails. Results are kept in build/mutation as they come. A mutant
that no test can tell is in equivalent_mutants.json, below the reason.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tools.mutant_runs import MutantRuns
from tests.tools.mutants import Mutant, mutants_of

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "build" / "mutation"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
MODULES = (
    *("sharding/intervals", "sharding/cut", "sharding/layout"),
    *("planning/flat_pieces", "planning/exchange", "planning/planner"),
)
TESTS = (
    *("tests/sharding", "tests/planning", "tests/redistribution/test_redistribute.py"),
    *("tritondt/sharding", "tritondt/planning"),
)
MARKS = "not soak and not alone"


class Result(NamedTuple):
    """What became of a mutant: found, timed out, survived, or not run by any test."""

    key: str
    outcome: str
    test: str
    seconds: float


def path_of(module: str) -> Path:
    """File of a module that is named as in MODULES."""
    return REPOSITORY / "tritondt" / f"{module}.py"


def mutants_in(module: str) -> list[Mutant]:
    """All mutants of a module."""
    return mutants_of(module, path_of(module).read_text())


def keys_of(module: str, mutants: Iterable[Mutant]) -> dict[str, Mutant]:
    """Mutants by a key that a change of the module's source changes."""
    digest = hashlib.blake2b(path_of(module).read_bytes(), digest_size=6).hexdigest()
    return {f"{digest} {mutant.name}": mutant for mutant in mutants}


def read_results(folder: Path) -> dict[str, Result]:
    """Results by key; of several of one mutant the last counts."""
    found: dict[str, Result] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            result = Result(**json.loads(line))
            found[result.key] = result
    return found


def read_equivalent() -> dict[str, str]:
    """The reason why no test can tell a mutant, by the mutant's name."""
    by_reason: dict[str, list[str]] = json.loads(EQUIVALENT.read_text())
    return {name: reason for reason, names in by_reason.items() for name in names}


def report(modules: Sequence[str], folder: Path) -> str:
    """A table with a row for each module, and below it the survivors that are not known to be equivalent."""
    results, equivalent = read_results(folder), read_equivalent()
    rows = [
        "| module | mutants | run | found | of these timed out | equivalent | survived | found of the others |",
        "|---|---|---|---|---|---|---|---|",
    ]
    survivors: list[str] = []
    whole: Counter[str] = Counter()
    for module in modules:
        counts: Counter[str] = Counter()
        for key, mutant in keys_of(module, mutants_in(module)).items():
            counts["mutants"] += 1
            if key not in results:
                continue
            outcome = results[key].outcome
            if outcome in ("survived", "not run") and mutant.name in equivalent:
                outcome = "equivalent"
            counts[outcome] += 1
            counts["run"] += 1
            if outcome in ("survived", "not run"):
                place = f"tritondt/{module}.py:{mutant.lines.start} {mutant.function[0]} ({outcome})"
                survivors.append(f"{place}\n  - {mutant.before}\n  + {mutant.after}\n  {mutant.name}\n")
        rows.append(_row(f"`{module}`", counts))
        whole += counts
    return "\n".join([*rows, _row("all", whole), "", *survivors])


def _row(name: str, counts: Counter[str]) -> str:
    found = counts["found"] + counts["timed out"]
    survived = counts["survived"] + counts["not run"]
    share = f"{100 * found / (found + survived):.1f} %" if found + survived else "-"
    cells = (counts["mutants"], counts["run"], found, counts["timed out"], counts["equivalent"], survived)
    return f"| {name} | " + " | ".join(map(str, cells)) + f" | {share} |"


def _to_run(module: str, again: bool, folder: Path) -> dict[str, Mutant]:
    """Mutants without a result, or, `again`, those that no test has found; the equivalent ones are left out."""
    results, equivalent = read_results(folder), read_equivalent()
    wanted = {}
    for key, mutant in keys_of(module, mutants_in(module)).items():
        outcome = results[key].outcome if key in results else None
        if outcome is None or (again and outcome in ("survived", "not run") and mutant.name not in equivalent):
            wanted[key] = mutant
    return wanted


def run(modules: Sequence[str], tests: Sequence[str], folder: Path, *, again: bool, budget_s: float, marks: str) -> int:
    """Runs the mutants that are left and writes a line for each; 0, or pytest's status where there were no tests."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {module: _to_run(module, again, folder) for module in modules}
    runs = MutantRuns({str(path_of(module)) for module in modules}, budget_s)

    def run_all() -> None:
        for module, mutants in wanted.items():
            for mutant in list(mutants.values())[:1]:
                control = runs.run(mutant, str(path_of(module)), is_changed=False)
                assert control[0] == "survived", f"without a change, the tests of {mutant.name} came to {control}"
            with (folder / f"{module.replace('/', '.')}.jsonl").open("a") as file:
                for key, mutant in mutants.items():
                    outcome = runs.run(mutant, str(path_of(module)))
                    file.write(json.dumps(Result(key, *outcome)._asdict()) + "\n")
                    file.flush()

    runs.then = run_all
    # Assertions as they stand: what failed is told by nobody, so that rewriting them is time for nothing.
    options = ("-qq", "--capture=no", "--assert=plain", "--tb=native", "--timeout=0", "-p", "no:cacheprovider")
    status = int(pytest.main([*options, "-m", marks, *tests], plugins=[runs]))
    return 0 if runs.is_done else status or 1


def main() -> int:
    """The exit status: 1 where the mutants were not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help=f"a module: {', '.join(MODULES)}, or another of tritondt/")
    parser.add_argument("--again", action="store_true", help="run survivors again, where there are new tests")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of tests for a mutant, the quickest first")
    parser.add_argument("--marks", default=MARKS, help="pytest's -m")
    parser.add_argument("tests", nargs="*", default=TESTS)
    asked = parser.parse_args()
    modules, status = asked.only or MODULES, 0
    if not asked.report:
        status = run(modules, asked.tests, RESULTS, again=asked.again, budget_s=asked.budget, marks=asked.marks)
    sys.stdout.write(report(modules, RESULTS) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
