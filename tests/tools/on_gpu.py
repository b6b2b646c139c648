"""Runs all that needs a GPU, part by part, within one deadline; goes on to the next when one fails.

    python -m tests.tools.on_gpu [PART ...]    # as `make gpu` does; PARTS="tests-nccl bench-nccl" names some
    python -m tests.tools.on_gpu --dry         # the same flow without a GPU, as `make gpu-dry` does

DEADLINE is in seconds, 560 by default: whatever runs then is ended with all that it started. Results are in build/gpu
as they come, and a second call goes on from there: a part that has ended is not run again, unless it is named or a
source has changed. Nothing is fetched. Benchmarks write into benchmarks/results/. Two ranks share the one GPU, for
which NCCL 2.30.7 or later must be found; without it their parts are skipped.
"""

import argparse
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.tools import gpu_progress
from tests.tools.gpu_parts import Part, dry_parts, environment, interpreting, parts

REPOSITORY = Path(__file__).parents[2]
PASSED, FAILED, SKIPPED, CUT = "passed", "FAILED", "skipped", "cut off"
_DEADLINE_S = 560.0
# How often a run of pytest is begun again behind a test that its process died of.
_MOST_DEATHS = 8
_PR_SET_PDEATHSIG = 1


class Outcome(NamedTuple):
    """How a part ended."""

    part: Part
    state: str
    seconds: float
    why: str = ""


