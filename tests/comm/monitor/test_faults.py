"""Ranks that fail on purpose: the others are told by whom and in which step, nothing is left, and they train on."""

import faulthandler
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.harness.fault_matrix import JOBS, Job, Observed, start, words_of
from tests.harness.fault_ranks import FaultRanks
from tests.harness.faults import FAULTS, MOMENTS, RANKS, SIZE, Case, Observation, Ranks, cases_of, news
from tests.harness.stacks import listen, stacks_of

pytestmark = pytest.mark.extended

# What a busy machine may add; who hears of a fault does so long before the timeout of 30 s.
PAGE = Path(__file__).parents[3] / "docs" / "failures.md"


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest) -> Iterator[dict[Job, "Future[Observed]"]]:
    """What becomes of the cases of the tests that were asked for."""
    asked = {item.name for item in request.session.items}
    started = start(job for job in JOBS if f"test_a_fault[{_name(job)}]" in asked)
    yield started
    for future in started.values():
        future.cancel()


def _name(job: Job) -> str:
    fault, ranks = job
    return f"{fault.name}, {ranks}"


def _is_in_ci(job: Job) -> bool:
    """Faults on threads where they can be, else on sockets; on the others those heard of in ways of their own.

    Ranks that share memory hear of all faults but death as those on sockets do.
    """
    fault, ranks = job
    if ranks == "threads" or (ranks == "sockets" and fault.not_on_threads):
        return True
    if ranks == "shared-memory":
        return fault.name == "killed"
    return fault.name in ("killed", "stopped with the store", "raises in forward")


@pytest.mark.parametrize(
    "job", [pytest.param(job, id=_name(job), marks=() if _is_in_ci(job) else pytest.mark.soak) for job in JOBS]
)
def test_a_fault(observed: dict[Job, "Future[Observed]"], job: Job) -> None:
    cases = observed[job].result()
    assert len(cases) == len(cases_of(*job))
    for case, observation in cases:
        assert not observation.hung, "\n".join([str(case), *observation.hung])
        assert_told(case, job[1], observation)
        assert_trained_on(case, observation)


@pytest.mark.parametrize(
    "name",
    [
        "killed",
        pytest.param("raises in forward", marks=pytest.mark.soak),
        pytest.param("stopped", marks=pytest.mark.soak),
        pytest.param("returns early", marks=pytest.mark.soak),
        pytest.param("out of memory", marks=pytest.mark.soak),
    ],
)
def test_a_fault_of_ranks_that_pack_into_slots(name: str) -> None:
    """Others hear of a death though no message of NCCL is under way."""
    (fault,) = (each for each in FAULTS if each.name == name)
    with FaultRanks("slots", fault) as processes:
        for case in cases_of(fault, "slots"):
            observation = processes.observe(case)
            assert not observation.hung, "\n".join([str(case), *observation.hung])
            assert_told(case, "slots", observation)
            assert_trained_on(case, observation)


def assert_told(case: Case, ranks: Ranks, observation: Observation) -> None:
    for rank in others(case):
        kind, text, _ = observation.outcomes[rank]
        assert kind in ("PeerError", "RefusalError", "WorldError"), f"{case}: {kind}: {text}"
        assert f"rank {case.fault.culprit}" in text, f"{case}: {text}"
        assert "step 1 of 1 (" in text, f"{case}: {text}"
        assert news(text) == case.fault.told_on(ranks), f"{case}: {text}"


def assert_trained_on(case: Case, observation: Observation) -> None:
    for rank in others(case):
        assert observation.left_behind[rank] == [], str(case)
        assert observation.wrong[rank] == "", str(case)


def others(case: Case) -> list[int]:
    return [rank for rank in range(SIZE) if rank != case.fault.culprit]


def test_the_table_in_the_readme_is_of_these_faults() -> None:
    text = PAGE.read_text().partition("\n## Faults\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["fault", *MOMENTS]
    assert [row[0] for row in rows[2:]] == [fault.name for fault in FAULTS]
    for fault, (_, *cells) in zip(FAULTS, rows[2:], strict=True):
        seconds = ", ".join(r"\d+\.\d" if cases_of(fault, ranks) else "-" for ranks in RANKS)
        for cell in cells:
            assert re.fullmatch(f"{words_of(fault)}: {seconds} s", cell), cell
        assert fault.not_on_threads in " ".join(text.split()), f"why threads cannot be {fault.name}"


def test_a_process_that_says_nothing_is_asked_where_it_is(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    assert stacks_of(os.getpid(), stacks) == "it has not come to listen"
    listen(stacks)
    try:
        for _ in range(2):
            text = stacks_of(os.getpid(), stacks)
            assert text.count(test_a_process_that_says_nothing_is_asked_where_it_is.__name__) == 1, text
            assert re.match(r"in state [RS]\n", text), text
    finally:
        faulthandler.unregister(signal.SIGUSR2)
