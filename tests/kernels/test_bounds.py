"""Tables made by hand that leave their tensors, or write an element twice."""

import itertools
import random

import pytest
import torch

from tests.csrc.drawing import nested_strides
from tritondt.kernels import reference
from tritondt.kernels.bounds import check_boxes
from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox, Slot

CAST = CastBox(0, 0, 0, 0, (2, 3), (3, 1), (3, 1))
COPY = CopyBox(0, 0, 0, 0, 4, (2, 3), (3, 1), (3, 1))
REDUCE = ReduceBox(0, 0, (2, 3), (3, 1), (Slot(0, 0, (3, 1)), Slot(1, 0, (3, 1))))


def elements(box):
    """Every element that a box writes, one by one."""
    loops = [range(length) for length in box.lengths]
    return [
        box.target_offset + sum(i * stride for i, stride in zip(indices, box.target_strides, strict=True))
        for indices in itertools.product(*loops)
    ]


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (CAST._replace(target_offset=5), r"boxes 0 and 1 write element 5 of target 0; no element is written twice"),
        (CAST, r"boxes 0 and 1 write element 0 of target 0"),
        (CAST._replace(target_offset=6, target_strides=(1, 1)), r"box 1 writes element 7 of target 0; no element"),
        (CAST._replace(target_offset=6, target_strides=(0, 1)), r"box 1 writes element 6 of target 0; no element"),
        (
            CAST._replace(target_offset=7),
            r"box 1: elements 7 to 12 of target 0, which has 12; a box lies within its te",
        ),
        (CAST._replace(target_offset=-1), r"box 1: elements -1 to 4 of target 0, which has 12"),
        (CAST._replace(source_offset=1), r"box 1: elements 1 to 6 of source 0, which has 6"),
        (CAST._replace(source_strides=(-3, 1)), r"box 1: elements -3 to 2 of source 0, which has 6"),
        (CAST._replace(source=1), r"box 1: source 1, but the number of sources is 1"),
        (CAST._replace(target=-1), r"box 1: target -1, but the number of targets is 1"),
    ],
)
def test_boxes_that_are_refused(box, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_boxes([CAST, box], [6], [12])


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (COPY._replace(target_offset=6), r"box 0: bytes 24 to 47 of target 0, which has 47; a box lies within"),
        (COPY._replace(source_offset=1), r"box 0: bytes 4 to 27 of source 0, which has 24"),
        (COPY._replace(target_strides=(2, 1)), r"box 0 writes byte 8 of target 0; no byte is written twice"),
    ],
)
def test_copies_are_counted_in_bytes(box, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_boxes([box], [24], [47])


def test_every_slot_is_looked_at():
    with pytest.raises(ValueError, match=r"box 0: elements 0 to 5 of source 1, which has 5"):
        check_boxes([REDUCE], [6, 5], [6])
    check_boxes([REDUCE], [6, 6], [6])


def test_nothing_and_empty_boxes_are_allowed():
    check_boxes([], [], [])
    check_boxes([CAST._replace(source=9, target=9, lengths=(0, 3))], [], [])


def test_boxes_between_each_other_are_allowed():
    even = CAST._replace(lengths=(3,), source_strides=(1,), target_strides=(2,))
    check_boxes([even, even._replace(target_offset=1)], [6], [6])
    check_boxes([CAST._replace(target_strides=(3, 2))], [6], [8])


@pytest.mark.in_ci(100)
@pytest.mark.parametrize("seed", range(200))
def test_random_boxes_against_all_elements(seed):
    draw = random.Random(seed)
    boxes = []
    for _ in range(draw.randint(1, 4)):
        lengths = tuple(draw.choice((0, 1, 2, 3, 4)) for _ in range(draw.randint(0, 3)))
        strides, _ = nested_strides(lengths, draw, 2)
        if draw.random() < 0.3:
            strides = tuple(draw.randint(1, 6) for _ in lengths)
        boxes.append(CastBox(0, 0, 0, draw.randint(0, 60), lengths, tuple(0 for _ in lengths), strides))
    written = [element for box in boxes for element in elements(box)]
    if len(set(written)) == len(written):
        check_boxes(boxes, [1], [1000])
    else:
        with pytest.raises(ValueError, match=r"of target 0; no element is written twice"):
            check_boxes(boxes, [1], [1000])


def quantize(sources, targets, boxes):
    reference.quantize_boxes(sources, targets, torch.ones(len(boxes)), boxes)


def add(sources, targets, boxes):
    reference.reduce_slots(sources, targets, boxes, "sum", 1)


@pytest.mark.parametrize(
    ("run", "boxes", "target_dtype"),
    [
        (reference.copy_boxes, [COPY, COPY._replace(target_offset=5)], torch.float32),
        (reference.cast_boxes, [CAST, CAST._replace(target_offset=5)], torch.float64),
        (quantize, [CAST] * 2, torch.float8_e5m2),
        (add, [REDUCE, REDUCE], torch.float32),
    ],
)
def test_the_reference_refuses_before_it_writes(run, boxes, target_dtype):
    target = torch.zeros(12).to(target_dtype)
    with pytest.raises(ValueError, match=r"boxes 0 and 1 write (byte|element) \d+ of target 0; no"):
        run([torch.ones(6), torch.ones(6)], [target], boxes)
    assert target.float().tolist() == [0.0] * 12


def test_the_reference_knows_how_far_a_view_reaches():
    x = torch.arange(24.0).reshape(4, 6)
    box = CastBox(0, 0, 0, 0, (4, 2), (6, 1), (2, 1))
    target = torch.zeros(8, dtype=torch.float64)
    reference.cast_boxes([x[:, 2:4]], [target], [box])
    assert target.tolist() == [2.0, 3.0, 8.0, 9.0, 14.0, 15.0, 20.0, 21.0]
    with pytest.raises(ValueError, match=r"box 0: elements 1 to 20 of source 0, which has 20; a box lies within"):
        reference.cast_boxes([x[:, 2:4]], [target], [box._replace(source_offset=1)])
