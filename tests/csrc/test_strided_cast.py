"""Tables of casts against the reference, bit for bit, on boxes and values drawn at random."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.csrc.drawing import bits, nested_strides, random_bits, random_floats, random_source
from tritondt import _C
from tritondt.kernels import reference
from tritondt.kernels.boxes import CastBox

FLOATS = ("float32", "float64", "bfloat16", "float16")
WIDE = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
CASTS = [("cast", *pair) for pair in itertools.permutations(FLOATS, 2)]
QUANTIZATIONS = [("quantize", *pair) for pair in itertools.product(WIDE, FP8)]
DEQUANTIZATIONS = [("dequantize", *pair) for pair in itertools.product(FP8, WIDE)]
NARROW = tuple(name for name in (*FLOATS, *FP8) if getattr(torch, name).itemsize <= 2)
TABLES: dict[str, Any] = {"cast": _C.CastTable, "quantize": _C.QuantizeTable, "dequantize": _C.DequantizeTable}


def source_values(num_elements, dtype_name):
    dtype = getattr(torch, dtype_name)
    return random_bits(num_elements, dtype) if dtype_name in FP8 else random_floats(num_elements, dtype)


def assert_as_reference(verb, sources, target, boxes, num_threads=1):
    """Runs table and reference on equal random bits, so that an element outside a box shows up too."""
    expected, actual = target.clone(), target.clone()
    scales = []
    if verb != "cast":
        powers = 2.0 ** torch.randint(-126, 120, (len(boxes),))
        scales = [powers.clone(), powers.clone()]
    getattr(reference, f"{verb}_boxes")(sources, [expected], *scales[:1], boxes)
    source_dtype, target_dtype = (str(x.dtype).removeprefix("torch.") for x in (sources[0], target))
    table = TABLES[verb](boxes, source_dtype, target_dtype)
    scale_pointers = [scales[1].data_ptr()] if scales else []
    table.run([x.data_ptr() for x in sources], [actual.data_ptr()], *scale_pointers, num_threads)
    assert_close(bits(actual), bits(expected), rtol=0, atol=0)
    if scales:
        assert_close(bits(scales[1]), bits(scales[0]), rtol=0, atol=0)
    return table


def assert_one_box(verb, source_dtype, target_dtype, lengths, source_strides, target_strides, num_threads=1):
    extents = [
        1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        for strides in (source_strides, target_strides)
    ]
    source = source_values(extents[0] + 1, source_dtype)
    target = random_bits(extents[1] + 4, getattr(torch, target_dtype))
    box = CastBox(0, 0, 1, 2, lengths, source_strides, target_strides)
    return assert_as_reference(verb, [source], target, [box], num_threads)


def check_random_table(verb, source_dtype, target_dtype, seed):
    draw = random.Random(f"{verb} {source_dtype} {target_dtype} {seed}")
    torch.manual_seed(seed)
    sources = [source_values(12_000, source_dtype) for _ in range(2)]
    boxes = []
    num_elements = draw.randint(0, 3)
    for _ in range(draw.randint(0, 4)):
        lengths = tuple(draw.choice((0, 1, 2, 3, 3, 4, 7)) for _ in range(draw.randint(0, 4)))
        offset, source_strides = random_source(lengths, draw, 12_000)
        target_strides, extent = nested_strides(lengths, draw, draw.choice((0, 0, 1)))
        boxes.append(CastBox(draw.randrange(2), 0, offset, num_elements, lengths, source_strides, target_strides))
        num_elements += extent
    target = random_bits(num_elements + 3, getattr(torch, target_dtype))
    assert_as_reference(verb, sources, target, boxes, draw.choice((1, 3)))


@pytest.mark.in_ci(60)
@pytest.mark.parametrize("seed", range(45))
@pytest.mark.parametrize(("verb", "source", "target"), CASTS)
def test_random_casts(verb, source, target, seed):
    check_random_table(verb, source, target, seed)


@pytest.mark.in_ci(60)
@pytest.mark.parametrize("seed", range(90))
@pytest.mark.parametrize(("verb", "source", "target"), QUANTIZATIONS)
def test_random_quantizations(verb, source, target, seed):
    check_random_table(verb, source, target, seed)


@pytest.mark.in_ci(45)
@pytest.mark.parametrize("seed", range(90))
@pytest.mark.parametrize(("verb", "source", "target"), DEQUANTIZATIONS)
def test_random_dequantizations(verb, source, target, seed):
    check_random_table(verb, source, target, seed)


def test_examples():
    source = torch.tensor([1.0, -3.0, 500.0, 0.3])
    codes, scales = torch.zeros(4, dtype=torch.uint8), torch.zeros(1)
    half, back = torch.zeros(4, dtype=torch.float16), torch.zeros(4)
    box = CastBox(0, 0, 0, 0, (4,), (1,), (1,))
    _C.CastTable([box], "float32", "float16").run([source.data_ptr()], [half.data_ptr()], 1)
    quantize = _C.QuantizeTable([box], "float32", "float8_e4m3fn")
    quantize.run([source.data_ptr()], [codes.data_ptr()], scales.data_ptr(), 1)
    dequantize = _C.DequantizeTable([box], "float8_e4m3fn", "float32")
    dequantize.run([codes.data_ptr()], [back.data_ptr()], scales.data_ptr(), 1)
    assert half.tolist() == [1.0, -3.0, 500.0, 0.300048828125]
    assert scales.tolist() == [2.0]
    assert back.tolist() == [1.0, -3.0, 512.0, 0.3125]


@pytest.mark.parametrize(("verb", "source", "target"), [case for case in CASTS + DEQUANTIZATIONS if case[1] in NARROW])
def test_every_narrow_value(verb, source, target):
    dtype = getattr(torch, source)
    integer = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    values = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32).to(integer).view(dtype)
    box = CastBox(0, 0, 0, 0, (len(values),), (1,), (1,))
    assert_as_reference(verb, [values], random_bits(len(values), getattr(torch, target)), [box])


@pytest.mark.parametrize(("verb", "source", "target"), [case for case in CASTS + QUANTIZATIONS if case[2] in NARROW])
def test_middles_between_two_results_and_their_neighbours(verb, source, target):
    dtype, narrow = getattr(torch, source), getattr(torch, target)
    integer = {1: torch.uint8, 2: torch.int16}[narrow.itemsize]
    top = 2 ** (8 * narrow.itemsize - 1)
    values = torch.arange(top, dtype=torch.int32).to(integer).view(narrow).double()
    values = values[values.isfinite()]
    middles = ((values[1:] + values[:-1]) / 2).to(dtype)
    x = torch.cat((middles, torch.nextafter(middles.double(), torch.tensor(0.0).double()).to(dtype)))
    x = torch.cat((x, -x, torch.nextafter(x.float(), torch.tensor(float("inf"))).to(dtype)))
    box = CastBox(0, 0, 0, 0, (len(x),), (1,), (1,))
    assert_as_reference(verb, [x], random_bits(len(x), narrow), [box])


@pytest.mark.parametrize(("verb", "source", "target"), QUANTIZATIONS)
def test_scales_of_every_power(verb, source, target):
    dtype = getattr(torch, source)
    limits = torch.finfo(dtype)
    largest = torch.finfo(getattr(torch, target)).max
    amaxes = torch.tensor(
        [largest * 2.0**power * (1 + step * limits.eps) for power in range(-160, 128) for step in (-1, 0, 1)],
        dtype=torch.float64,
    ).to(dtype)
    boxes = [CastBox(0, 0, i, i, (1,), (1,), (1,)) for i in range(len(amaxes))]
    assert_as_reference(verb, [amaxes], random_bits(len(amaxes), getattr(torch, target)), boxes)


ONE_OF_EACH = [
    ("cast", "float32", "bfloat16"),
    ("cast", "float16", "float64"),
    ("cast", "bfloat16", "float16"),
    ("quantize", "float32", "float8_e4m3fn"),
    ("dequantize", "float8_e5m2", "float16"),
]


@pytest.mark.parametrize(("verb", "source", "target"), ONE_OF_EACH)
@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (65, 131), (1, 300), (300, 1), (5, 5000)])
def test_planes(verb, source, target, shape):
    num_rows, num_columns = shape
    row_major, column_major = (num_columns + 1, 1), (1, num_rows + 2)
    for source_strides, target_strides in itertools.product((row_major, column_major), repeat=2):
        assert_one_box(verb, source, target, shape, source_strides, target_strides)
    assert_one_box(verb, source, target, shape, (2 * num_columns, 2), (3 * num_columns, 3))


@pytest.mark.in_ci(5)
@pytest.mark.parametrize(("verb", "source", "target"), ONE_OF_EACH)
@pytest.mark.parametrize("num_threads", [1, 3, 64])
def test_large_boxes_are_cut_among_threads(verb, source, target, num_threads):
    assert_one_box(verb, source, target, (1_500_001,), (1,), (1,), num_threads)
    assert_one_box(verb, source, target, (1021, 1031), (1, 1021), (1031, 1), num_threads)
    assert_one_box(verb, source, target, (2, 500_003), (500_010, 1), (500_003, 1), num_threads)


@pytest.mark.in_core(1)
@pytest.mark.in_ci(7)
@pytest.mark.parametrize(("verb", "source", "target"), ONE_OF_EACH)
@pytest.mark.parametrize("num_rows", [301, 12_007])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("is_packed", [True, False])
def test_columns_of_several_peers(verb, source, target, num_rows, num_threads, is_packed):
    """The larger size is written past the cache."""
    widths = (513, 512, 0, 1, 300, 64)
    columns = sum(widths)
    boxes, start = [], 0
    for width in widths:
        sides = [(start + 1, (columns, 1)), (num_rows * start + 1, (width, 1))]
        (source_offset, source_strides), (target_offset, target_strides) = sides if is_packed else sides[::-1]
        boxes.append(CastBox(0, 0, source_offset, target_offset, (num_rows, width), source_strides, target_strides))
        start += width
    values = source_values(num_rows * columns + 2, source)
    assert_as_reference(verb, [values], random_bits(num_rows * columns + 3, getattr(torch, target)), boxes, num_threads)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_long_runs_that_are_written_past_the_cache(num_threads):
    """Lines are written whole but at both ends of a run, which lie anywhere in theirs."""
    assert_one_box("cast", "float16", "float64", (3, 1_400_003), (1_400_004, 1), (1_400_006, 1), num_threads)


def test_sizes_and_empty_boxes():
    boxes = [
        CastBox(5, 5, 0, 0, (3, 0), (1, 1), (1, 1)),
        CastBox(0, 0, 0, 0, (3, 4), (4, 1), (4, 1)),
        CastBox(0, 0, 12, 12, (2, 2), (1, 2), (2, 1)),
    ]
    table = _C.CastTable(boxes, "float64", "float16")
    assert (table.num_boxes, table.num_bytes, table.num_dims) == (2, 128, 2)


@pytest.mark.parametrize("table", [_C.QuantizeTable, _C.DequantizeTable])
def test_scales_of_empty_boxes(table):
    dtypes = ("float32", "float8_e5m2") if table is _C.QuantizeTable else ("float8_e5m2", "float32")
    scales = torch.full((3,), -7.0)
    empty = CastBox(5, 5, 0, 0, (3, 0), (1, 1), (1, 1))
    table([empty, empty], *dtypes).run([], [], scales.data_ptr(), 1)
    assert scales.tolist() == ([1.0, 1.0, -7.0] if table is _C.QuantizeTable else [-7.0] * 3)
    table([], *dtypes).run([], [], 0, 1)


def test_no_boxes():
    _C.CastTable([], "float32", "float16").run([], [], 1)


@pytest.mark.parametrize(
    ("verb", "source", "target", "sentence"),
    [
        (
            "cast",
            "int32",
            "float32",
            "cast from int32 to float32; allowed are two different ones of float32, float64, bf",
        ),
        ("cast", "float32", "float32", "cast from float32 to float32; allowed are two different ones of"),
        ("cast", "float32", "float8_e5m2", "cast from float32 to float8_e5m2; allowed are two different"),
        (
            "quantize",
            "float64",
            "float8_e5m2",
            "quantize from float64 to .* allowed are float32, bfloat16, float16 to f",
        ),
        ("quantize", "float32", "float16", "to float16; allowed are .* to float8_e4m3fn, float8_e5m2"),
        ("dequantize", "float32", "float32", "allowed are float8_e4m3fn, float8_e5m2 to float32, bfloat16, float16"),
    ],
)
def test_dtypes_that_are_refused(verb, source, target, sentence):
    with pytest.raises(ValueError, match=sentence):
        TABLES[verb]([], source, target)


GOOD = CastBox(0, 0, 0, 0, (2, 3), (3, 1), (3, 1))


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (GOOD._replace(source=-1), r"box 1: source is tensor -1; positions .* are 0 or more"),
        (GOOD._replace(lengths=(-1, 3)), r"box 1: length -1 in dim 0; lengths are 0 or more"),
        (GOOD._replace(target_strides=(0, 1)), r"box 1: target stride 0 in dim 0 of length 2"),
        (GOOD._replace(source_strides=(1,)), r"box 1: source has 1 strides for 2 lengths"),
        (GOOD._replace(lengths=(2**62, 3)), r"box 1: .* exceeds 64 bits"),
    ],
)
def test_boxes_that_cannot_be(box, sentence):
    with pytest.raises(ValueError, match=sentence):
        _C.CastTable([GOOD, box], "float32", "float64")


@pytest.mark.parametrize(
    ("sources", "targets", "num_threads", "sentence"),
    [
        ([], [64], 1, r"uses source 0, but the number of pointers in source_ptrs is 0"),
        ([0], [64], 1, r"uses source 0, whose address is 0"),
        ([64], [66], 1, r"target 0, whose address is 66; it must be a multiple of 8 and not null"),
        ([66], [64], 1, r"source 0, whose address is 66; it must be a multiple of 4 and not null"),
        ([64], [64], 0, r"num_threads is 0; it must be 1 or more"),
    ],
)
def test_runs_that_are_refused(sources, targets, num_threads, sentence):
    with pytest.raises(ValueError, match=sentence):
        _C.CastTable([GOOD], "float32", "float64").run(sources, targets, num_threads)


@pytest.mark.parametrize("scales", [0, 6])
def test_scales_that_are_refused(scales):
    sentence = f"the address of scales is {scales}; it must be a multiple of 4 and not null"
    with pytest.raises(ValueError, match=sentence):
        _C.QuantizeTable([GOOD], "float32", "float8_e5m2").run([64], [64], scales, 1)
    with pytest.raises(ValueError, match=sentence):
        _C.DequantizeTable([GOOD], "float8_e5m2", "float32").run([64], [64], scales, 1)
