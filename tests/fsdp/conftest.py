"""Four ranks on Gloo, started once for all that needs processes here."""

from collections.abc import Iterator

import pytest

from tests.harness.gloo_ranks import GlooRanks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4) as ranks:
        yield ranks
