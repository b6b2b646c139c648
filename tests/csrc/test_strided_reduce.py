"""ReduceTable against the reference, bit for bit, on boxes and special values drawn at random."""

import random

import pytest
import torch
from torch.testing import assert_close

from tests.csrc.drawing import nested_strides
from tritondt import _C
from tritondt.kernels import reference
from tritondt.kernels.boxes import ReduceBox, Slot

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
REDUCTIONS = (
    [(dtype, op, 1) for dtype in FLOATS + INTEGERS for op in ("sum", "product", "max", "min")]
    + [(dtype, op, 1) for dtype in COMPLEX for op in ("sum", "product")]
    + [("bool", op, 1) for op in ("max", "min")]
    + [(dtype, "sum", divisor) for dtype in FLOATS + COMPLEX for divisor in (2, 3, 1000)]
)


def random_values(num_elements, dtype):
    """Values of every magnitude; of floats one in eight is a zero, a subnormal, an infinity or NaN."""
    if dtype == torch.bool:
        return torch.rand(num_elements) < 0.5
    if dtype.is_complex:
        parts = torch.randn(num_elements, 2, dtype=torch.empty(0, dtype=dtype).real.dtype)
        return torch.view_as_complex(parts)
    if not dtype.is_floating_point:
        integers = torch.iinfo(dtype)
        return torch.randint(integers.min, integers.max, (num_elements,), dtype=dtype)
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), limits.max, limits.tiny]
    special += [limits.smallest_normal / 2, -limits.smallest_normal / 8]
    specials = torch.tensor(special, dtype=dtype)[torch.randint(len(special), (num_elements,))]
    values = (torch.randn(num_elements) * 2.0 ** torch.randint(-8, 8, (num_elements,))).to(dtype)
    return torch.where(torch.rand(num_elements) < 0.125, specials, values)


