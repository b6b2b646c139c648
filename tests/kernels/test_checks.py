"""What the functions on tensors refuse: other devices, other dtypes, boxes out of bounds, boxes written twice."""

import random

import pytest
import torch

from tests.kernels.bytes_of import bytes_of
from tests.kernels.random_boxes import nested_strides, random_copy_boxes
from tritondt.kernels import checks
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.loop_nest import copy_nest

FLOATS = torch.zeros(10)


def nests(*boxes):
    return [copy_nest(position, box) for position, box in enumerate(boxes)]


def target_box(offset, lengths, strides, *, itemsize=4, target=0):
    return CopyBox(0, target, 0, offset, itemsize, lengths, (0,) * len(lengths), strides)


def test_devices_are_the_same():
    meta = torch.empty(3, device="meta")
    assert checks.common_device([FLOATS], [FLOATS]) == torch.device("cpu")
    assert checks.common_device([], []) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"source 0 lies on cpu and target 1 on meta; all tensors must lie on one"):
        checks.common_device([FLOATS], [FLOATS, meta])


def test_dtypes_are_the_same():
    assert checks.common_dtype([FLOATS], [FLOATS]) == torch.float32
    assert checks.common_dtype([], []) is None
    with pytest.raises(ValueError, match=r"source 0 is torch.float32 and target 0 is torch.float16; a reduction is of"):
        checks.common_dtype([FLOATS, FLOATS], [FLOATS.half()])


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (CopyBox(0, 0, 6, 0, 4, (5,), (1,), (1,)), r"box 1 reaches from byte 24 to 44 of source 0, which has 40"),
        (CopyBox(0, 0, 0, 6, 4, (5,), (1,), (1,)), r"box 1 reaches from byte 24 to 44 of target 0, which has 40"),
        (CopyBox(0, 0, 3, 0, 4, (5,), (-1,), (1,)), r"box 1 reaches from byte -4 to 16 of source 0, which has 40"),
        (CopyBox(0, 0, -1, 0, 4, (), (), ()), r"box 1 reaches from byte -4 to 0 of source 0"),
        (CopyBox(0, 0, 0, 0, 4, (2, 5), (0, 1), (6, 1)), r"box 1 reaches from byte 0 to 44 of target 0"),
        (CopyBox(1, 0, 0, 0, 4, (1,), (1,), (1,)), r"box 1 uses source 1, but the number of sources is 1"),
        (CopyBox(0, 3, 0, 0, 4, (1,), (1,), (1,)), r"box 1 uses target 3, but the number of targets is 1"),
    ],
)
def test_boxes_stay_in_their_tensors(box, sentence):
    good = CopyBox(0, 0, 9, 0, 4, (10,), (-1,), (1,))
    with pytest.raises(ValueError, match=sentence):
        checks.check_inside([FLOATS], [FLOATS], nests(good, box))


def test_a_view_ends_at_its_last_element():
    view = torch.zeros(4, 10)[:, :3]
    checks.check_inside([view], [view], nests(CopyBox(0, 0, 0, 0, 4, (4, 3), (10, 1), (10, 1))))
    with pytest.raises(ValueError, match=r"to 136 of target 0, which has 132"):
        checks.check_inside([view], [view], nests(CopyBox(0, 0, 0, 0, 4, (4, 4), (10, 1), (10, 1))))


def test_empty_boxes_reach_nowhere():
    empty = CopyBox(9, 9, 100, 100, 4, (3, 0), (1, 1), (1, 1))
    checks.check_inside([], [], nests(empty))
    checks.check_disjoint([], nests(empty))


@pytest.mark.parametrize(
    ("boxes", "sentence"),
    [
        ([target_box(0, (5,), (1,)), target_box(4, (5,), (1,))], r"boxes 0 and 1 write the same bytes"),
        ([target_box(0, (3, 2), (3, 1)), target_box(4, (2, 2), (3, 1))], r"boxes 0 and 1 write the same bytes"),
        ([target_box(0, (2, 3), (2, 1))], r"box 0 writes some bytes twice"),
        ([target_box(0, (2, 2), (1, 1))], r"box 0 writes some bytes twice"),
        (
            [target_box(0, (2,), (9,)), target_box(1, (8,), (1,)), target_box(18, (1,), (1,), itemsize=2)],
            r"boxes 0 and 2 write the same bytes; target boxes may not overlap",
        ),
    ],
)
def test_boxes_that_overlap(boxes, sentence):
    with pytest.raises(ValueError, match=sentence):
        checks.check_disjoint([FLOATS], nests(*boxes))


def test_boxes_that_overlap_through_two_tensors():
    boxes = [target_box(0, (5,), (1,)), target_box(0, (1,), (1,), target=1)]
    checks.check_disjoint([FLOATS, FLOATS[5:]], nests(*boxes))
    with pytest.raises(ValueError, match=r"boxes 0 and 1 write the same bytes"):
        checks.check_disjoint([FLOATS, FLOATS[4:]], nests(*boxes))


def test_interleaved_boxes_are_disjoint():
    columns = [target_box(column, (4, width), (10, 1)) for column, width in ((0, 3), (3, 1), (4, 6))]
    checks.check_disjoint([torch.zeros(40)], nests(*columns))
    # Strides that step into each other without ever meeting: 0, 2, 3, 5.
    checks.check_disjoint([FLOATS], nests(target_box(0, (2, 2), (3, 2)), target_box(1, (2,), (3,))))


@pytest.mark.parametrize("seed", range(40))
def test_overlaps_are_found_where_there_are_any(seed):
    draw = random.Random(seed)
    boxes = []
    for _ in range(2):
        lengths = tuple(draw.choice((1, 2, 3, 4)) for _ in range(3))
        strides, _ = nested_strides(lengths, draw, draw.sample(range(3), 3))
        boxes.append(target_box(draw.randint(0, 60), lengths, strides, itemsize=draw.choice((1, 2, 4))))
    written = [bytes_of(nest) for nest in nests(*boxes)]
    overlap = bool(written[0].keys() & written[1].keys())
    try:
        checks.check_disjoint([torch.zeros(4096)], nests(*boxes))
        found = False
    except ValueError:
        found = True
    assert found == overlap


def test_random_tables_are_disjoint():
    for seed in range(30):
        boxes, _, filled = random_copy_boxes(random.Random(seed), 5)
        checks.check_disjoint([torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in filled], nests(*boxes))
