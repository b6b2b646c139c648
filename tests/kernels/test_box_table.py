"""Tables as numbers: what a kernel divides by, how pieces are grouped, where each begins."""

import random

import pytest

from tests.kernels.random_boxes import random_copy_boxes, random_reduce_boxes
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu.box_table import (
    EDGES,
    HEAD_CELLS,
    LOOP_CELLS,
    MAX_POINTERS,
    NUM_MODES,
    SHIFTED,
    SLOT_HEAD_CELLS,
    TABLE_CELLS,
    Pointer,
    box_table,
    by_pointers,
    division,
    mode,
    walks,
)
from tritondt.kernels.gpu.loop_nest import Operand, copy_nest, reduce_nest
from tritondt.kernels.gpu.pieces import Grain, Kind, Piece, copy_pieces, run_pieces


def copies(*boxes):
    return [piece for position, box in enumerate(boxes) for piece in copy_pieces(copy_nest(position, box))]


def run(source, target, itemsize, offset, length):
    return CopyBox(source, target, offset, offset, itemsize, (length,), (1,), (1,))


@pytest.mark.parametrize("divisor", [*range(1, 70), 2**16 - 1, 2**16, 2**16 + 1, 2**31 - 1, 2**31 - 2, 3 * 2**29 + 1])
def test_division_is_exact_below_31_bits(divisor):
    draw = random.Random(divisor)
    factor, shift = division(divisor)
    assert factor < 2**32
    values = [draw.randrange(2**31) for _ in range(300)] + [0, 1, 2**31 - 1, divisor - 1, divisor, 2 * divisor - 1]
    for value in values:
        if value < 2**31:
            high = value * factor >> 32
            assert high + value < 2**32
            assert (high + value) >> shift == value // divisor


def test_modes_differ():
    kinds = [(Kind.RUNS, (1, 2, 4, 8, 16)), (Kind.GROUPS, (1, 2, 4)), (Kind.TILES, (1, 2, 4, 8))]
    kinds += [(Kind.WIDE_TILES, (1, 2, 4, 8)), (Kind.GATHERED, (1, 2, 4)), (Kind.JOINED, (1, 2, 4))]
    modes = {mode(kind, width) for kind, widths in kinds for width in widths}
    operands = (Operand(0, 0, (1,)), Operand(0, 0, (1,)))
    shifted = [walks(Piece(Kind.SHIFTED, width, (200,), operands), 512) for width in (1, 2, 4)]
    assert [whole.mode for whole, _ in shifted] == [SHIFTED, SHIFTED, SHIFTED + 1]
    assert modes | {walk.mode for pair in shifted for walk in pair} == set(range(NUM_MODES))


def test_one_odd_shard_does_not_narrow_the_others():
    # Three aligned runs and one that starts a byte off: the widest come first, and only it is moved byte by byte.
    pieces = copies(run(0, 0, 4, 0, 400), run(0, 0, 1, 2001, 31), run(0, 0, 4, 1000, 404), run(0, 0, 2, 5000, 8))
    ((pointers, members),) = by_pointers(pieces)
    assert [(piece.width, piece.num_units) for piece in members] == [(16, 100), (16, 101), (16, 1), (1, 31)]
    table = box_table(pointers, members, 64)
    assert table.modes == 1 << mode(Kind.RUNS, 16) | 1 << mode(Kind.RUNS, 1)
    cells = HEAD_CELLS + LOOP_CELLS + SLOT_HEAD_CELLS + 1
    first_places = table.cells[TABLE_CELLS : TABLE_CELLS + 4]
    assert table.cells[:TABLE_CELLS] == (6, *division(6), *division(1))
    assert first_places == (0, 2, 4, 5)
    assert [table.cells[TABLE_CELLS + 4 + number * cells] for number in range(4)] == [2, 2, 1, 1]
    assert (table.num_walks, table.num_tiles, table.num_dims) == (4, 6, 1)


def test_a_table_holds_what_the_pieces_say():
    box = CopyBox(4, 3, 5, 6, 4, (3, 5), (7, 1), (11, 1))
    ((pointers, members),) = by_pointers(copies(run(4, 9, 16, 2, 8), box))
    assert pointers == (Pointer(True, 9), Pointer(False, 4), Pointer(True, 3))
    table = box_table(pointers, members, 512)
    assert table.cells[:7] == (2, *division(2), *division(1), 0, 1)  # places in the band, and the first of each walk
    wide, narrow = table.cells[7:27], table.cells[27:]
    assert wide == (
        *(1, 0, 32, mode(Kind.RUNS, 16), 8, 8, 1, 47),  # tiles, target, offset, mode, rows, run, slots, next slot
        *(8, *division(8), 1),
        *(1, *division(1), 0),
        *(1, 32, 1, 0),
    )
    assert narrow == (
        *(1, 2, 24, mode(Kind.RUNS, 4), 15, 5, 1, 47),
        *(5, *division(5), 1),
        *(3, *division(3), 11),
        *(1, 20, 1, 7),
    )


