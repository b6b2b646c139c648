"""The copy kernel, interpreted, against the reference, byte for byte."""

import doctest
import mmap
import random

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.random_boxes import behind_alignment, random_bytes, random_copy_boxes
from tritondt.kernels import reference
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.gpu import copy_boxes as module
from tritondt.kernels.gpu.box_table import TABLE_CELLS, box_table, by_pointers, division, walks
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable, copy_boxes
from tritondt.kernels.gpu.loop_nest import copy_nest
from tritondt.kernels.gpu.pieces import Kind, copy_pieces
from tritondt.kernels.gpu.tuning import Choice

# An interpreted program costs the same whatever its size: large tiles, and fewer programs than tiles now and then.
LARGE = Choice(4096, 1, 3)
_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which not every Python names


def assert_copies_as_reference(boxes, sources, targets, choice=LARGE):
    """On equal random bytes, so that a byte outside the boxes shows up too."""
    expected = [target.clone() for target in targets]
    reference.copy_boxes(sources, expected, boxes)
    table = DeviceCopyTable(boxes, "cpu", choice=choice)
    table.run([source.data_ptr() for source in sources], [target.data_ptr() for target in targets])
    for target, wanted in zip(targets, expected, strict=True):
        assert_close(target, wanted, rtol=0, atol=0)


def assert_one_box(itemsize, lengths, source_strides, target_strides, *, choice=LARGE, behind=0):
    extents = [
        1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        for strides in (source_strides, target_strides)
    ]
    box = CopyBox(0, 0, 16, 16, itemsize, lengths, source_strides, target_strides)
    source = behind_alignment(random_bytes((extents[0] + 16) * itemsize), behind)
    target = behind_alignment(random_bytes((extents[1] + 40) * itemsize), behind)
    assert_copies_as_reference([box], [source], [target], choice)
    return list(copy_pieces(copy_nest(0, box)))


def test_example():
    results = doctest.testmod(module)
    assert results.attempted >= 4
    assert results.failed == 0


@pytest.mark.in_ci(12)
@pytest.mark.parametrize("seed", range(500))
def test_random_tables(seed):
    draw = random.Random(seed)
    boxes, needed, filled = random_copy_boxes(draw, 1 if seed % 10 else 4)
    behind = [draw.choice((0, 0, 0, 1, 2, 4, 8)) for _ in range(4)]
    sources = [behind_alignment(random_bytes(num_bytes), past) for num_bytes, past in zip(needed, behind, strict=False)]
    targets = [behind_alignment(random_bytes(end + 40), past) for end, past in zip(filled, behind[2:], strict=False)]
    assert_copies_as_reference(boxes, sources, targets)


@pytest.mark.in_ci(16)
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_dims", range(1, 9))
def test_every_width_and_number_of_dims(width, num_dims):
    # Gaps everywhere, so that no two loops merge, and every element is a unit.
    lengths = (3 if num_dims < 6 else 2,) * num_dims
    strides = tuple(4**dim for dim in reversed(range(num_dims)))
    (piece,) = assert_one_box(width, lengths, tuple(2 * stride for stride in strides), strides)
    assert len(piece.lengths) == num_dims
    assert (piece.kind, piece.width) == (Kind.RUNS, width)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_runs_that_lie_otherwise_in_the_target(width):
    (piece,) = assert_one_box(width, (3, 5, 121), (1300, 123, 1), (1101, 125, 1))
    assert (piece.kind, piece.width) == (Kind.SHIFTED, width)
    # Several tiles of 32 blocks and of 64 places each, by fewer programs.
    assert_one_box(width, (3, 5, 121), (1300, 123, 1), (1101, 125, 1), choice=Choice(64, 1, 2))


@pytest.mark.in_ci(8)
@pytest.mark.parametrize("to_byte", range(16))
@pytest.mark.parametrize("from_byte", range(16))
def test_runs_from_every_byte_to_every_byte(from_byte, to_byte):
    """Of every length from 96 to 127, and so from 5 to 7 whole blocks, and every number of bytes beside them."""
    source, target = random_bytes(32 * 160 + 16), random_bytes(32 * 144 + 16)
    boxes = [CopyBox(0, 0, from_byte + 160 * n, to_byte + 144 * n, 1, (96 + n,), (1,), (1,)) for n in range(32)]
    kinds = {piece.kind for box in boxes for piece in copy_pieces(copy_nest(0, box))}
    assert (Kind.SHIFTED in kinds) == ((from_byte - to_byte) % 8 != 0)
    assert_copies_as_reference(boxes, [source], [target])