def assert_equal_bits(actual, expected):
    """Equal as bits, so that the sign of a zero counts; every NaN counts as the same one."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = []
    for x in (actual, expected):
        parts = torch.view_as_real(x) if x.is_complex() else x
        if parts.is_floating_point():
            parts = torch.where(parts.isnan(), float("nan"), parts)
            parts = parts.view(integers[parts.element_size()])
        bits.append(parts)
    assert_close(bits[0], bits[1], rtol=0, atol=0)


def random_slot(draw, lengths, source_elements):
    """A slot of the given shape within two sources, or a contiguous one where that would not fit."""
    strides, extent = nested_strides(lengths, draw, draw.choice((0, 0, 2)))
    offset = draw.randint(0, source_elements - extent)
    if lengths and draw.random() < 0.2:
        offset += max(lengths[0] - 1, 0) * strides[0]
        strides = (-strides[0], *strides[1:])
    elif lengths and draw.random() < 0.2:
        strides = (*strides[:-1], 0)
    return Slot(draw.randrange(2), offset, strides)


def assert_reduces_as_reference(boxes, sources, target, op, divisor, num_threads):
    """Runs table and reference on equal targets, so that an element outside a box shows up too."""
    expected = target.clone()
    reference.reduce_slots(sources, [expected], boxes, op, divisor)
    table = _C.ReduceTable(boxes, op, str(target.dtype).removeprefix("torch."), divisor)
    table.run([source.data_ptr() for source in sources], [target.data_ptr()], num_threads)
    assert_equal_bits(target, expected)
    return table


def reduce_rows(rows, op, divisor, num_threads=1):
    """Reduces the rows of a contiguous 2-D tensor."""
    num_rows, length = rows.shape
    slots = tuple(Slot(0, row * length, (1,)) for row in range(num_rows))
    target = random_values(length + 2, rows.dtype)
    boxes = [ReduceBox(0, 1, (length,), (1,), slots)]
    return assert_reduces_as_reference(boxes, [rows], target, op, divisor, num_threads)


def test_example():
    buffer = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 9.0])
    target = torch.full((4,), -1.0)
    slots = (Slot(0, 0, (1,)), Slot(0, 3, (1,)))
    table = _C.ReduceTable([ReduceBox(0, 1, (3,), (1,), slots)], "sum", "float32", 2)
    table.run([buffer.data_ptr()], [target.data_ptr()], 1)
    assert target.tolist() == [-1.0, 1.5, 2.0, 6.0]


@pytest.mark.in_ci(75)
@pytest.mark.parametrize(("dtype", "op", "divisor"), REDUCTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_random_tables(dtype, op, divisor, seed):
    draw = random.Random(f"{dtype} {op} {divisor} {seed}")
    torch_dtype = getattr(torch, dtype)
    sources = [random_values(9_000, torch_dtype) for _ in range(2)]
    boxes = []
    num_elements = draw.randint(0, 3)
    for _ in range(draw.randint(0, 4)):
        lengths = tuple(draw.choice((0, 1, 2, 3, 3, 4)) for _ in range(draw.randint(0, 6)))
        strides, extent = nested_strides(lengths, draw, draw.choice((0, 0, 1)))
        slots = tuple(random_slot(draw, lengths, 9_000) for _ in range(draw.randint(1, 9)))
        boxes.append(ReduceBox(0, num_elements, lengths, strides, slots))
        num_elements += extent
    target = random_values(num_elements + 3, torch_dtype)
    assert_reduces_as_reference(boxes, sources, target, op, divisor, draw.choice((1, 3)))


@pytest.mark.parametrize(("dtype", "op", "divisor"), REDUCTIONS)
def test_rows_around_the_size_of_a_batch(dtype, op, divisor):
    torch_dtype = getattr(torch, dtype)
    batch = 4096 // torch.empty(0, dtype=torch_dtype).element_size()
    for num_slots, length in ((1, batch - 1), (2, batch), (4, batch + 1), (5, 2 * batch + 7)):
        rows = random_values(num_slots * length, torch_dtype).reshape(num_slots, length)
        reduce_rows(rows, op, divisor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8", "complex128"])
@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (65, 131), (1, 300), (300, 1), (5, 5000)])
@pytest.mark.parametrize("target_is_transposed", [False, True])
def test_planes(dtype, shape, target_is_transposed):
    num_rows, num_columns = shape
    torch_dtype = getattr(torch, dtype)
    row_major, column_major = (num_columns + 1, 1), (1, num_rows + 2)
    slots = tuple(
        Slot(0, offset, strides) for offset, strides in ((1, row_major), (0, column_major), (3, row_major), (7, (2, 0)))
    )
    source = random_values((num_rows + 2) * (num_columns + 2) + 2 * num_rows + 8, torch_dtype)
    target = random_values((num_rows + 2) * (num_columns + 2), torch_dtype)
    strides = column_major if target_is_transposed else row_major
    boxes = [ReduceBox(0, 2, shape, strides, slots)]
    assert_reduces_as_reference(boxes, [source], target, "sum", 1, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_value_comes_back(dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = values.view(getattr(torch, dtype))
    for op in ("sum", "product", "max", "min"):
        reduce_rows(values.reshape(1, -1), op, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "product"])
def test_every_half_value_is_rounded(dtype, op):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = values.view(getattr(torch, dtype))
    for _ in range(4):
        others = values[torch.randperm(len(values))]
        reduce_rows(torch.stack((values, others)), op, 1)
    # Products of neighbours of 1 lie on and beside the middle between two results.
    one = 0x3C00 if dtype == "float16" else 0x3F80
    near_one = torch.arange(one - 200, one + 200, dtype=torch.int16).view(values.dtype)
    pairs = torch.stack(torch.meshgrid(near_one, near_one, indexing="ij")).reshape(2, -1)
    reduce_rows(pairs, op, 1)


def test_float16_subnormals_are_rounded():
    smallest = 2.0**-24
    factors = torch.arange(1, 2048, dtype=torch.float32)
    scales = torch.tensor([smallest, smallest / 2, 3 * smallest / 4], dtype=torch.float32)
    rows = torch.stack((factors.repeat(3), scales.repeat_interleave(2047) * 2**10)).half()
    rows = torch.cat((rows, torch.full((1, rows.shape[1]), 2.0**-10, dtype=torch.float16)))
    reduce_rows(rows, "product", 1)


@pytest.mark.parametrize("num_slots", [1, 3, 4, 9])
@pytest.mark.parametrize("strides", [(1,), (2,)])
def test_a_target_may_be_one_of_its_slots(num_slots, strides):
    for place in {0, num_slots // 2, num_slots - 1}:
        buffer = random_values(10_000 * num_slots, torch.float32)
        expected = buffer.clone()
        slots = tuple(Slot(0, 10_000 * k, strides) for k in range(num_slots))
        boxes = [ReduceBox(0, 10_000 * place, (5_000,), strides, slots)]
        reference.reduce_slots([buffer.clone()], [expected], boxes, "sum", 1)
        pointers = [buffer.data_ptr()]
        _C.ReduceTable(boxes, "sum", "float32", 1).run(pointers, pointers, 1)
        assert_equal_bits(buffer, expected)


@pytest.mark.parametrize("num_threads", [1, 3, 64])
@pytest.mark.parametrize(
    ("dtype", "lengths", "slot_strides", "target_strides"),
    [
        ("float32", (700_001,), (1,), (1,)),
        ("bfloat16", (701, 1009), (1009, 1), (1, 701)),
        ("int8", (3, 301, 1009), (301 * 1009, 1, 301), (1, 3 * 1009, 3)),
    ],
)
def test_large_boxes_are_cut_among_threads(num_threads, dtype, lengths, slot_strides, target_strides):
    num_elements = torch.Size(lengths).numel()
    source = random_values(3 * num_elements, getattr(torch, dtype))
    target = random_values(num_elements + 2, source.dtype)
    slots = tuple(Slot(0, k * num_elements, slot_strides) for k in range(3))
    boxes = [ReduceBox(0, 1, lengths, target_strides, slots)]
    assert_reduces_as_reference(boxes, [source], target, "sum", 1, num_threads)


@pytest.mark.parametrize(("op", "expected"), [("max", [0, 1, 1, 1]), ("min", [0, 0, 0, 1])])
def test_any_byte_but_zero_is_true(op, expected):
    source = torch.tensor([0, 0, 2, 128, 0, 255, 0, 2], dtype=torch.uint8)
    target = torch.zeros(4, dtype=torch.uint8)
    slots = (Slot(0, 0, (1,)), Slot(0, 4, (1,)))
    table = _C.ReduceTable([ReduceBox(0, 0, (4,), (1,), slots)], op, "bool", 1)
    table.run([source.data_ptr()], [target.data_ptr()], 1)
    assert target.tolist() == expected


def test_sizes_and_empty_boxes():
    slots = (Slot(0, 0, (3, 1)), Slot(0, 6, (3, 1)), Slot(0, 12, (3, 1)))
    boxes = [
        ReduceBox(0, 0, (2, 3), (3, 1), slots),
        ReduceBox(9, 0, (2, 0), (1, 1), slots),
        ReduceBox(0, 6, (2, 3), (1, 2), slots),
    ]
    table = _C.ReduceTable(boxes, "sum", "float16", 1)
    assert (table.num_boxes, table.num_bytes, table.num_dims) == (2, 72, 2)
    _C.ReduceTable([], "sum", "float32", 1).run([], [], 1)


@pytest.mark.parametrize(
    ("op", "dtype", "divisor", "sentence"),
    [
        ("sum", "bool", 1, r"op 'sum' on dtype 'bool'; allowed on it are max, min"),
        ("max", "complex64", 1, r"op 'max' on dtype 'complex64'; allowed on it are sum, product"),
        ("avg", "float32", 1, r"op 'avg' on .*; allowed on it are sum, product, max, min"),
        ("su", "float32", 1, r"op 'su' on dtype 'float32'"),
        ("sum", "float8_e5m2", 1, r"dtype 'float8_e5m2' has no reductions; allowed are float32, "),
        ("sum", "int32", 2, r"divisor 2 with op 'sum' on dtype 'int32'; .* only with sum, on fl"),
        ("product", "float32", 2, r"divisor 2 with op 'product' on dtype 'float32'"),
        ("sum", "float32", 0, r"divisor 0 with op 'sum' on dtype 'float32'; .* 1 or more"),
        ("sum", "float32", -3, r"divisor -3 with op"),
    ],
)
def test_reductions_that_are_refused(op, dtype, divisor, sentence):
    with pytest.raises(ValueError, match=sentence):
        _C.ReduceTable([], op, dtype, divisor)


GOOD = ReduceBox(0, 0, (2, 3), (3, 1), (Slot(0, 0, (3, 1)), Slot(1, 0, (3, 1))))


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (GOOD._replace(slots=()), r"box 1: no slots; a box reduces 1 slot or more"),
        (GOOD._replace(slots=(Slot(0, 0, (1,)),)), r"box 1: slot has 1 strides for 2 lengths"),
        (
            GOOD._replace(slots=(GOOD.slots[0], Slot(-4, 0, (1, 1)))),
            r"box 1: slot 1 is tensor -4; positions .* are 0 or more",
        ),
        (GOOD._replace(target_strides=(0, 1)), r"box 1: target stride 0 in dim 0 of length 2"),
        (GOOD._replace(lengths=(-1, 3)), r"box 1: length -1 in dim 0"),
    ],
)
def test_boxes_that_cannot_be(box, sentence):
    with pytest.raises(ValueError, match=sentence):
        _C.ReduceTable([GOOD, box], "sum", "float32", 1)


@pytest.mark.parametrize(
    ("sources", "targets", "sentence"),
    [
        ([64], [64], r"uses source 1, but the number of pointers in source_ptrs is 1"),
        ([64, 0], [64], r"uses source 1, whose address is 0"),
        ([64, 66], [64], r"source 1, whose address is 66; it must be a multiple of 4 and not null"),
    ],
)
def test_runs_that_are_refused(sources, targets, sentence):
    with pytest.raises(ValueError, match=sentence):
        _C.ReduceTable([GOOD], "sum", "float32", 1).run(sources, targets, 1)
