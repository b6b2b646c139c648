"""`make gpu` runs its parts under limits, goes on when one fails, and says what came of each."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.tools import on_gpu
from tests.tools.on_gpu import FAILED, PASSED, REPOSITORY, SKIPPED, Part, run_all, run_part, summary

OK = Part("good", ("true",), 20)
BAD = Part("bad", ("sh", "-c", "exit 3"), 20)


def test_a_part_that_fails_does_not_keep_the_next_from_running() -> None:
    outcomes = run_all([BAD, OK])
    assert [(outcome.state, outcome.why) for outcome in outcomes] == [(FAILED, "exit status 3"), (PASSED, "")]


def test_nothing_is_run_without_what_is_essential() -> None:
    outcomes = run_all([BAD._replace(essential=True), OK])
    assert [outcome.state for outcome in outcomes] == [FAILED]
    assert summary(outcomes, 2).splitlines()[-1] == "all 2 parts: 1 FAILED, 1 not run"


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_is_killed_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    # On a busy machine a second may end before the shell has begun.
    limit = 1
    while not note.exists() or not note.read_text():
        outcome = run_part(Part("long", ("sh", "-c", f"sleep 600 & echo $! > {note}; wait"), limit))
        assert (outcome.state, outcome.why) == (FAILED, f"killed after {limit} s, its limit")
        limit *= 2
    deadline = time.monotonic() + 60
    while is_running(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(note.read_text()))


def test_what_cannot_run_is_skipped_with_its_reason() -> None:
    part = OK._replace(can_run=(sys.executable, "-c", "import sys; sys.exit('there is no GPU')"))
    outcome = run_part(part)
    assert (outcome.state, outcome.why) == (SKIPPED, "there is no GPU")
    assert run_part(OK._replace(can_run=("true",))).state == PASSED


def test_the_parts_run_what_there_is() -> None:
    found = on_gpu.parts("python")
    for part in found:
        for word in part.command:
            if word.startswith("tests") or word.endswith(".py"):
                assert (REPOSITORY / word).exists(), part
            if word.startswith("benchmarks."):
                path = REPOSITORY / word.replace(".", "/")
                assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), part
    assert len({part.name for part in found}) == len(found)
    assert os.path.commonpath([part.command[-1] for part in found if part.name.startswith("bench")]) == (
        "benchmarks/results"
    )


def test_a_part_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_gpu.main(["tests-nccl", "test-nccl"]) == 2
    assert capsys.readouterr().err == (
        "test-nccl is no part of what runs on a GPU; there are build, tests-nccl, tests, bench-nccl, tests-nccl-2, "
        "bench-nccl-2, bench-boxes\n"
    )
