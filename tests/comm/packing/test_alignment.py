"""Where messages start: in line for a GPU, whose copies of misaligned bytes go one by one, and anywhere on the CPU."""

import math

import pytest
import torch

from tritondt.comm.communicator import Reduction, Transfer
from tritondt.comm.packing.messages import Slices
from tritondt.comm.packing.packed_transfer import PackedTransfer, TensorStarts, packed_transfer
from tritondt.comm.packing.wire_cast import casting_transfer
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.comm.transports.sockets import SocketCommunicator
from tritondt.planning.alignment import DENSE, NCCL_ALIGNMENT, Alignment
from tritondt.planning.cost import CostTable
from tritondt.planning.planner import make_plan
from tritondt.planning.storage import rank_blocks
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements


def transfers(size: int, shape: tuple[int, ...], source: str, target: str) -> list[Transfer]:
    """Those of all ranks and steps of a redistribution of bfloat16."""
    before, after = (Layout((size,), parse_placements(text), shape) for text in (source, target))
    found = []
    for step in make_plan(before, after, 2, CostTable()).steps:
        reduction = Reduction("sum", 1) if step.kind == "reduce" else None
        for rank in range(size):
            held, wanted = rank_blocks(step, rank)
            found.append(
                Transfer(step.exchange((rank,)), (held,), (wanted,), (torch.bfloat16,), (reduction,), 1, "a test")
            )
    return found


def misaligned_share(compiled: list[PackedTransfer]) -> float:
    """The part of all bytes in messages of at least 32 KB that do not start at a multiple of 16."""
    slices = [found for each in compiled for side in (each.sends, each.receives) for found in side]
    odd = sum(found.num_bytes for found in slices if found.start % 16 and found.num_bytes >= 1 << 15)
    return odd / sum(found.num_bytes for found in slices)


@pytest.mark.parametrize(
    ("size", "shape", "source", "target", "before"),
    [(6, (4096, 4096), "S0", "S1", 0.82), (8, (4097, 4099), "P", "R", 0.61)],
)
def test_no_large_message_over_nccl_is_misaligned(
    size: int, shape: tuple[int, ...], source: str, target: str, before: float
) -> None:
    found = transfers(size, shape, source, target)
    assert round(misaligned_share([packed_transfer(each, DENSE) for each in found]), 2) == before
    assert misaligned_share([packed_transfer(each, NCCL_ALIGNMENT) for each in found]) == 0


def sizes_of(slices: Slices) -> list[tuple[int, int]]:
    return [(found.peer, found.num_bytes) for found in slices]


@pytest.mark.parametrize(("source", "target"), [("S0", "S1"), ("S1", "R"), ("P", "R"), ("S0", "R")])
def test_alignment_changes_no_message(source: str, target: str) -> None:
    for transfer in transfers(4, (1023, 1021), source, target):
        dense, aligned = (packed_transfer(transfer, each) for each in (DENSE, NCCL_ALIGNMENT))
        assert sizes_of(dense.sends) == sizes_of(aligned.sends)
        assert sizes_of(dense.receives) == sizes_of(aligned.receives)
        for found in (*aligned.sends, *aligned.receives):
            assert found.tensor is not None or found.start % 128 == 0
        for side, size in ((aligned.sends, aligned.packed_bytes), (aligned.receives, aligned.staged_bytes)):
            ends = [found.start + found.num_bytes for found in side if found.tensor is None]
            assert size == max(ends, default=0)


@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.float8_e4m3fn])
def test_messages_of_another_dtype_are_aligned_too(wire_dtype: torch.dtype) -> None:
    before, after = (Layout((4,), parse_placements(text), (37, 53)) for text in ("S0", "S1"))
    (step,) = make_plan(before, after, 4, CostTable()).steps
    held, wanted = rank_blocks(step, 1)
    transfer = Transfer(step.exchange((1,)), (held,), (wanted,), (torch.float32,), (None,), 1, "a test")
    dense, aligned = (casting_transfer(transfer, wire_dtype, each) for each in (DENSE, NCCL_ALIGNMENT))
    assert sizes_of(dense.sends) == sizes_of(aligned.sends)
    assert any(found.start % 128 for found in dense.sends)
    assert not any(found.start % 128 for found in (*aligned.sends, *aligned.receives))


def test_a_small_message_is_not_worth_a_launch() -> None:
    """Rows of 53 elements: in place, misaligned as they are."""
    for transfer in transfers(4, (37, 53), "S0", "R"):
        assert packed_transfer(transfer, NCCL_ALIGNMENT).packed_bytes == 0


def test_each_transport_has_its_own() -> None:
    assert NcclCommunicator.alignment == NCCL_ALIGNMENT
    assert SocketCommunicator.alignment == DENSE
    assert math.gcd(*NCCL_ALIGNMENT[:2]) == 16
    assert Alignment(64, 16, 0).start(0, 4) == 0


@pytest.mark.parametrize(("source", "target"), [("S0", "R"), ("R", "S0"), ("P", "R"), ("S0", "S1")])
def test_tensors_that_start_elsewhere_are_packed_where_they_do(source: str, target: str) -> None:
    """A local tensor may be a view, and then starts between multiples of 16, which no plan knows of."""
    for transfer in transfers(4, (1024, 1024), source, target):
        usual = packed_transfer(transfer, NCCL_ALIGNMENT)
        for past in (2, 8):
            starts = TensorStarts((past,), (past,))
            found = packed_transfer(transfer, NCCL_ALIGNMENT, starts)
            assert sizes_of(found.sends) == sizes_of(usual.sends)
            assert sizes_of(found.receives) == sizes_of(usual.receives)
            for one in (*found.sends, *found.receives):
                assert one.tensor is None or (one.start + past) % 16 == 0 or one.num_bytes < NCCL_ALIGNMENT.large_bytes
