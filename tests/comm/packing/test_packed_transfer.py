"""What is copied and what is not: messages that are one run of memory use no buffer, and buffers have no padding."""

import pytest
import torch

import tritondt as T
from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.packed_transfer import PackedTransfer, packed_transfer
from tritondt.planning.exchange import exchange
from tritondt.planning.storage import blocks
from tritondt.sharding.layout import Layout
from tritondt.sharding.strides import dense_strides


def packed(
    source: str,
    target: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    rank: int = 1,
    joint_bytes: int = 0,
) -> PackedTransfer:
    """The side of one of four ranks of an exchange of float32."""
    before, after = (Layout((4,), T.parse_placements(text), shape) for text in (source, target))
    return packed_transfer(
        Transfer(
            exchange(before, after, (rank,)),
            (blocks(before, (rank,), strides),),
            (blocks(after, (rank,)),),
            (torch.float32,),
            (None,),
            1,
            "a test",
        ),
        joint_bytes=joint_bytes,
    )


def test_rows_are_sent_from_and_land_in_the_tensors() -> None:
    found = packed("S0", "R", (8, 3))
    assert (found.packed_bytes, found.staged_bytes, found.pack, found.unpack) == (0, 0, None, None)
    assert [(item.peer, item.tensor, item.start, item.num_bytes) for item in found.sends] == [
        (2, 0, 0, 24), (3, 0, 0, 24), (0, 0, 0, 24),
    ]  # fmt: skip
    assert [(item.peer, item.tensor, item.start) for item in found.receives] == [(2, 0, 48), (3, 0, 72), (0, 0, 0)]


def test_columns_are_packed_once_for_all_peers_without_padding() -> None:
    found = packed("S0", "S1", (8, 7))
    # Rank 1 holds 2 of 8 rows; the other ranks take 2, 2 and 1 of 7 columns.
    assert found.packed_bytes == 4 * 2 * (2 + 2 + 1) == sum(item.num_bytes for item in found.sends)
    assert found.pack is not None
    assert found.pack.num_bytes == found.packed_bytes
    # What arrives are rows of a target of 2 columns: one run each.
    assert (found.staged_bytes, found.unpack) == (0, None)


def test_columns_that_arrive_are_unpacked() -> None:
    found = packed("S1", "R", (8, 8))
    assert (found.packed_bytes, found.pack) == (0, None)
    assert found.staged_bytes == 4 * 8 * 6
    assert found.unpack is not None
    assert found.unpack.num_bytes == found.staged_bytes


def test_what_stays_is_moved_by_itself() -> None:
    found = packed("S0", "S1", (8, 8))
    assert found.keep is not None
    assert found.keep.num_bytes == 4 * 2 * 2


@pytest.mark.parametrize(("joint_bytes", "joint"), [(15, None), (16, "pack")])
def test_a_little_that_stays_is_moved_with_the_pack(joint_bytes: int, joint: str | None) -> None:
    found = packed("S0", "S1", (8, 8), joint_bytes=joint_bytes)
    assert (found.joint, found.keep is None) == (joint, joint is not None)
    assert found.pack is not None
    assert found.pack.num_bytes == found.packed_bytes + (16 if joint else 0)
    source = torch.arange(16, dtype=torch.float32).reshape(2, 8)  # rows 2 and 3; columns 2 and 3 stay
    buffer, target = torch.zeros(12), torch.full((8, 2), -1.0)
    outputs = [buffer.data_ptr(), target.data_ptr()] if joint else [buffer.data_ptr()]
    found.pack.run([source.data_ptr()], outputs, 1)
    assert sorted(buffer.tolist()) == [value for value in range(16) if value % 8 not in (2, 3)]
    assert torch.equal(target[2:4], source[:, 2:4] if joint else torch.full((2, 2), -1.0))
    assert target.eq(-1).sum() == (12 if joint else 16)


@pytest.mark.parametrize(("joint_bytes", "joint"), [(0, None), (1, "unpack")])
def test_all_that_stays_is_moved_with_the_unpack(joint_bytes: int, joint: str | None) -> None:
    """The unpack comes behind the messages, as what stays does, and holds up nothing."""
    found = packed("S1", "R", (8, 8), joint_bytes=joint_bytes)
    assert (found.joint, found.keep is None) == (joint, joint is not None)
    assert found.unpack is not None
    assert found.unpack.num_bytes == found.staged_bytes + (64 if joint else 0)
    source = torch.arange(16, dtype=torch.float32).reshape(8, 2)  # columns 2 and 3
    staging, target = torch.full((48,), 100.0), torch.full((8, 8), -1.0)
    inputs = [staging.data_ptr(), source.data_ptr()] if joint else [staging.data_ptr()]
    found.unpack.run(inputs, [target.data_ptr()], 1)
    assert torch.equal(target[:, 2:4], source if joint else torch.full((8, 2), -1.0))
    assert target.eq(100).sum() == 48


def test_what_stays_is_moved_by_itself_where_nothing_is_packed() -> None:
    found = packed("S0", "R", (8, 8), joint_bytes=1 << 20)
    assert (found.joint, found.pack) == (None, None)
    assert found.keep is not None


@pytest.mark.parametrize(("strides", "packed_bytes"), [((3, 1), 0), ((1, 2), 72), ((6, 2), 72)])
def test_zero_copy_is_decided_by_the_strides_and_changes_no_message(
    strides: tuple[int, int], packed_bytes: int
) -> None:
    dense, found = packed("S0", "R", (8, 3)), packed("S0", "R", (8, 3), strides)
    assert found.packed_bytes == packed_bytes
    assert [(item.peer, item.num_bytes) for item in found.sends] == [
        (item.peer, item.num_bytes) for item in dense.sends
    ]
    assert found.receives == dense.receives


@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3), (1,), ()])
def test_dense_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert dense_strides(shape) == torch.empty(shape).stride()
