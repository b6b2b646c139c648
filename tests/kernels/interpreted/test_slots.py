"""Exchanges through slots with Triton's kernels, interpreted: packs, signals, unpacks and sums, phase by phase."""

import torch
from torch.testing import assert_close

from tests.comm.packing.test_placed_transfer import PAIRS, expected
from tests.harness.doubled import doubled
from tests.harness.slots_of_ranks import SlotsOfRanks, phased
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable
from tritondt.kernels.gpu.signals import DeviceSignals
from tritondt.kernels.signals import HostSignals
from tritondt.kernels.tables import CppMaker, TritonMaker


def test_all_phases_are_the_references():
    """Results, counts and words, bit by bit; each pair twice, as its slot is used again."""
    states, dtype = [], torch.bfloat16  # which sums widen and round
    for make, maker in ((DeviceSignals, TritonMaker()), (HostSignals, CppMaker())):
        with phased(make), doubled("cpu", table_maker=maker):
            ranks = SlotsOfRanks(3, 1 << 15)
            for source, target in [*PAIRS, *PAIRS]:
                whole = torch.arange(35).reshape(7, 5).to(dtype)
                for rank, found in enumerate(ranks.redistribute(source, target, whole)):
                    assert_close(found, expected(source, target, whole, rank, 3).contiguous(), rtol=0, atol=0)
        states.append(([memory.content for memory in ranks.memories], [each._counters for each in ranks.arenas]))
    (kernels, counts), (references, reference_counts) = states
    for found, reference in zip([*kernels, *counts], [*references, *reference_counts], strict=True):
        assert torch.equal(found, reference)


def test_nothing_is_copied_behind_a_closed_gate():
    gate, source, target = torch.ones(1, dtype=torch.int64), torch.arange(6.0), torch.full((6,), -1.0)
    table = DeviceCopyTable([CopyBox(0, 0, 0, 0, 4, (2, 3), (3, 1), (3, 1))], "cpu", gate=gate.data_ptr())
    for is_open, wanted in ((False, torch.full((6,), -1.0)), (True, source)):
        gate[0] = int(not is_open)
        table.run([source.data_ptr()], [target.data_ptr()])
        assert torch.equal(target, wanted)
