"""Rows that fill their target, interpreted, against the reference: of every unit, length and place, in bands."""

import random
from dataclasses import dataclass

import pytest
from torch.testing import assert_close

from tests.kernels.random_boxes import behind_alignment, random_bytes
from tritondt.kernels import reference
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.gpu import box_table
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable
from tritondt.kernels.gpu.pieces import Kind
from tritondt.kernels.gpu.tuning import Choice

LARGE = Choice(1024, 1, 1 << 24)


@dataclass
class Columns:
    """Columns of a matrix beside each other, and one message for each, behind each other."""

    rows: int
    sizes: tuple[int, ...]
    itemsize: int

    def boxes(self, *, packs, sources=1):
        found, start, columns = [], 0, sum(self.sizes)
        for number, size in enumerate(self.sizes):
            matrix, message = (start, (columns, 1)), (start * self.rows, (size, 1))
            source, target = (matrix, message) if packs else (message, matrix)
            lengths = (self.rows, size)
            found.append(
                CopyBox(number % sources, 0, source[0], target[0], self.itemsize, lengths, source[1], target[1])
            )
            start += size
        return found

    @property
    def num_bytes(self):
        return self.rows * sum(self.sizes) * self.itemsize


def assert_copies_as_reference(boxes, num_bytes, kind, *, past=(0, 0), choice=LARGE, sources=1):
    """On equal random bytes, so that a byte outside the boxes shows up too."""
    given = [behind_alignment(random_bytes(num_bytes), past[0]) for _ in range(sources)]
    target = behind_alignment(random_bytes(num_bytes + 40), past[1])
    expected = target.clone()
    reference.copy_boxes(given, [expected], boxes)
    table = DeviceCopyTable(boxes, "cpu", choice=choice)
    assert kind is None or kind in {piece.kind for piece in table.all_pieces(table.nests)}
    table.run([source.data_ptr() for source in given], [target.data_ptr()])
    assert_close(target, expected, rtol=0, atol=0)
    return table


@pytest.mark.in_ci(14)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("packs", "kind"), [(True, Kind.GATHERED), (False, Kind.JOINED)])
@pytest.mark.parametrize("shortest", [16, 17, 21, 31, 33, 47, 130])
def test_rows_of_every_length_from_and_to_every_place(shortest, packs, kind, itemsize):
    sizes = tuple(-(-(shortest + more) // itemsize) for more in (0, 3, 1, 8))
    columns = Columns(70, sizes, itemsize)
    for past in ((0, 0), (itemsize, 3 * itemsize), (7 * itemsize % 16, 2 * itemsize)):
        assert_copies_as_reference(columns.boxes(packs=packs), columns.num_bytes, kind, past=past)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_rows_that_come_from_two_tensors(itemsize):
    columns = Columns(50, (20, 31, 17, 40), itemsize)
    boxes = columns.boxes(packs=False, sources=2)
    assert_copies_as_reference(boxes, columns.num_bytes, Kind.JOINED, past=(itemsize, itemsize), sources=2)
    # A thread chooses among two: rows of more tensors are moved box by box.
    three = DeviceCopyTable(columns.boxes(packs=False, sources=3), "cpu", choice=LARGE)
    assert Kind.JOINED not in {piece.kind for piece in three.all_pieces(three.nests)}


def test_rows_of_three_dims_backwards_and_repeated():
    boxes = [CopyBox(0, 0, 20_000, 0, 2, (3, 40, 21), (-4000, 90, 1), (840, 21, 1))]
    assert_copies_as_reference(boxes, 60_000, Kind.GATHERED)
    boxes = [
        CopyBox(0, 0, 6000, 3, 2, (60, 21), (-97, 1), (21, 1)),
        CopyBox(0, 0, 11, 1263, 1, (70, 29), (0, 1), (29, 1)),
    ]
    boxes[1] = boxes[1]._replace(target_offset=2526)
    assert_copies_as_reference(boxes, 13_000, Kind.GATHERED)


def test_a_row_that_leaves_a_gap_is_moved_box_by_box():
    whole = Columns(60, (18, 20, 22), 4).boxes(packs=False)
    table = DeviceCopyTable([whole[0], whole[2]], "cpu", choice=LARGE)
    assert not {Kind.GATHERED, Kind.JOINED} & {piece.kind for piece in table.all_pieces(table.nests)}


def test_a_row_of_one_short_part_among_long_ones_takes_no_large_table():
    boxes = Columns(3, (16, 200_000), 1).boxes(packs=False)
    table = DeviceCopyTable(boxes, "cpu", choice=LARGE)
    assert Kind.JOINED not in {piece.kind for piece in table.all_pieces(table.nests)}


@pytest.mark.parametrize("choice", [Choice(64, 1, 1 << 24), Choice(64, 1, 3)])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_bands_of_all_walks(itemsize, choice, monkeypatch):
    monkeypatch.setattr(box_table, "_BAND_BYTES", 8000)
    columns = Columns(150, (19, 20, 22, 18, 44), itemsize)
    for packs, kind in ((True, Kind.GATHERED), (False, Kind.JOINED)):
        assert_copies_as_reference(columns.boxes(packs=packs), columns.num_bytes, kind, choice=choice)


def test_bands_of_more_walks_than_are_looked_at_together(monkeypatch):
    monkeypatch.setattr(box_table, "_BAND_BYTES", 8000)
    columns = Columns(150, tuple(random.Random(3).choices(range(17, 24), k=35)), 1)
    assert_copies_as_reference(columns.boxes(packs=True), columns.num_bytes, Kind.GATHERED, choice=Choice(64, 1, 100))


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("seed", range(60))
def test_random_columns(seed, monkeypatch):
    monkeypatch.setattr(box_table, "_BAND_BYTES", 4000)
    draw = random.Random(seed)
    itemsize, packs = draw.choice((1, 2, 4)), draw.random() < 0.5
    sizes = tuple(draw.randint(-(-16 // itemsize), draw.choice((20, 40, 70))) for _ in range(draw.choice((2, 3, 5))))
    columns = Columns(draw.randint(40, 90), sizes, itemsize)
    past = tuple(draw.choice((0, 0, 1, 2, 4, 8, itemsize)) for _ in range(2))
    choice = Choice(draw.choice((64, 256)), 1, draw.choice((3, 1 << 24)))
    sources = draw.choice((1, 2))
    boxes = columns.boxes(packs=packs, sources=sources)
    assert_copies_as_reference(boxes, columns.num_bytes, None, past=past, choice=choice, sources=sources)
