"""Exchanges through slots with Triton's kernels, interpreted on all ranks: packs, unpacks and sums."""

from typing import Any

import torch
from torch.testing import assert_close

from tests.comm.packing.test_placed_transfer import PAIRS, expected
from tests.harness.doubled import doubled
from tests.harness.slots_of_ranks import SlotsOfRanks
from tritondt.kernels.tables import CppMaker, TritonMaker


def test_all_launches_are_the_references():
    """Results, counts and words, bit by bit; six exchanges on two slots."""
    states, dtype = [], torch.bfloat16  # which sums widen and round
    for maker in (TritonMaker(), CppMaker()):
        with doubled("cpu", table_maker=maker):
            ranks = SlotsOfRanks(4, 1 << 15)
            for source, target in PAIRS:
                whole = torch.arange(35).reshape(7, 5).to(dtype)
                for rank, found in enumerate(ranks.redistribute(source, target, whole)):
                    assert_close(found, expected(source, target, whole, rank, 4).contiguous(), rtol=0, atol=0)
        states.append(([memory.content for memory in ranks.memories], [each._counters for each in ranks.arenas]))
    (kernels, counts), (references, reference_counts) = states
    for found, reference in zip([*kernels, *counts], [*references, *reference_counts], strict=True):
        assert torch.equal(found, reference)


def test_an_exchange_is_two_launches_of_a_kernel():
    """One table that packs, and one that unpacks or adds, each of one launch."""
    with doubled("cpu", table_maker=TritonMaker()):
        ranks = SlotsOfRanks(4, 1 << 15)
        for source, target in PAIRS:
            for plan in ranks.plans(source, target, torch.zeros(8, 8)):
                tables: list[Any] = [table for table in (plan.pack, plan.unpack, *plan.reduces) if table is not None]
                assert [table.num_launches for table in tables] == [1, 1], (source, target)