def test_runs_that_lie_backwards_in_the_source():
    source, target = random_bytes(8000), random_bytes(8000)
    boxes = [CopyBox(0, 0, 6001 // width, 3, width, (7, 110), (-301, 1), (111, 1)) for width in (1, 2)]
    for box in boxes:
        (piece,) = copy_pieces(copy_nest(0, box))
        assert piece.kind is Kind.SHIFTED
        assert_copies_as_reference([box], [source], [target])


def last_tile(table, walk):
    """The table with the last blocks alone, of which the first program takes the last tile."""
    start = TABLE_CELLS + table.num_walks
    cells = (len(table.cells) - start) // table.num_walks
    first = start + (table.num_walks - 2) * cells  # behind it are the edges of its runs
    header = (walk.num_tiles, *division(walk.num_tiles), *division(1), 1 - walk.num_tiles)
    return torch.tensor([*header, *table.cells[first : first + cells]])


@pytest.mark.parametrize(
    ("itemsize", "num_bytes"),
    [(1, 2**31 - 48), (1, 2**31 - 17), (1, 2**31 - 16), (4, 2**31 - 24), (4, 2**31 - 20), (1, 2**32 - 32)],
)
def test_runs_of_nearly_31_bits_end_where_they_end(itemsize, num_bytes):
    """The last tile of one, in memory of which few pages are touched."""
    (pointers, members), *_ = by_pointers(
        copy_pieces(copy_nest(0, CopyBox(0, 0, 1, 0, itemsize, (num_bytes // itemsize,), (1,), (1,))))
    )
    table, piece = box_table(pointers, members, 1024, 4), members[-1]
    assert piece.kind is Kind.SHIFTED
    end = piece.operands[0].offset + piece.num_bytes
    source, target = (
        torch.frombuffer(mmap.mmap(-1, num_bytes + 4096, mmap.MAP_PRIVATE | _NO_RESERVE), dtype=torch.uint8)
        for _ in range(2)
    )
    source[end - 64 : end + 64] = torch.arange(1, 129)
    addresses = [(target if pointer.is_target else source).data_ptr() for pointer in pointers]
    addresses += [target.data_ptr()] * 6
    cells = last_tile(table, walks(piece, 1024)[0])
    module.copy_kernel[(1,)](
        cells, tuple(addresses), 1, 0, 1, NUM_POINTERS=8, NUM_DIMS=4, MODES=table.modes, BLOCK=1024, IS_BOUNDED=True
    )
    assert target[end - 64 : end - 16].tolist() == source[end - 64 + itemsize : end - 16 + itemsize].tolist()
    assert not target[end:].any()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "num_rows", "num_columns"), [(Kind.TILES, 41, 67), (Kind.TILES, 9, 8), (Kind.WIDE_TILES, 80, 48)]
)
def test_tiles(width, kind, num_rows, num_columns):
    pieces = assert_one_box(width, (num_rows, num_columns), (1, num_rows), (num_columns, 1))
    assert {piece.kind for piece in pieces} == {kind}
    # Loops around the tiles, walked differently on both sides.
    step = num_rows * num_columns
    assert_one_box(
        width, (2, num_rows, 3, num_columns), (step, 1, 2 * step, num_rows), (3 * step, 3 * num_columns, num_columns, 1)
    )


@pytest.mark.parametrize("max_ctas", [1, 3, 1000])
def test_programs_share_the_tiles(max_ctas):
    boxes = [
        CopyBox(0, 0, start, start, 1, (length,), (1,), (1,)) for start, length in ((3, 700), (800, 1), (810, 900))
    ]
    source, target = random_bytes(2000), random_bytes(2000)
    assert_copies_as_reference(boxes, [source], [target], Choice(64, 1, max_ctas))


def test_a_table_of_many_tensors():
    sources = [random_bytes(12) for _ in range(40)]
    target = random_bytes(40 * 12 + 5)
    boxes = [CopyBox(number, 0, 0, 3 * number, 4, (3,), (1,), (1,)) for number in range(40)]
    assert_copies_as_reference(boxes, sources, [target])
    assert DeviceCopyTable(boxes, "cpu").num_launches == 2


def test_nothing_to_copy():
    copy_boxes([], [], [])
    target = random_bytes(8)
    expected = target.clone()
    copy_boxes([torch.ones(0)], [target], [CopyBox(0, 0, 0, 0, 4, (3, 0), (1, 1), (1, 1))])
    assert_close(target, expected, rtol=0, atol=0)
    for boxes in ([], [CopyBox(5, 5, 0, 0, 2, (3, 0), (1, 1), (1, 1))]):
        table = DeviceCopyTable(boxes, "cpu")
        table.run([], [])
        assert (table.num_boxes, table.num_bytes, table.num_dims, table.num_launches) == (0, 0, 0, 0)


def test_sizes():
    boxes = [
        CopyBox(0, 0, 0, 0, 2, (3, 4), (4, 1), (4, 1)),
        CopyBox(5, 5, 0, 0, 2, (3, 0), (1, 1), (1, 1)),
        CopyBox(0, 0, 12, 12, 2, (2, 3, 4), (100, 10, 1), (12, 4, 1)),
    ]
    table = DeviceCopyTable(boxes, "cpu")
    assert (table.num_boxes, table.num_bytes, table.num_dims, table.num_launches) == (2, 72, 2, 1)


@pytest.mark.parametrize(
    ("sources", "targets", "box", "sentence"),
    [
        ([torch.ones(3)], [torch.ones(3, device="meta")], None, r"source 0 lies on cpu and target 0 on meta"),
        (
            [torch.ones(3)],
            [torch.ones(3)],
            CopyBox(0, 0, 1, 0, 4, (3,), (1,), (1,)),
            r"box 1: bytes 4 to 15 of source 0, which",
        ),
        (
            [torch.ones(3)],
            [torch.ones(3)],
            CopyBox(0, 0, 0, 0, 4, (1,), (1,), (1,)),
            r"boxes 0 and 1 write byte 0 of target 0",
        ),
        ([torch.ones(3)], [torch.ones(3)], CopyBox(0, 0, 0, 0, 5, (1,), (1,), (1,)), r"box 1: itemsize 5"),
    ],
)
def test_copies_that_are_refused(sources, targets, box, sentence):
    boxes = [CopyBox(0, 0, 0, 0, 4, (2,), (1,), (1,)), *([box] if box else [])]
    before = targets[0].clone()
    with pytest.raises(ValueError, match=sentence):
        copy_boxes(sources, targets, boxes)
    if not targets[0].is_meta:
        assert_close(targets[0], before, rtol=0, atol=0)
