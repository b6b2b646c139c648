"""The reduction kernel, interpreted, against the reference, bit for bit."""

import doctest
import random

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.random_boxes import random_reduce_boxes, random_values, same_nan, values_behind
from tritondt.kernels import reference
from tritondt.kernels.boxes import ReduceBox, Slot
from tritondt.kernels.gpu import reduce_slots as module
from tritondt.kernels.gpu.pieces import Kind
from tritondt.kernels.gpu.reduce_slots import DeviceReduceTable, reduce_slots
from tritondt.kernels.gpu.tuning import Choice
from tritondt.kernels.reduction_dtypes import DTYPES

# numpy, which interprets the kernel, warns of the infinities and NaN that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

LARGE = Choice(4096, 1, 3)
REDUCTIONS = [
    (dtype, op, divisor)
    for dtype, found in DTYPES.items()
    for op in found.ops
    for divisor in ((1, 2, 3, 1000) if op == "sum" and found.divides else (1,))
]


def assert_reduces_as_reference(boxes, sources, targets, op, divisor, choice=LARGE):
    """On equal random values, so that an element outside the boxes shows up too."""
    expected = [target.clone() for target in targets]
    reference.reduce_slots(sources, expected, boxes, op, divisor)
    dtype = str(targets[0].dtype).removeprefix("torch.")
    table = DeviceReduceTable(boxes, op, dtype, divisor, "cpu", choice=choice)
    table.run([source.data_ptr() for source in sources], [target.data_ptr() for target in targets])
    for target, wanted in zip(targets, expected, strict=True):
        assert_close(same_nan(target), same_nan(wanted), rtol=0, atol=0)
    return table


def reduce_rows(rows, op, divisor=1):
    """Reduces the rows of a contiguous 2-D tensor."""
    num_rows, length = rows.shape
    slots = tuple(Slot(0, row * length, (1,)) for row in range(num_rows))
    target = random_values(length + 2, rows.dtype)
    assert_reduces_as_reference([ReduceBox(0, 1, (length,), (1,), slots)], [rows], [target], op, divisor)
    return target[1:-1]


def test_example():
    results = doctest.testmod(module)
    assert results.attempted >= 6
    assert results.failed == 0


@pytest.mark.in_ci(12)
@pytest.mark.parametrize("seed", range(500))
def test_random_tables(seed):
    draw = random.Random(seed)
    dtype, op, divisor = REDUCTIONS[seed % len(REDUCTIONS)]
    boxes, needed, filled = random_reduce_boxes(draw, 1 if seed % 10 else 3, 1500)
    torch_dtype = getattr(torch, dtype)
    sources = [values_behind(num_elements, torch_dtype, draw) for num_elements in needed]
    targets = [values_behind(end + 5, torch_dtype, draw) for end in filled]
    assert_reduces_as_reference(boxes, sources, targets, op, divisor)


@pytest.mark.in_ci(20)
@pytest.mark.parametrize(("dtype", "op", "divisor"), REDUCTIONS)
def test_wide_and_narrow_rows(dtype, op, divisor):
    torch_dtype = getattr(torch, dtype)
    aligned = reduce_rows(random_values(3 * 160, torch_dtype).reshape(3, 160), op, divisor)
    assert len(aligned) == 160
    # Slots that lie differently to each other are read element by element, in groups where elements are narrow.
    slots = (Slot(0, 0, (61, 1)), Slot(0, 1, (63, 1)), Slot(1, 2, (61, 1)))
    boxes = [ReduceBox(0, 1, (4, 60), (62, 1), slots)]
    sources = [random_values(300, torch_dtype) for _ in range(2)]
    target = random_values(4 * 62 + 3, torch_dtype)
    table = assert_reduces_as_reference(boxes, sources, [target], op, divisor)
    (piece,) = table.pieces(table.nests)
    assert piece.kind is (Kind.GROUPS if target.element_size() <= 4 else Kind.RUNS)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_groups_of_single_elements(dtype):
    # Rows 4 bytes apart from a multiple of 16: units of an element, groups of 64 of them.
    torch_dtype = getattr(torch, dtype)
    elements = 4 // torch_dtype.itemsize
    stride = 101 * elements
    slots = (Slot(0, elements, (stride, 1)), Slot(1, 0, (stride, 1)))
    boxes = [ReduceBox(0, 0, (3, 100 * elements), (stride, 1), slots)]
    sources = [random_values(3 * stride + 9, torch_dtype) for _ in range(2)]
    table = assert_reduces_as_reference(boxes, sources, [random_values(3 * stride + 9, torch_dtype)], "sum", 1)
    (piece,) = table.pieces(table.nests)
    assert (piece.kind, piece.width) == (Kind.GROUPS, torch_dtype.itemsize)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "product"])
def test_every_half_value_is_rounded(dtype, op):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    others = values[torch.randperm(len(values))]
    reduce_rows(torch.stack((values, others)), op)
    reduce_rows(values.reshape(1, -1), op)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 6, 9, 10])