def test_groups_are_loops_over_64_units():
    box = ReduceBox(0, 0, (10, 120), (125, 1), (Slot(0, 1, (121, 1)),))
    ((pointers, members),) = by_pointers(run_pieces(reduce_nest(0, box, 2), Grain()))
    (piece,) = members
    assert (piece.kind, piece.lengths) == (Kind.GROUPS, (120, 10))
    table = box_table(pointers, members, 128)
    # A program takes 128 / 16 groups: 20 of them are 3 tiles.
    assert table.num_tiles == 3
    row = table.cells[TABLE_CELLS + 1 :]
    assert row[4:6] == (20, 120)
    assert row[8:12] == (2, *division(2), 64)
    assert table.cells[-2:] == (64, 121)


def test_shifted_runs_are_walked_by_blocks_and_by_places_at_their_ends():
    ((pointers, members),) = by_pointers(copies(CopyBox(0, 0, 1, 4, 2, (10, 120), (121, 1), (125, 1))))
    table = box_table(pointers, members, 128)
    cells = HEAD_CELLS + 2 * LOOP_CELLS + SLOT_HEAD_CELLS + 2
    rows = table.cells[TABLE_CELLS + 2 :]
    whole, edges = rows[:cells], rows[cells:]
    # Everything counts bytes. A run of 240 that starts 14 behind a multiple of 16 touches 16 blocks.
    assert whole[:7] == (3, 0, 8, SHIFTED, 160, 240, 1)
    assert whole[8:16] == (16, *division(16), 0, 10, *division(10), 250)
    assert whole[16:] == (1, 2, 0, 242)
    # 160 blocks, 64 to a tile; then 8 places of 2 bytes at either end.
    assert edges[:7] == (2, 0, 8, EDGES + 1, 160, 240, 1)
    assert edges[8:12] == (16, *division(16), 0)
    assert (table.num_walks, table.num_tiles) == (2, 5)


def test_later_slots_lie_behind_the_pieces():
    box = ReduceBox(0, 2, (6,), (1,), (Slot(0, 0, (1,)), Slot(0, 40, (2,)), Slot(1, 80, (-1,))))
    pieces = list(run_pieces(reduce_nest(0, box, 8), Grain()))
    ((pointers, members),) = by_pointers(pieces * 2)
    table = box_table(pointers, members, 512)
    assert table.max_slots == 3
    cells = HEAD_CELLS + LOOP_CELLS + SLOT_HEAD_CELLS + 1
    start = TABLE_CELLS + 2
    for number in range(2):
        piece = table.cells[start + number * cells : start + (number + 1) * cells]
        assert piece[6:8] == (3, start + 2 * cells + number * 6)
        assert piece[-3:] == (1, 0, 1)
        assert table.cells[piece[7] : piece[7] + 6] == (1, 320, 2, 2, 640, -1)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_of_random_tables_cover_all_units(seed):
    draw = random.Random(seed)
    boxes, _, _ = random_copy_boxes(draw, 6)
    pieces = copies(*boxes)
    if not pieces:
        return
    groups = by_pointers(pieces)
    assert sorted(id(piece) for _, members in groups for piece in members) == sorted(map(id, pieces))
    for pointers, members in groups:
        table = box_table(pointers, members, 256)
        assert table.num_tiles == sum(walk.num_tiles for piece in members for walk in walks(piece, 256))
        walk_cells = 1 + HEAD_CELLS + SLOT_HEAD_CELLS + (LOOP_CELLS + 1) * table.num_dims
        assert len(table.cells) == TABLE_CELLS + table.num_walks * walk_cells
        assert len({piece.kind in (Kind.TILES, Kind.WIDE_TILES) for piece in members}) == 1


def test_tables_of_many_tensors_take_several_launches():
    pieces = copies(*(run(number, 0, 4, 10 * number, 5) for number in range(3 * MAX_POINTERS)))
    groups = by_pointers(pieces)
    assert [len(pointers) for pointers, _ in groups] == [32, 32, 32, 4]
    assert sum(len(members) for _, members in groups) == len(pieces)
    for pointers, members in groups:
        table = box_table(pointers, members, 512)
        assert table.num_walks == len(members)


def test_one_box_of_too_many_tensors_is_refused():
    draw = random.Random(0)
    boxes, _, _ = random_reduce_boxes(draw, 1, 10)
    slots = tuple(boxes[0].slots[0]._replace(source=number) for number in range(MAX_POINTERS))
    pieces = list(run_pieces(reduce_nest(0, boxes[0]._replace(slots=slots), 4), Grain()))
    with pytest.raises(ValueError, match=r"a box touches 33 tensors; a kernel takes up to 32, the target included"):
        by_pointers(pieces)
