"""The engine's matrix with the NCCL transport, on the test double of NCCL (`tests/harness/nccl_on_host.py`)."""

from collections.abc import Iterator

import pytest

from tests.comm.transports.test_gloo_cases import check_on
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import use_fake_nccl

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(request.param, {"TRITONDT_TIMEOUT": "60"}, prepare=use_fake_nccl) as started:
        yield started


@pytest.mark.parametrize("first_seed", [400_000, 400_060])
def test_random_cases(ranks: GlooRanks, first_seed: int) -> None:
    check_on(ranks, first_seed)
