"""CopyTable against the reference, byte for byte, on boxes drawn at random."""

import random
import threading

import pytest
import torch
from torch.testing import assert_close

from tests.csrc.drawing import nested_strides, repeated_or_backwards
from tritondt import _C
from tritondt.kernels import reference
from tritondt.kernels.boxes import CopyBox

ITEMSIZES = (1, 2, 4, 8, 16)


def random_box(draw, itemsize, source_elements, target_start):
    """A box whose target lies behind `target_start`, and the first element behind that target."""
    lengths = tuple(draw.choice((0, 1, 2, 3, 3, 5, 8)) for _ in range(draw.randint(0, 6)))
    target_strides, target_extent = nested_strides(lengths, draw, draw.choice((0, 0, 2)))
    strides, source_extent = nested_strides(lengths, draw, draw.choice((0, 0, 2)))
    if draw.random() < 0.3:
        strides, source_extent = target_strides, target_extent
    offset = draw.randint(0, 9)
    shift, source_strides = repeated_or_backwards(lengths, strides, draw)
    box = CopyBox(
        source=draw.randrange(2),
        target=0,
        source_offset=offset + shift,
        target_offset=target_start,
        itemsize=itemsize,
        lengths=lengths,
        source_strides=source_strides,
        target_strides=target_strides,
    )
    fits = 10 + source_extent <= source_elements
    return (box, target_start + target_extent) if fits else (None, target_start)


def random_bytes(num_bytes):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


def assert_copies_as_reference(boxes, sources, target_bytes, num_threads):
    """Runs tables and reference on equal random bytes, so that a byte outside a box shows up too."""
    before = random_bytes(target_bytes)
    expected = before.clone()
    reference.copy_boxes(sources, [expected], boxes)
    for table in (_C.CopyTable(boxes, is_past_cache=True), _C.CopyTable(boxes)):
        actual = before.clone()
        table.run([source.data_ptr() for source in sources], [actual.data_ptr()], num_threads)
        assert_close(actual, expected, rtol=0, atol=0)
    return table


def assert_one_box(itemsize, lengths, source_strides, target_strides, num_threads=1):
    extents = [
        1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        for strides in (source_strides, target_strides)
    ]
    source = random_bytes((extents[0] + 1) * itemsize)
    box = CopyBox(0, 0, 1, 2, itemsize, lengths, source_strides, target_strides)
    return assert_copies_as_reference([box], [source], (extents[1] + 4) * itemsize, num_threads)


def test_example():
    source = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    target = torch.full((5,), -1, dtype=torch.int32)
    table = _C.CopyTable([CopyBox(0, 0, 1, 1, 4, (2, 2), (3, 1), (2, 1))])
    table.run([source.data_ptr()], [target.data_ptr()], 1)
    assert target.tolist() == [-1, 1, 2, 4, 5]


@pytest.mark.in_ci(50)
@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("seed", range(40))
def test_random_tables(itemsize, seed):
    draw = random.Random(seed)
    sources = [random_bytes(40_000 * itemsize) for _ in range(2)]
    boxes = []
    num_elements = draw.randint(0, 3)
    for _ in range(draw.randint(0, 5)):
        box, num_elements = random_box(draw, itemsize, 40_000, num_elements)
        boxes += [box] if box else []
    assert_copies_as_reference(boxes, sources, (num_elements + 3) * itemsize, draw.choice((1, 3)))


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("num_dims", range(1, 9))
def test_dims_nested_in_any_order(num_dims, itemsize):
    draw = random.Random(num_dims)
    for gap in (0, 0, 1, 2):
        lengths = tuple(draw.choice((2, 3)) for _ in range(num_dims))
        before, after = (nested_strides(lengths, draw, gap)[0] for _ in range(2))
        assert_one_box(itemsize, lengths, before, after, num_threads=draw.choice((1, 3)))


@pytest.mark.parametrize("run", [1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize("itemsize", [1, 4])
def test_runs_of_every_length(run, itemsize):
    assert_one_box(itemsize, (3, 7, run), (9 * run, run + 2, 1), (7 * run, run, 1))
    # Runs of a transposed plane.
    assert_one_box(itemsize, (20, 70, run), (run, 20 * run, 1), (70 * run, run, 1))


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 65), (64, 64), (65, 64), (64, 65), (127, 191), (130, 3)])
def test_transpose(itemsize, num_rows, num_columns):
    assert_one_box(itemsize, (num_rows, num_columns), (1, num_rows), (num_columns, 1))
    assert_one_box(itemsize, (num_rows, num_columns), (1, num_rows + 3), (num_columns + 5, 1))
    assert_one_box(
        itemsize,
        (2, num_rows, 3, num_columns),
        (1, 2, 6 * num_rows, 6 * num_rows * 3),
        (3 * num_rows * num_columns, num_columns, num_rows * num_columns, 1),
    )


