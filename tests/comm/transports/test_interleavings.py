"""Any asynchronous plans, waited for in any order on any rank, end and give what the whole tensors give."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.interleavings import Program, programs, run
from tests.harness.nccl_on_host import ranks_on
from tritondt.comm.transports.threads import run_ranks

PROGRAMS_PER_ORDER = 8


# How many times as many programs a case runs: once for CI, the others for `make soak`.
TIMES = pytest.mark.parametrize(
    "times", [pytest.param(1, marks=pytest.mark.extended), pytest.param(4, marks=pytest.mark.soak)]
)


@TIMES
@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_thread_ranks(size: int, times: int) -> None:
    @settings(max_examples=30 * times, suppress_health_check=[HealthCheck.too_slow])
    @given(programs(size))
    def every(program: Program) -> None:
        run_ranks(size, lambda rank: run(program, rank))

    every()


@pytest.fixture(scope="module", params=["sockets", "shared-memory", "gloo", "nccl"])
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with ranks_on(request.param, 4, TRITONDT_TIMEOUT="20") as started:
        started.transport = request.param  # type: ignore[attr-defined]
        yield started


def run_all(rank: int, several: list[Program]) -> None:
    """In a world of their own, which those before cannot have spoilt."""
    T.abort()
    for program in several:
        run(program, rank)


@TIMES
def test_on_processes(ranks: GlooRanks, times: int) -> None:
    num_orders = times * {"sockets": 7, "shared-memory": 3, "gloo": 1, "nccl": 2}[ranks.transport]  # type: ignore[attr-defined]

    # Nothing is shrunk: what fails on processes alone may not fail again.
    @settings(max_examples=num_orders, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(programs(4), min_size=PROGRAMS_PER_ORDER, max_size=PROGRAMS_PER_ORDER))
    def every(several: list[Program]) -> None:
        ranks.run(run_all, several)

    every()
