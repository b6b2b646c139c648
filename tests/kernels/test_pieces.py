"""Boxes as pieces: every byte once, aligned as claimed, wide where it can be."""

import random

import pytest

from tests.kernels.bytes_of import bytes_of, bytes_of_pieces
from tests.kernels.random_boxes import random_copy_boxes, random_reduce_boxes
from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu.loop_nest import LoopNest, cast_nest, copy_nest, reduce_nest
from tritondt.kernels.gpu.pieces import Grain, Kind, copy_pieces, run_pieces


def pieces_of(itemsize, lengths, source_strides, target_strides, *, source_offset=0, target_offset=0):
    box = CopyBox(0, 0, source_offset, target_offset, itemsize, lengths, source_strides, target_strides)
    return list(copy_pieces(copy_nest(0, box)))


def shapes(pieces):
    return [(piece.kind, piece.width, piece.lengths) for piece in pieces]


def assert_aligned(pieces):
    for piece in pieces:
        for operand in piece.operands:
            assert operand.offset % piece.width == 0


def moved(nest: LoopNest, draw: random.Random) -> LoopNest:
    """The nest with every tensor a few bytes behind an alignment."""
    operands = (operand._replace(offset=operand.offset + draw.choice((0, 0, 1, 2, 4, 8))) for operand in nest.operands)
    return nest._replace(operands=tuple(operands))


@pytest.mark.in_ci(60)
@pytest.mark.parametrize("seed", range(150))
def test_pieces_of_random_copies_are_the_box(seed):
    draw = random.Random(seed)
    boxes, _, _ = random_copy_boxes(draw, 1)
    nest = moved(copy_nest(0, boxes[0]), draw)
    pieces = list(copy_pieces(nest))
    assert bytes_of_pieces(pieces) == bytes_of(nest)
    assert_aligned(pieces)


@pytest.mark.parametrize("seed", range(60))
def test_pieces_of_random_reductions_are_the_box(seed):
    draw = random.Random(seed)
    itemsize = draw.choice((1, 2, 4, 8))
    boxes, _, _ = random_reduce_boxes(draw, 1, 400)
    nest = reduce_nest(0, boxes[0], itemsize)
    pieces = list(run_pieces(nest, Grain()))
    assert bytes_of_pieces(pieces) == bytes_of(nest)
    assert_aligned(pieces)
    assert all(piece.width % itemsize == 0 and piece.kind in (Kind.RUNS, Kind.GROUPS) for piece in pieces)


@pytest.mark.parametrize(
    ("itemsize", "offset", "width"),
    [(1, 0, 16), (1, 1, 1), (1, 6, 2), (2, 2, 4), (4, 2, 8), (4, 3, 4), (8, 1, 8), (16, 5, 16)],
)
def test_width_is_what_offsets_allow(itemsize, offset, width):
    (piece,) = pieces_of(itemsize, (3, 16), (48, 1), (80, 1), source_offset=offset)
    assert piece.width == width


def test_rows_that_do_not_fill_wide_units_have_wide_bodies():
    pieces = pieces_of(4, (5, 103), (104, 1), (104, 1), source_offset=3, target_offset=7)
    assert shapes(pieces) == [
        (Kind.RUNS, 4, (5,)),
        (Kind.RUNS, 16, (25, 5)),
        (Kind.RUNS, 8, (5,)),
    ]
    # Not where rows lie differently to each other: those are moved in blocks of the target.
    assert shapes(pieces_of(4, (5, 103), (103, 1), (104, 1))) == [(Kind.SHIFTED, 4, (103, 5))]
    assert shapes(pieces_of(4, (5, 103), (104, 1), (104, 1), target_offset=1)) == [(Kind.SHIFTED, 4, (103, 5))]
    assert shapes(pieces_of(4, (5, 103), (104, 1), (104, 1), target_offset=2)) == [
        (Kind.RUNS, 8, (51, 5)),
        (Kind.RUNS, 4, (5,)),
    ]


@pytest.mark.parametrize(
    ("run", "kind"),
    [(1, Kind.RUNS), (47, Kind.RUNS), (48, Kind.GROUPS), (64, Kind.GROUPS), (65, Kind.RUNS), (97, Kind.GROUPS)],
)
def test_narrow_units_share_arithmetic_where_groups_are_three_quarters_full(run, kind):
    box = ReduceBox(0, 0, (9, run), (2 * run + 1, 1), (Slot(0, 1, (2 * run + 1, 1)),))
    (piece,) = run_pieces(reduce_nest(0, box, 2), Grain())
    assert (piece.kind, piece.width) == (kind, 2)


@pytest.mark.parametrize(("itemsize", "run"), [(1, 95), (1, 96), (2, 47), (2, 48), (4, 23), (4, 24)])
def test_narrow_units_of_copies_are_shifted_from_96_bytes_on(itemsize, run):
    (piece,) = pieces_of(itemsize, (9, run), (2 * run + 1, 1), (2 * run + 1, 1), source_offset=1)
    assert (piece.kind, piece.width) == (Kind.SHIFTED if itemsize * run >= 96 else Kind.RUNS, itemsize)


def test_transposed_boxes_are_tiles_wide_where_both_sides_are():
    assert shapes(pieces_of(4, (64, 128), (1, 64), (128, 1))) == [(Kind.WIDE_TILES, 4, (128, 64))]
    assert shapes(pieces_of(4, (63, 128), (1, 64), (128, 1))) == [(Kind.TILES, 4, (128, 63))]
    assert shapes(pieces_of(2, (63, 129), (1, 63), (129, 1))) == [(Kind.TILES, 2, (129, 63))]
    assert shapes(pieces_of(1, (30, 40), (1, 30), (40, 1), target_offset=3)) == [(Kind.TILES, 1, (40, 30))]
    # The outer loop of a target that is walked along the source's dense one, and loops around both.
    (piece,) = pieces_of(8, (3, 32, 5, 16), (5120, 1, 1024, 32), (2560, 80, 16, 1))
    assert (piece.kind, piece.width, piece.lengths) == (Kind.WIDE_TILES, 8, (16, 32, 5, 3))
    assert [operand.strides for operand in piece.operands] == [(1, 80, 16, 2560), (32, 1, 1024, 5120)]