@pytest.mark.parametrize("num_threads", [1, 3, 64])
@pytest.mark.parametrize(
    ("itemsize", "lengths", "source_strides", "target_strides"),
    [
        (1, (3_500_001,), (1,), (1,)),
        (4, (2, 500_003), (500_010, 1), (500_003, 1)),
        (4, (1021, 1031), (1, 1021), (1031, 1)),
        (2, (7, 300_001), (1, 7), (300_001, 1)),
        (8, (401, 2, 601), (1202, 601, 1), (601, 401 * 601, 1)),
    ],
)
def test_large_boxes_are_cut_among_threads(num_threads, itemsize, lengths, source_strides, target_strides):
    assert_one_box(itemsize, lengths, source_strides, target_strides, num_threads)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_boxes_are_shared_among_threads(num_threads):
    draw = random.Random(7)
    lengths = [draw.choice((0, 1, 100_003, 700_001)) for _ in range(30)]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    boxes = [
        CopyBox(0, 0, starts[-1] - starts[i + 1], starts[i], 1, (length,), (1,), (1,))
        for i, length in enumerate(lengths)
    ]
    source = random_bytes(starts[-1])
    assert_copies_as_reference(boxes, [source], starts[-1] + 5, num_threads)


@pytest.mark.in_ci(8)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 16])
@pytest.mark.parametrize("widths", [(513, 512, 0, 1, 300, 64), (16, 15, 17), (700, 700)])
@pytest.mark.parametrize("num_bytes", [1 << 20, 34 << 20])
def test_columns_of_several_peers(num_bytes, widths, itemsize, num_threads):
    """Packed and unpacked; the larger size is written past the cache."""
    columns = sum(widths)
    num_rows = num_bytes // (columns * itemsize)
    packs: list[CopyBox] = []
    unpacks: list[CopyBox] = []
    start = 0
    for width in widths:
        matrix, buffer = (start + 1, (columns + 1, 1)), (num_rows * start + 3, (width, 1))
        for boxes, ((source_offset, source_strides), (target_offset, target_strides)) in (
            (packs, (matrix, buffer)),
            (unpacks, (buffer, matrix)),
        ):
            lengths = (num_rows, width)
            boxes.append(CopyBox(0, 0, source_offset, target_offset, itemsize, lengths, source_strides, target_strides))
        start += width
    size = (num_rows * (columns + 1) + 4) * itemsize
    for boxes in (packs, unpacks):
        table = assert_copies_as_reference(boxes, [random_bytes(size)], size, num_threads)
        assert table.num_boxes == len(widths) - widths.count(0)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("lengths", "source_strides", "target_strides"),
    [
        ((35_000_001,), (1,), (1,)),
        ((3, 1200, 10_001), (12_005_000, 10_002, 1), (12_003_600, 10_003, 1)),
        ((50_000, 7, 101), (707, 101, 1), (707, 1, 7)),
        ((7, 50_000, 101), (101, 707, 1), (50_000 * 101, 101, 1)),
        ((5_001, 7_001), (1, 5_001), (7_001, 1)),
    ],
)
def test_large_boxes_are_written_past_the_cache(lengths, source_strides, target_strides):
    for num_threads in (1, 3):
        assert_one_box(1, lengths, source_strides, target_strides, num_threads)


@pytest.mark.parametrize(
    ("lengths", "source_strides", "target_strides", "num_dims"),
    [
        ((), (), (), 0),
        ((6,), (1,), (1,), 0),
        ((2, 3, 4), (12, 4, 1), (12, 4, 1), 0),
        ((1, 5, 1), (99, 1, 7), (3, 1, 98), 0),
        ((4, 3), (1, 4), (1, 4), 0),
        ((2, 3, 4), (24, 8, 1), (12, 4, 1), 1),
        ((2, 3, 4), (24, 8, 2), (12, 4, 1), 1),
        ((3, 4), (1, 3), (4, 1), 2),
        ((2, 3, 4), (100, 10, 1), (12, 4, 1), 2),
    ],
)
def test_dims_are_coalesced(lengths, source_strides, target_strides, num_dims):
    table = assert_one_box(4, lengths, source_strides, target_strides)
    assert table.num_dims == num_dims
    assert table.num_boxes == 1


