"""The double, built once, and processes that call it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.fake_nccl.library import FakeNccl, build, load
from tests.harness.gloo_ranks import GlooRanks


@pytest.fixture(scope="session")
def double() -> Path:
    return build()


@pytest.fixture(scope="session")
def ranks(kept_ranks: list[GlooRanks]) -> GlooRanks:
    """Eight processes; a test of fewer ranks leaves the last ones idle."""
    kept_ranks.append(GlooRanks(8))
    return kept_ranks[-1]


@pytest.fixture
def nccl(double: Path) -> Iterator[FakeNccl]:
    """The double in this process; whatever a test sets is set back, and it must leave nothing behind."""
    library = load(double)
    before = library.counts()
    yield library
    library.set(FAKE_NCCL_FAIL="", FAKE_NCCL_STALL="", FAKE_NCCL_ASYNC_ERROR="")
    library.set(FAKE_NCCL_PEER_LOSS="wait", FAKE_NCCL_MISMATCH="wait", FAKE_NCCL_SYMMETRIC=1)
    library.set(FAKE_NCCL_VERSION=23203, FAKE_NCCL_DELAY_MS=0, FAKE_NCCL_JOIN_MS=60_000, FAKE_NCCL_RING_BYTES=1 << 16)
    assert library.counts() == before, "communicators, streams, events, allocations"
