"""Runs all that needs a GPU, part by part, each under a limit that kills; goes on to the next when one fails.

    python -m tests.tools.on_gpu [PART ...]    # as `make gpu` does; PARTS="tests-nccl bench-nccl" names some

Nothing is fetched. Benchmarks write into benchmarks/results/. Two ranks share the one GPU, for which NCCL 2.30.7 or
later must be found; without it their parts are skipped.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


class Part(NamedTuple):
    """A command. After an `essential` one that fails nothing is run; where `can_run` fails, it is skipped for that."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    essential: bool = False
    can_run: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """How a part ended."""

    part: Part
    state: str
    seconds: float
    why: str = ""


def parts(python: str) -> tuple[Part, ...]:
    """All of them: what is quick and what others stand on first, what may hang, two ranks on one GPU, later."""
    tests = (python, "-m", "pytest", "-q", "-rs", "-m", "gpu")
    can_share = (python, "-c", "import sys; from tests.nccl.devices import why_not; sys.exit(why_not('gpu', 2))")

    def bench(module: str, name: str, *options: str) -> tuple[str, ...]:
        return (python, "-m", f"benchmarks.{module}", *options, "--json", f"benchmarks/results/{name}.json")

    return (
        Part("build", (python, "setup.py", "--quiet", "build_ext", "--inplace"), 600, essential=True),
        Part("tests-nccl", (*tests, "tests/nccl", "-k", "gpu-1"), 900),
        Part("tests", (*tests, "tests", "--ignore", "tests/nccl"), 1200),
        Part("bench-nccl", bench("nccl", "nccl_gpu_1_rank"), 300),
        Part("tests-nccl-2", (*tests, "tests/nccl", "-k", "gpu-2"), 900, can_run=can_share),
        Part("bench-nccl-2", bench("nccl", "nccl_gpu_2_ranks", "--ranks", "2"), 600, can_run=can_share),
        Part("bench-boxes", bench("kernels.copy_boxes_gpu", "copy_boxes_gpu"), 300),
    )


def run_part(part: Part) -> Outcome:
    """Runs one, with all processes that it starts ended at its limit."""
    started = time.monotonic()
    if part.can_run:
        asked = subprocess.run(part.can_run, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if asked.returncode != 0:
            why = asked.stderr.strip().rpartition("\n")[2] or f"exit status {asked.returncode}"
            return Outcome(part, SKIPPED, time.monotonic() - started, why)
    process = subprocess.Popen(part.command, cwd=REPOSITORY, start_new_session=True)
    try:
        status = process.wait(part.limit_s)
    except subprocess.TimeoutExpired:
        return Outcome(part, FAILED, time.monotonic() - started, f"killed after {part.limit_s:g} s, its limit")
    finally:
        _end_session(process)
    why = "" if status == 0 else f"exit status {status}"
    return Outcome(part, PASSED if status == 0 else FAILED, time.monotonic() - started, why)


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """Ends what a part has left running, itself included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left
    finally:
        process.wait()


def run_all(chosen: Sequence[Part]) -> list[Outcome]:
    """Runs them in order; after an essential one that failed, no more."""
    outcomes: list[Outcome] = []
    for part in chosen:
        sys.stdout.write(f"== {part.name}: {' '.join(part.command[1:])}\n")
        sys.stdout.flush()
        outcomes.append(run_part(part))
        if part.essential and outcomes[-1].state == FAILED:
            break
    return outcomes


def summary(outcomes: Sequence[Outcome], num_parts: int) -> str:
    """A line for each part, and one for all.

    >>> part = Part("build", ("true",), 5)
    >>> print(summary([Outcome(part, PASSED, 1.2)], 1))
    build         passed      1 s
    all 1 parts: 1 passed
    """
    lines = [f"{part.name:<13} {state:<8} {seconds:4.0f} s  {why}".rstrip() for part, state, seconds, why in outcomes]
    counts = [(state, sum(outcome.state == state for outcome in outcomes)) for state in (PASSED, FAILED, SKIPPED)]
    told = [f"{count} {state}" for state, count in counts if count]
    if len(outcomes) < num_parts:
        told.append(f"{num_parts - len(outcomes)} not run")
    return "\n".join([*lines, f"all {num_parts} parts: {', '.join(told)}"])


def main(names: Sequence[str]) -> int:
    """The exit status: 1 where a part failed, 2 for a name that there is not."""
    known = parts(sys.executable)
    unknown = sorted(set(names) - {part.name for part in known})
    if unknown:
        sys.stderr.write(
            f"{', '.join(unknown)} is no part of what runs on a GPU; there are "
            f"{', '.join(part.name for part in known)}\n"
        )
        return 2
    chosen = [part for part in known if not names or part.name in names]
    outcomes = run_all(chosen)
    sys.stdout.write(summary(outcomes, len(chosen)) + "\n")
    return int(any(outcome.state == FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