@pytest.mark.parametrize(
    ("itemsize", "lengths", "source_strides", "target_strides"),
    [
        (16, (64, 64), (1, 64), (64, 1)),  # as wide as it gets
        (4, (64, 64, 4), (4, 256, 1), (256, 4, 1)),  # runs of 16 bytes
        (4, (64, 7), (1, 64), (7, 1)),  # too narrow for a tile
        (4, (64, 64), (2, 128), (64, 1)),  # dense nowhere
        (4, (64, 64), (0, 1), (64, 1)),  # repeated rows
    ],
)
def test_other_boxes_are_runs(itemsize, lengths, source_strides, target_strides):
    assert {piece.kind for piece in pieces_of(itemsize, lengths, source_strides, target_strides)} == {Kind.RUNS}


@pytest.mark.parametrize(
    ("itemsize", "lengths", "source_strides", "target_strides", "offset"),
    [
        (1, (2**33 + 5,), (1,), (1,), 1),  # more than 2^31 units
        (16, (2**30,), (1,), (1,), 0),  # fewer units than that, but more words
        (4, (3, 5), (2**33, 1), (5, 1), 0),  # a source that is strewn wide
        (4, (3, 5), (-(2**33), 1), (2**34, 1), 2**35),
        (2, (2**17, 2**17), (1, 2**17), (2**17, 1), 0),  # a transposition
    ],
)
def test_boxes_beyond_31_bits_are_split(itemsize, lengths, source_strides, target_strides, offset):
    pieces = pieces_of(itemsize, lengths, source_strides, target_strides, source_offset=offset)
    assert len(pieces) > 1
    num_elements = 1
    for length in lengths:
        num_elements *= length
    assert sum(piece.num_bytes for piece in pieces) == num_elements * itemsize
    for piece in pieces:
        word_units = max(piece.width // 4, 1) if piece.kind in (Kind.RUNS, Kind.GROUPS) else 1
        if piece.kind is Kind.SHIFTED:  # bytes
            word_units = piece.width
        assert piece.num_units * word_units < 2**31
        for operand in piece.operands:
            steps = zip(operand.strides, piece.lengths, strict=True)
            assert (sum(abs(stride) * (length - 1) for stride, length in steps) + 1) * word_units < 2**31


def test_split_boxes_write_every_byte_once():
    # 2^33 + 5 bytes: the ends of the pieces, sorted, follow on each other.
    pieces = pieces_of(1, (2**33 + 5,), (1,), (1,), source_offset=1)
    spans = sorted((piece.operands[0].offset, piece.num_bytes) for piece in pieces)
    position = 0
    for start, num_bytes in spans:
        assert start == position
        position += num_bytes
    assert position == 2**33 + 5
    assert all(piece.operands[1].offset == piece.operands[0].offset + 1 for piece in pieces)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_large_reductions_are_split_by_their_elements(itemsize):
    num_elements = 2**32
    box = ReduceBox(0, 0, (num_elements,), (1,), (Slot(0, 0, (1,)), Slot(0, num_elements, (1,))))
    pieces = list(run_pieces(reduce_nest(0, box, itemsize), Grain(word=itemsize)))
    assert sum(piece.num_bytes for piece in pieces) == num_elements * itemsize
    # The kernel's indices count elements.
    assert all(piece.width == 16 and piece.num_bytes // itemsize < 2**31 for piece in pieces)


def test_casts_count_elements():
    # To elements half as long: eight at a time fill 16 bytes on the narrower side.
    grain = Grain(widest=8, word=1, num_bytes=4)
    box = CastBox(0, 0, 3, 3, (5, 90), (96, 1), (128, 1))
    pieces = list(run_pieces(cast_nest(0, box), grain))
    assert shapes(pieces) == [(Kind.RUNS, 1, (5, 5)), (Kind.RUNS, 8, (10, 5)), (Kind.RUNS, 1, (5, 5))]
    assert bytes_of_pieces(pieces) == bytes_of(cast_nest(0, box))
    # One at a time moves 4 bytes at most, so that the arithmetic of long runs is shared; two move 8.
    for stride, kind, width in ((97, Kind.GROUPS, 1), (98, Kind.RUNS, 2)):
        odd = box._replace(source_offset=0, target_offset=0, lengths=(5, 64), source_strides=(stride, 1))
        assert shapes(run_pieces(cast_nest(0, odd), grain)) == [(kind, width, (64 // width, 5))]
    long = list(run_pieces(cast_nest(0, CastBox(0, 0, 0, 0, (2**32,), (1,), (1,))), grain))
    assert sum(piece.num_bytes for piece in long) == 2**32
    assert all(piece.num_bytes < 2**31 for piece in long)


def test_nothing_is_left_of_empty_boxes():
    assert pieces_of(4, (3, 0), (1, 1), (1, 1)) == []
    assert list(run_pieces(reduce_nest(0, ReduceBox(0, 0, (0,), (1,), (Slot(0, 0, (1,)),)), 4), Grain())) == []


def test_a_box_without_dims_is_one_unit():
    assert shapes(pieces_of(8, (), (), (), source_offset=1)) == [(Kind.RUNS, 8, (1,))]
