"""Tables on a device: made and uploaded once, refused where a pointer is not what it was said to be."""

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.random_boxes import behind_alignment, random_bytes
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu import box_table, device_table
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable
from tritondt.kernels.gpu.reduce_slots import DeviceReduceTable

BOX = CopyBox(0, 0, 0, 0, 4, (5, 7), (9, 1), (7, 1))
REDUCTION = ReduceBox(0, 0, (2, 3), (3, 1), (Slot(0, 0, (3, 1)), Slot(1, 0, (3, 1))))


@pytest.fixture
def uploads(monkeypatch):
    """Tables written and cells uploaded, counted."""
    counted = []
    write, upload = box_table.box_table, torch.tensor

    def count(name, call):
        def counting(*args, **kwargs):
            counted.append(name)
            return call(*args, **kwargs)

        return counting

    monkeypatch.setattr(device_table, "box_table", count("table", write))
    monkeypatch.setattr(torch, "tensor", count("upload", upload))
    return counted


def test_a_table_is_written_and_uploaded_once(uploads):
    table = DeviceCopyTable([BOX], "cpu")
    assert uploads == ["table", "upload"]
    for _ in range(3):
        source, target = random_bytes(43 * 4), torch.zeros(35 * 4, dtype=torch.uint8)
        source, target = behind_alignment(source, 0), behind_alignment(target, 0)
        table.run([source.data_ptr()], [target.data_ptr()], 1)
        packed = torch.cat([source[36 * row : 36 * row + 28] for row in range(5)])
        assert_close(target, packed, rtol=0, atol=0)
    assert uploads == ["table", "upload"]


def test_pointers_of_another_alignment_take_one_more_table(uploads):
    table = DeviceCopyTable([BOX], "cpu")
    for past in (0, 4, 1, 4, 1, 0):
        source = behind_alignment(random_bytes(43 * 4), past)
        target = behind_alignment(torch.zeros(35 * 4, dtype=torch.uint8), 0)
        table.run([source.data_ptr()], [target.data_ptr()])
        assert_close(target[28:56], source[36:64], rtol=0, atol=0)
    assert uploads == ["table", "upload"] * 3


def test_variants_are_bounded(uploads):
    table = DeviceCopyTable([CopyBox(0, 0, 0, 0, 1, (5,), (1,), (1,))], "cpu")
    source, target = random_bytes(64), torch.zeros(64, dtype=torch.uint8)
    start = -target.data_ptr() % 16
    for past in range(32):
        table.run([source.data_ptr() + past], [target.data_ptr() + start + past % 16])
        assert_close(target[start + past % 16 :][:5], source[past:][:5], rtol=0, atol=0)
    assert len(table._variants) == 16


@pytest.mark.parametrize(
    ("sources", "targets", "sentence"),
    [
        ([64], [], r"a box uses target 0, but the number of pointers in target_ptrs is 0"),
        ([], [64], r"a box uses source 0, but the number of pointers in source_ptrs is 0"),
        ([0], [64], r"a box uses source 0, whose address is 0; it must be a multiple of 1 and not null"),
        ([64], [0], r"a box uses target 0, whose address is 0"),
    ],
)
def test_copies_that_are_refused(sources, targets, sentence):
    with pytest.raises(ValueError, match=sentence):
        DeviceCopyTable([BOX], "cpu").run(sources, targets, 1)


@pytest.mark.parametrize(
    ("sources", "targets", "sentence"),
    [
        ([64], [64], r"a box uses source 1, but the number of pointers in source_ptrs is 1"),
        ([64, 0], [64], r"a box uses source 1, whose address is 0"),
        ([64, 66], [64], r"source 1, whose address is 66; it must be a multiple of 4 and not null"),
    ],
)
def test_reductions_that_are_refused(sources, targets, sentence):
    with pytest.raises(ValueError, match=sentence):
        DeviceReduceTable([REDUCTION], "sum", "float32", 1, "cpu").run(sources, targets, 1)


def test_a_misaligned_claim_is_refused_before_anything_is_written():
    table = DeviceCopyTable([BOX], "cpu", is_aligned=True)
    source = behind_alignment(random_bytes(43 * 4), 4)
    target = behind_alignment(torch.zeros(35 * 4, dtype=torch.uint8), 0)
    sentence = (
        rf"source 0, whose address is {source.data_ptr()}; it must be a multiple of 16 .* for aligned tensors only"
    )
    with pytest.raises(ValueError, match=sentence):
        table.run([source.data_ptr()], [target.data_ptr()])
    assert not target.any()
    table.run([source.data_ptr() - 4], [target.data_ptr()])
    assert target.any()


def test_dtypes_are_refused_before_anything_is_made(uploads):
    with pytest.raises(ValueError, match=r"op 'max' on dtype 'complex64'; allowed on it are sum, product"):
        DeviceReduceTable([REDUCTION], "max", "complex64", 1, "cpu")
    assert uploads == []


def test_max_ctas_bounds_the_programs(monkeypatch):
    grids = []
    launch = device_table.Launch

    def recording(kernel, table, places, device, choice):
        grids.append(min(table.num_tiles, choice.max_ctas))
        return launch(kernel, table, places, device, choice)

    monkeypatch.setattr(device_table, "Launch", recording)
    box = CopyBox(0, 0, 0, 0, 16, (100_000,), (1,), (1,))
    for max_ctas in (None, 7, 1_000_000):
        DeviceCopyTable([box], "cpu", max_ctas=max_ctas)
    assert grids[1] == 7
    assert grids[0] == grids[2] > 7
