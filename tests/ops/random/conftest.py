"""Ranks for tests of random numbers."""

from collections.abc import Iterator

import pytest

from tests.harness.gloo_ranks import GlooRanks


@pytest.fixture(scope="module")
def processes() -> Iterator[GlooRanks]:
    """Four ranks, each with a default generator of its own."""
    with GlooRanks(4) as ranks:
        yield ranks
