"""Four ranks on Gloo, started once for all that needs processes here."""

import pytest

from tests.harness.gloo_ranks import GlooRanks


@pytest.fixture(scope="session")
def four_ranks(kept_ranks: list[GlooRanks]) -> GlooRanks:
    kept_ranks.append(GlooRanks(4))
    return kept_ranks[-1]