def test_sizes_and_empty_boxes():
    boxes = [
        CopyBox(5, 5, 0, 0, 2, (3, 0), (1, 1), (0, 1)),
        CopyBox(0, 0, 0, 0, 2, (3, 4), (4, 1), (4, 1)),
        CopyBox(0, 0, 12, 12, 2, (), (), ()),
    ]
    table = _C.CopyTable(boxes)
    assert (table.num_boxes, table.num_bytes, table.num_dims) == (2, 26, 0)
    empty = _C.CopyTable([])
    assert (empty.num_boxes, empty.num_bytes, empty.num_dims) == (0, 0, 0)
    empty.run([], [], 1)


def test_one_table_serves_threads_of_python_at_once():
    table = _C.CopyTable([CopyBox(0, 0, 0, 0, 4, (500, 300), (1, 500), (300, 1))])
    sources = [torch.randn(300, 500) for _ in range(4)]
    targets = [torch.zeros(500, 300) for _ in range(4)]

    def run(rank):
        for _ in range(20):
            table.run([sources[rank].data_ptr()], [targets[rank].data_ptr()], 2)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for source, target in zip(sources, targets, strict=True):
        assert_close(target, source.t().contiguous(), rtol=0, atol=0)


GOOD = CopyBox(0, 0, 0, 0, 4, (2, 3), (3, 1), (3, 1))


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (GOOD._replace(itemsize=3), r"box 1: itemsize 3; allowed are 1, 2, 4, 8 and 16"),
        (GOOD._replace(lengths=(2, -3)), r"box 1: length -3 in dim 1; lengths are 0 or more"),
        (GOOD._replace(source_strides=(1,)), r"box 1: source has 1 strides for 2 lengths"),
        (GOOD._replace(target_strides=(3, 1, 1)), r"box 1: target has 3 strides for 2 lengths"),
        (GOOD._replace(source=-1), r"box 1: source is tensor -1; positions .* are 0 or more"),
        (GOOD._replace(target=-2), r"box 1: target is tensor -2"),
        (GOOD._replace(target_strides=(3, 0)), r"target stride 0 in dim 1 of length 3; .* positive"),
        (GOOD._replace(target_strides=(-3, 1)), r"target stride -3 in dim 0 of length 2"),
        (GOOD._replace(lengths=(2**62, 2)), r"exceeds 64 bits"),
        (GOOD._replace(source_offset=2**62), r"4611686018427387904 \* 4 exceeds 64 bits"),
        (GOOD._replace(source_strides=(2**60, 1)), r"exceeds 64 bits"),
        (
            CopyBox(0, 0, 0, 0, 4, (1,) * 17, (1,) * 17, (1,) * 17),
            r"box 1: 17 dims; at most 16 are allowed",
        ),
    ],
)
def test_boxes_that_cannot_be(box, sentence):
    with pytest.raises(ValueError, match=sentence):
        _C.CopyTable([GOOD, box])


def test_sixteen_dims():
    lengths = (2,) * 16
    strides = tuple(2**dim for dim in range(16))
    assert_one_box(1, lengths, strides, strides[::-1])


def test_what_is_no_box_is_a_type_error():
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _C.CopyTable([(0, 0, 0)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("sources", "targets", "num_threads", "sentence"),
    [
        ([], [64], 1, r"uses source 0, but the number of pointers in source_ptrs is 0"),
        ([64], [], 1, r"uses target 0, but the number of pointers in target_ptrs is 0"),
        ([0], [64], 1, r"uses source 0, whose address is 0; .* not null"),
        ([64], [0], 1, r"uses target 0, whose address is 0; .* not null"),
        ([64], [64], 0, r"num_threads is 0; it must be 1 or more"),
    ],
)
def test_runs_that_are_refused(sources, targets, num_threads, sentence):
    with pytest.raises(ValueError, match=sentence):
        _C.CopyTable([GOOD]).run(sources, targets, num_threads)


@pytest.mark.parametrize(("pointer", "error"), [("x", TypeError), (-1, OverflowError)])
def test_pointers_are_integers(pointer, error):
    with pytest.raises(error):
        _C.CopyTable([GOOD]).run([pointer], [64], 1)
