"""Ranks as processes, which the tests of this folder share: torch's own sharded tensors need Gloo."""

from collections.abc import Iterator

import pytest

from tests.harness.gloo_ranks import GlooRanks


@pytest.fixture(scope="package")
def three_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(3) as ranks:
        yield ranks
