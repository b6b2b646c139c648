"""Processes that tests share, of each transport: starting one costs as much as hundreds of redistributions."""

import pytest

from tests.harness.gloo_ranks import GlooRanks


@pytest.fixture(scope="session")
def four_ranks(kept_ranks: list[GlooRanks]) -> GlooRanks:
    kept_ranks.append(GlooRanks(4, {"TRITONDT_TRANSPORT": "sockets"}, own_network=True))
    return kept_ranks[-1]


@pytest.fixture(scope="session")
def eight_ranks(kept_ranks: list[GlooRanks]) -> GlooRanks:
    kept_ranks.append(GlooRanks(8, {"TRITONDT_TRANSPORT": "sockets"}))
    return kept_ranks[-1]


@pytest.fixture(scope="session")
def four_gloo_ranks(kept_ranks: list[GlooRanks]) -> GlooRanks:
    kept_ranks.append(GlooRanks(4, {"TRITONDT_TRANSPORT": "gloo"}))
    return kept_ranks[-1]


@pytest.fixture(scope="session")
def four_shared_memory_ranks(kept_ranks: list[GlooRanks]) -> GlooRanks:
    kept_ranks.append(GlooRanks(4, {"TRITONDT_TRANSPORT": "shared-memory", "TRITONDT_TIMEOUT": "60"}))
    return kept_ranks[-1]