class Runner:
    """Parts run one after the other, their outcomes and output kept in a folder, all of it ended at a deadline.

    `deadline` is on time.monotonic's clock.
    """

    def __init__(self, folder: Path, deadline: float, variables: Mapping[str, str]) -> None:
        self.folder, self.deadline, self.variables = folder, deadline, dict(variables)
        self._results, self._sources = folder / "results.json", sources_digest()
        folder.mkdir(parents=True, exist_ok=True)

    def run_all(self, chosen: Sequence[Part], *, again: bool = False) -> list[Outcome]:
        """Runs parts in order; after an essential one that failed, no more; those that have ended only `again`."""
        outcomes: list[Outcome] = []
        for part in chosen:
            known = None if again or part.essential else self._ended(part)
            outcomes.append(known or self._told(part))
            if part.essential and outcomes[-1].state not in (PASSED, SKIPPED):
                break
        return outcomes

    def _told(self, part: Part) -> Outcome:
        left = self.deadline - time.monotonic()
        if left <= 1:
            return Outcome(part, CUT, 0.0, "not begun")
        sys.stdout.write(f"== {part.name}: {' '.join(part.command[1:])}\n")
        sys.stdout.flush()
        found = self.run_part(part)
        self._write(found)
        sys.stdout.write(f"   {_line(found)}\n")
        return found

    def run_part(self, part: Part) -> Outcome:
        """Runs one, with all processes that it starts ended at its limit or the deadline."""
        started = time.monotonic()
        if part.can_run:
            asked = self._ask(part)
            if asked is not None:
                return Outcome(part, SKIPPED, time.monotonic() - started, asked)
        state, why = self._run_tests(part) if part.tests else self._run_once(part, part.command)
        return Outcome(part, state, time.monotonic() - started, why)

    def _ask(self, part: Part) -> str | None:
        """Why a part cannot run, if it cannot."""
        asked = subprocess.run(
            part.can_run, cwd=REPOSITORY, env=self._variables_of(part), capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            return None
        return asked.stderr.strip().rpartition("\n")[2] or f"exit status {asked.returncode}"

    def _variables_of(self, part: Part) -> dict[str, str]:
        return interpreting(str(self.folder.parent), self.variables) if part.interprets else self.variables

    def _run_tests(self, part: Part) -> tuple[str, str]:
        """Runs pytest, again behind a test that its process died of."""
        path = self.folder / f"{part.name}.jsonl"
        command = (*part.command, "--progress", str(path))
        for _ in range(_MOST_DEATHS):
            state, why = self._run_once(part, command)
            found = gpu_progress.read(path)
            if found.has_ended or state == CUT:
                break
            for test in found.under_way:
                gpu_progress.note(path, test=test, outcome=gpu_progress.DIED, why=why)
            if not found.under_way:  # it did not come as far as a test
                return FAILED, why
        found = gpu_progress.read(path)
        if state == CUT:
            return CUT, f"{why}; {found.counts()}"
        if not found.has_ended:
            return FAILED, f"{found.counts()}; given up after {_MOST_DEATHS} processes that died"
        return FAILED if found.has_failed or state == FAILED else PASSED, found.counts() or why

    def _run_once(self, part: Part, command: Sequence[str]) -> tuple[str, str]:
        left = self.deadline - time.monotonic()
        with (self.folder / f"{part.name}.log").open("a") as log:
            written = log.tell()
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=self._variables_of(part),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            try:
                status = process.wait(max(min(part.limit_s, left), 0.1))
            except subprocess.TimeoutExpired:
                if part.limit_s <= left:
                    return FAILED, f"killed after {part.limit_s:g} s, its limit"
                return CUT, "killed at the deadline"
            finally:
                _end_session(process)
        told = "" if part.tests else _last_line(self.folder / f"{part.name}.log", written)
        if status in (0, 5):  # pytest's for no tests, where all have run before
            return PASSED, told
        return FAILED, "; ".join(filter(None, (told, f"exit status {status}, see {self.folder / part.name}.log")))

    def _ended(self, part: Part) -> Outcome | None:
        """The outcome of a part that has come to its end in a call before, with the same sources."""
        found = self._read().get(part.name)
        if found is None or found["state"] not in (PASSED, FAILED):
            return None
        return Outcome(part, found["state"], found["seconds"], f"before; {found['why']}".rstrip("; "))

    def _read(self) -> dict[str, Any]:
        if not self._results.exists():
            return {}
        found: dict[str, Any] = json.loads(self._results.read_text())
        return found.get("parts", {}) if found.get("sources") == self._sources else {}

    def _write(self, outcome: Outcome) -> None:
        known = self._read()
        known[outcome.part.name] = {"state": outcome.state, "seconds": round(outcome.seconds, 1), "why": outcome.why}
        self._results.write_text(json.dumps({"sources": self._sources, **versions(), "parts": known}, indent=1) + "\n")

    def begin_anew_where_sources_changed(self) -> None:
        """Removes what a call with other sources has noted of its tests."""
        if not self._read():
            for path in (*self.folder.glob("*.jsonl"), *self.folder.glob("*.log")):
                path.unlink()


def sources_digest() -> str:
    """A digest of all sources that parts run."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("tritondt", "kernels", "csrc", "tests", "benchmarks"):
        for path in sorted((REPOSITORY / name).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h") and not path.is_symlink():
                digest.update(str(path.relative_to(REPOSITORY)).encode() + path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """What results depend on beside the sources."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"python": sys.version.split()[0], "torch": str(torch.__version__), "device": device}


def _end_with_parent() -> None:
    """Has the kernel end this process with the one that started it, even where that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """Ends what a part has left running, itself included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left
    finally:
        process.wait()


def _line(outcome: Outcome) -> str:
    part, state, seconds, why = outcome
    return f"{part.name:<13} {state:<8} {seconds:4.0f} s  {why}".rstrip()


def summary(outcomes: Sequence[Outcome], num_parts: int) -> str:
    """A line for each part, and one for all.

    >>> part = Part("build", ("true",), 5)
    >>> print(summary([Outcome(part, PASSED, 1.2)], 1))
    build         passed      1 s
    all 1 parts: 1 passed
    """
    lines = [_line(outcome) for outcome in outcomes]
    states = (PASSED, FAILED, SKIPPED, CUT)
    counts = [(state, sum(outcome.state == state for outcome in outcomes)) for state in states]
    told = [f"{count} {state}" for state, count in counts if count]
    if len(outcomes) < num_parts:
        told.append(f"{num_parts - len(outcomes)} not run")
    return "\n".join([*lines, f"all {num_parts} parts: {', '.join(told)}"])


def _last_line(path: Path, start: int) -> str:
    """The last line of what was written into a log from a byte on: the verdict of a benchmark."""
    return path.read_bytes()[start:].decode(errors="replace").strip().rpartition("\n")[2].strip()


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where a part failed, 2 for a name that there is not, 3 where the deadline cut some off."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.on_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="PART", help="parts to run, again where they have run; else all")
    parser.add_argument("--dry", action="store_true", help="without a GPU")
    parser.add_argument("--short", action="store_true", help="little of the dry run")
    parser.add_argument("--deadline", type=float, default=_DEADLINE_S, help="seconds for all parts together")
    given = parser.parse_args(arguments)
    known = dry_parts(sys.executable, short=given.short) if given.dry else parts(sys.executable)
    unknown = sorted(set(given.names) - {part.name for part in known})
    if unknown:
        there = ", ".join(part.name for part in known)
        sys.stderr.write(f"{', '.join(unknown)} is no part of what runs on a GPU; there are {there}\n")
        return 2
    # What ends this process ends what it has started: SystemExit passes through the clauses that do so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder = REPOSITORY / "build" / ("gpu_dry" if given.dry else "gpu") / "results"
    variables = environment(str(folder.parent), os.environ, dry=given.dry)
    runner = Runner(folder, time.monotonic() + given.deadline, variables)
    runner.begin_anew_where_sources_changed()
    chosen = [part for part in known if part.essential or not given.names or part.name in given.names]
    outcomes = runner.run_all(chosen, again=bool(given.names) or given.dry)
    sys.stdout.write(summary(outcomes, len(chosen)) + "\n")
    states = {outcome.state for outcome in outcomes}
    return 1 if FAILED in states else 3 if CUT in states else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
