"""NCCL called by us against torch's ProcessGroupNCCL, on the same library.

    python -m benchmarks.nccl [--ranks 1|2] [--rounds N] [--only GLOB] [--json FILE]

Needs torch alone, and writes the file anew after each case: a run that is ended leaves what it has measured. Every
case is checked before it is timed: all sides must give the same. Then they take turns, and a round takes as long as
its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.nccl.judging import Measured, judged, table_of, worst
from benchmarks.nccl.timing import Job, jobs, library, timed
from tests.harness.gloo_ranks import GlooRanks
from tests.nccl.devices import start, why_not
from tritondt.cli.surroundings import surroundings

_CASE_SECONDS = 120.0  # the first one makes all communicators
_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)


def measure(ranks: GlooRanks, where: str, chosen: Sequence[Job], rounds: int) -> Iterator[Measured]:
    """Times the jobs one after the other; a rank that does not come back in time ends all."""
    for number, job in enumerate(chosen, 1):
        of_ranks = ranks.run(timed, where, job, rounds, timeout_s=_CASE_SECONDS)
        found = judged(job.kind, job.case, of_ranks)
        values = ", ".join(f"{side} {value:.2f}" for side, value in found.values.items())
        tell(f"{number}/{len(chosen)}  {job.kind}: {job.case}: {values}")
        yield found


def tell(text: str) -> None:
    """Writes a line to stdout at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(found: Sequence[Measured], facts: dict[str, Any], ranks: int, rounds: int) -> dict[str, Any]:
    """The JSON object."""
    by_name = worst(found)
    return {
        "benchmark": "nccl",
        **surroundings(),
        **facts,
        "ranks": ranks,
        "rounds": rounds,
        "cases": [{**asdict(item), "holds": item.holds} for item in found],
        "ratios": {name: each["value"] for name, each in by_name.items()},
        "limits": {name: each["limit"] for name, each in by_name.items()},
        "holds": all(item.holds for item in found),
    }


def parser_of() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nccl",
        description="Time collectives and redistributions against torch's on the same NCCL; exit with 1 where a limit "
        "is missed.",
    )
    add = parser.add_argument
    add("--ranks", type=int, choices=(1, 2), default=1, help="ranks, all on one GPU")
    add("--rounds", type=int, default=50, help="times that each side takes its turn")
    add("--bytes", type=int, nargs="+", default=list(_SIZES), help="sizes of collectives")
    add("--only", nargs="+", default=["*"], help="cases, globs such as 'all_reduce*'")
    add("--double", action="store_true", help="over the test double on the host: that it runs; misses no limit")
    add("--json", type=Path, help="file for the measurements")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where a limit is missed or there is no GPU, 2 for wrong options."""
    parser = parser_of()
    given = parser.parse_args(arguments)
    where = "host" if given.double else "gpu"
    reason = why_not(where, given.ranks)
    if reason is not None:
        sys.stderr.write(f"Error: {f'this benchmark {reason}' if reason.startswith('needs') else reason}\n")
        return 1
    chosen = [job for job in jobs(given.ranks, given.bytes) if any(fnmatch(job.case, glob) for glob in given.only)]
    if not chosen:
        parser.error(f"--only {' '.join(given.only)} names no case")
    found: list[Measured] = []
    with start(where, given.ranks, PYTHONWARNINGS="ignore::FutureWarning") as started:
        facts = started.run(library, where, timeout_s=_CASE_SECONDS)[0]
        tell(f"NCCL {facts['nccl']} ({facts['nccl_path']}), {facts['device']}")
        for measured in measure(started, where, chosen, given.rounds):
            found.append(measured)
            result = report(found, facts, given.ranks, given.rounds)
            if given.json is not None:
                given.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    tell(table_of(found))
    for name, each in worst(found).items():
        tell(f"{name}: {each['value']:.2f} (at most {each['limit']:g}; {each['case']})")
    return 0 if given.double or result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
