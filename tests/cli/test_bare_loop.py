"""Verdicts of the benchmark that compares the harness to a bare loop of torch.distributed."""

import pytest

from benchmarks.collectives.bare_loop import Found


@pytest.mark.parametrize(
    ("harness_ms", "bare_again_ms", "verdict"),
    [
        (104, 100, "agrees"),
        (96, 102, "agrees"),
        (106, 100, "differs"),
        (94, 98, "differs"),
        (104, 103, "undecided"),
        (120, 90, "undecided"),
    ],
)
def test_a_case_is_decided_only_where_the_loop_agrees_with_itself(harness_ms, bare_again_ms, verdict):
    found = Found("broadcast", 1 << 24, 1, 9, harness_ms / 1e3, 0.1, bare_again_ms / 1e3)
    assert found.verdict == verdict


def test_short_cases_are_not_judged():
    assert Found("broadcast", 1 << 20, 1, 99, 0.009, 0.0049, 0.0049).verdict == "not judged"
