"""Exchanges through slots of other ranks' memory, all ranks in one process, phase by phase; exact."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.harness.slots_of_ranks import SlotsOfRanks, phased
from tritondt.kernels.signals import HostSignals

PAIRS = (("S0", "S1"), ("S1", "S0"), ("S0", "R"), ("S1", "R"), ("P", "S0"), ("P", "R"))


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[SlotsOfRanks]:
    with phased(HostSignals):
        yield SlotsOfRanks(request.param, 1 << 16)


def expected(source: str, target: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    total = whole * (size * (size + 1) // 2) if source == "P" else whole
    if target == "R":
        return total
    parts = total.chunk(size, int(target[1]))
    return parts[rank] if rank < len(parts) else total.narrow(int(target[1]), 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5], indirect=True)
def test_exchanges_in_turns(ranks: SlotsOfRanks, dtype: torch.dtype) -> None:
    """Six exchanges three times, on two slots: a slot is used again by the same one and by others."""
    for turn in range(3):
        for source, target in PAIRS:
            whole = ((torch.arange(35) + 11 * turn) % 7).reshape(7, 5).to(dtype)
            for rank, found in enumerate(ranks.redistribute(source, target, whole)):
                wanted = expected(source, target, whole, rank, ranks.size)
                torch.testing.assert_close(found, wanted.contiguous(), rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_that_a_slot_has_been_read_is_said_with_the_next_exchange(ranks: SlotsOfRanks) -> None:
    ranks.redistribute("S0", "R", torch.arange(35.0).reshape(7, 5))
    (plans,) = ranks._plans.values()
    arenas = ranks.arenas[0]
    word = ctypes.c_int64.from_address(arenas.address + arenas.slots.unpacked_word(1, 0))
    assert word.value == 0  # rank 0 has packed once, and does not pack there again
    next_of_reader: Any = plans[1].begin
    next_of_reader.publish.run()
    assert word.value == 1 << 32
    assert arenas._counters.sum() == 2  # a message each way
