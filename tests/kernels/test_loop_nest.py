"""Boxes as loops: what is refused, and what is merged."""

import random

import pytest

from tests.kernels.bytes_of import bytes_of
from tests.kernels.random_boxes import random_copy_boxes
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu.loop_nest import coalesce, copy_nest, cut, halves, reduce_nest, span_bytes

GOOD = CopyBox(0, 0, 0, 0, 4, (2, 3), (3, 1), (3, 1))
GOOD_REDUCTION = ReduceBox(0, 0, (2, 3), (3, 1), (Slot(0, 0, (3, 1)), Slot(1, 0, (3, 1))))


@pytest.mark.parametrize(
    ("lengths", "source_strides", "target_strides", "merged"),
    [
        ((), (), (), (4,)),
        ((6,), (1,), (1,), (24,)),
        ((2, 3, 4), (12, 4, 1), (12, 4, 1), (96,)),
        ((1, 5, 1), (99, 1, 7), (3, 1, 98), (20,)),
        ((4, 3), (1, 4), (1, 4), (48,)),
        ((2, 3, 4), (24, 8, 1), (12, 4, 1), (6, 16)),
        ((2, 3, 4), (24, 8, 2), (12, 4, 1), (24, 4)),
        ((3, 4), (1, 3), (4, 1), (3, 4, 4)),
        ((2, 3, 4), (100, 10, 1), (12, 4, 1), (2, 3, 16)),
        ((2, 3), (0, 0), (3, 1), (6, 4)),
        ((2, 3), (-3, -1), (3, 1), (6, 4)),
    ],
)
def test_loops_are_merged(lengths, source_strides, target_strides, merged):
    assert coalesce(copy_nest(0, CopyBox(0, 0, 0, 0, 4, lengths, source_strides, target_strides))).lengths == merged


@pytest.mark.parametrize("seed", range(60))
def test_merging_and_cutting_keep_every_byte(seed):
    draw = random.Random(seed)
    boxes, _, _ = random_copy_boxes(draw, 1)
    nest = copy_nest(0, boxes[0])
    merged = coalesce(nest)
    assert bytes_of(merged) == bytes_of(nest)
    if nest.num_bytes == 0:
        return
    dim = draw.randrange(len(nest.lengths))
    middle = draw.randint(0, nest.lengths[dim])
    parts = cut(nest, dim, 0, middle), cut(nest, dim, middle, nest.lengths[dim])
    assert {**bytes_of(parts[0]), **bytes_of(parts[1])} == bytes_of(nest)
    assert sum(part.num_bytes for part in parts) == nest.num_bytes


def test_halves_are_cut_where_the_nest_reaches_farthest():
    nest = copy_nest(0, CopyBox(0, 0, 0, 0, 2, (100, 70), (70, 1), (1, 1000)))
    one, other = halves(nest)
    assert (one.lengths, other.lengths) == ((100, 32, 2), (100, 38, 2))
    assert other.operands[0].offset == 32 * 1000 * 2
    assert span_bytes(nest, nest.operands[0]) == 2 * (99 + 69 * 1000) + 2


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (GOOD._replace(itemsize=3), r"box 7: itemsize 3; allowed are 1, 2, 4, 8 and 16"),
        (GOOD._replace(source=-1), r"box 7: source is tensor -1; positions .* are 0 or more"),
        (GOOD._replace(target=-2), r"box 7: target is tensor -2; positions .* are 0 or more"),
        (GOOD._replace(lengths=(-1, 3)), r"box 7: length -1 in dim 0; lengths are 0 or more"),
        (GOOD._replace(source_strides=(1,)), r"box 7: source has 1 strides for 2 lengths; one stride per length"),
        (GOOD._replace(target_strides=(0, 1)), r"box 7: target stride 0 in dim 0 of length 2; .* are positive"),
        (GOOD._replace(target_strides=(3, -1)), r"box 7: target stride -1 in dim 1 of length 3"),
        (CopyBox(0, 0, 0, 0, 1, (1,) * 17, (1,) * 17, (1,) * 17), r"box 7: 17 dims; at most 16 are allowed"),
        (GOOD._replace(source_offset=2**60), r"box 7: reaches \d+ bytes from the first element; at most 2\^62"),
        (GOOD._replace(target_strides=(2**60, 1)), r"box 7: reaches \d+ bytes from the first element"),
    ],
)
def test_copies_that_cannot_be(box, sentence):
    with pytest.raises(ValueError, match=sentence):
        copy_nest(7, box)


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (GOOD_REDUCTION._replace(slots=()), r"box 2: no slots; a box reduces 1 slot or more"),
        (GOOD_REDUCTION._replace(slots=(Slot(0, 0, (1,)),)), r"box 2: slot has 1 strides for 2 lengths"),
        (
            GOOD_REDUCTION._replace(slots=(GOOD_REDUCTION.slots[0], Slot(-4, 0, (1, 1)))),
            r"box 2: slot 1 is tensor -4; positions",
        ),
        (GOOD_REDUCTION._replace(target_strides=(0, 1)), r"box 2: target stride 0 in dim 0 of length 2"),
    ],
)
def test_reductions_that_cannot_be(box, sentence):
    with pytest.raises(ValueError, match=sentence):
        reduce_nest(2, box, 4)


def test_target_strides_of_short_loops_are_free():
    box = CopyBox(0, 0, 0, 0, 4, (1, 0, 5), (0, 0, 1), (0, -3, 1))
    assert coalesce(copy_nest(0, box)).num_bytes == 0