def test_slots_are_combined_in_their_order(num_slots):
    rows = torch.tensor([1e8, 1.0, -1e8, 3.0, 1e-3, 7e7, -7e7, 0.5, 1e8, -1e8])[:num_slots]
    reduce_rows(rows.reshape(-1, 1).repeat(1, 5), "sum")


@pytest.mark.parametrize("divisor", [1, 2])
def test_halves_are_rounded_once(divisor):
    # 65504 + 65504 is beyond float16, 1 + eps / 2 rounds back to 1.
    eps = torch.finfo(torch.float16).eps
    rows = torch.tensor([[65504.0, 1.0], [65504.0, eps / 2], [0.0, eps / 2]], dtype=torch.float16)
    assert reduce_rows(rows, "sum", divisor).tolist() == [
        float("inf") if divisor == 1 else 65504.0,
        (1 + eps) / divisor,
    ]


@pytest.mark.parametrize(("op", "expected"), [("max", [0, 1, 1, 1]), ("min", [0, 0, 0, 1])])
def test_any_byte_but_zero_is_true(op, expected):
    source = torch.tensor([0, 0, 2, 128, 0, 255, 0, 2], dtype=torch.uint8)
    target = torch.zeros(4, dtype=torch.uint8)
    slots = (Slot(0, 0, (1,)), Slot(0, 4, (1,)))
    table = DeviceReduceTable([ReduceBox(0, 0, (4,), (1,), slots)], op, "bool", 1, "cpu")
    table.run([source.data_ptr()], [target.data_ptr()])
    assert target.tolist() == expected


@pytest.mark.parametrize("place", range(3))
def test_a_target_may_be_one_of_its_slots(place):
    buffer = random_values(600, torch.float32)
    expected = buffer.clone()
    boxes = [ReduceBox(0, 200 * place, (150,), (1,), tuple(Slot(0, 200 * k, (1,)) for k in range(3)))]
    reference.reduce_slots([buffer.clone()], [expected], boxes, "sum", 1)
    DeviceReduceTable(boxes, "sum", "float32", 1, "cpu").run([buffer.data_ptr()], [buffer.data_ptr()])
    assert_close(same_nan(buffer), same_nan(expected), rtol=0, atol=0)


def test_nothing_to_reduce():
    reduce_slots([], [], [], "sum", 1)
    target = torch.ones(3)
    reduce_slots([target], [target], [], "max", 1)
    reduce_slots([target], [target], [ReduceBox(0, 0, (0,), (1,), (Slot(0, 0, (1,)),))], "sum", 1)
    assert target.tolist() == [1, 1, 1]
    table = DeviceReduceTable([], "sum", "float32", 1, "cpu")
    table.run([], [])
    assert (table.num_boxes, table.num_bytes, table.num_dims) == (0, 0, 0)


def test_sizes():
    slots = (Slot(0, 0, (3, 1)), Slot(0, 6, (3, 1)), Slot(0, 12, (3, 1)))
    boxes = [
        ReduceBox(0, 0, (2, 3), (3, 1), slots),
        ReduceBox(9, 0, (2, 0), (1, 1), slots),
        ReduceBox(0, 6, (2, 3), (1, 2), slots),
    ]
    table = DeviceReduceTable(boxes, "sum", "float16", 1, "cpu")
    assert (table.num_boxes, table.num_bytes, table.num_dims) == (2, 72, 2)


ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("sources", "targets", "op", "divisor", "sentence"),
    [
        ([ONE], [torch.ones(3, device="meta")], "sum", 1, r"source 0 lies on cpu and target 0 on meta"),
        ([ONE], [ONE.half()], "sum", 1, r"source 0 is torch.float32 and target 0 is torch.float16"),
        ([ONE[:2]], [ONE], "sum", 1, r"box 0: elements 0 to 2 of source 0, which has 2"),
        ([ONE.to(torch.float8_e5m2)], [ONE.to(torch.float8_e5m2)], "sum", 1, r"dtype 'float8_e5m2' has no reductions"),
        ([ONE.bool()], [ONE.bool()], "sum", 1, r"op 'sum' on dtype 'bool'; allowed on it are max, min"),
        ([ONE.int()], [ONE.int()], "sum", 2, r"divisor 2 with op 'sum' on dtype 'int32'"),
    ],
)
def test_reductions_that_are_refused(sources, targets, op, divisor, sentence):
    with pytest.raises(ValueError, match=sentence):
        reduce_slots(sources, targets, [ReduceBox(0, 0, (3,), (1,), (Slot(0, 0, (1,)),))], op, divisor)


def test_targets_that_overlap_are_refused():
    box = ReduceBox(0, 0, (2,), (1,), (Slot(0, 0, (1,)),))
    with pytest.raises(ValueError, match=r"boxes 0 and 1 write element 1 of target 0"):
        reduce_slots([ONE], [ONE], [box, box._replace(target_offset=1)], "sum", 1)
