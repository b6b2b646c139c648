"""Random redistributions on real processes, against the same torch.chunk arithmetic as on thread ranks."""

import pytest

from tests.harness.gloo_ranks import GlooRanks
from tests.harness.oracle.cases import (
    Case,
    Outcome,
    check_all,
    failure_text,
    inputs_of,
    random_case,
    run_case,
)

CASES_PER_TEST = 60


def run_cases(rank: int, cases: list[Case], device_type: str = "cpu") -> list[Outcome]:
    """This rank's part of every case."""
    found = []
    for case in cases:
        try:
            found.append(run_case(case, inputs_of(case), rank, device_type))
        except Exception as error:
            raise AssertionError(f"{error!r}; {failure_text(case)}") from error
    return found


def check_on(ranks: GlooRanks, first_seed: int, device_type: str = "cpu", timeout_s: float = 150.0) -> None:
    seeds = range(first_seed, first_seed + CASES_PER_TEST)
    cases = [random_case(seed, ranks.size, scattered=False) for seed in seeds]
    outcomes = ranks.run(run_cases, cases, device_type, timeout_s=timeout_s)
    check_all(cases, [inputs_of(case) for case in cases], outcomes)


@pytest.mark.parametrize("first_seed", range(100_000, 100_000 + 4 * CASES_PER_TEST, CASES_PER_TEST))
def test_random_cases_on_four_processes(four_ranks: GlooRanks, first_seed: int) -> None:
    check_on(four_ranks, first_seed)


@pytest.mark.parametrize("first_seed", range(300_000, 300_000 + 5 * CASES_PER_TEST, CASES_PER_TEST))
def test_random_cases_over_the_messages_of_gloo(four_gloo_ranks: GlooRanks, first_seed: int) -> None:
    check_on(four_gloo_ranks, first_seed)


@pytest.mark.extended
def test_random_cases_on_eight_processes(eight_ranks: GlooRanks) -> None:
    check_on(eight_ranks, 200_000)
