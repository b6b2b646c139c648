"""Processes that tests share, on both transports: starting one costs as much as hundreds of redistributions."""

from collections.abc import Iterator

import pytest

from tests.harness.gloo_ranks import GlooRanks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4, own_network=True) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(8) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_gloo_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4, {"TRITONDT_TRANSPORT": "gloo"}) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_direct_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4, {"TRITONDT_TRANSPORT": "direct", "TRITONDT_TIMEOUT": "60"}) as ranks:
        yield ranks
