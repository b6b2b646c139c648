"""The reference against arithmetic written down here, for it is what every other kernel is held to."""

import doctest
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

import tritondt.kernels.boxes
from tritondt.kernels import reference
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot

NAN = float("nan")
INFINITY = float("inf")


def assert_equal(actual, expected):
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def reduce_rows(rows, op, divisor=1):
    """Reduces the rows of a 2-D tensor, the first one first."""
    num_rows, length = rows.shape
    target = torch.zeros(length, dtype=rows.dtype)
    slots = tuple(Slot(0, row * length, (1,)) for row in range(num_rows))
    boxes = [ReduceBox(0, 0, (length,), (1,), slots)]
    reference.reduce_slots([rows.contiguous()], [target], boxes, op, divisor)
    return target


def test_examples_in_docstrings():
    results = doctest.testmod(reference)
    assert results.attempted >= 10
    assert results.failed == 0


def test_boxes_import_neither_torch_nor_triton():
    file = tritondt.kernels.boxes.__file__
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tritondt.kernels.boxes', {file!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "assert not {'torch', 'triton'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


def test_copy_writes_the_box_and_nothing_else():
    source = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    target = torch.full((5, 7), -1.0, dtype=torch.float64)
    box = CopyBox(0, 0, 5, 8, 8, (2, 2), (12, 4), (7, 1))
    reference.copy_boxes([source], [target], [box])
    expected = torch.full((5, 7), -1.0, dtype=torch.float64)
    expected[1:3, 1:3] = source[:, 1:3, 1]
    assert_equal(target, expected)


def test_copy_counts_from_the_first_element_of_a_view():
    source = torch.arange(10)
    target = torch.zeros(6, dtype=torch.int64)
    reference.copy_boxes([source[4:]], [target[2:]], [CopyBox(0, 0, 1, 0, 8, (2,), (1,), (1,))])
    assert target.tolist() == [0, 0, 5, 6, 0, 0]


def test_copy_between_dtypes_and_off_alignment_moves_bytes():
    source = torch.tensor([1.5, -2.0])
    staging = torch.zeros(11, dtype=torch.uint8)
    target = torch.zeros(2)
    reference.copy_boxes([source], [staging[3:]], [CopyBox(0, 0, 0, 0, 4, (2,), (1,), (1,))])
    reference.copy_boxes([staging[3:]], [target], [CopyBox(0, 0, 0, 0, 4, (2,), (1,), (1,))])
    assert_equal(target, source)
    assert staging[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("offset", "strides", "expected"),
    [
        (5, (-3, -1), [[5, 4, 3], [2, 1, 0]]),
        (3, (-3, 1), [[3, 4, 5], [0, 1, 2]]),
        (1, (0, 0), [[1, 1, 1], [1, 1, 1]]),
        (0, (3, 0), [[0, 0, 0], [3, 3, 3]]),
    ],
)
def test_source_strides_may_repeat_and_walk_backwards(offset, strides, expected):
    source = torch.arange(6, dtype=torch.int16)
    target = torch.zeros(2, 3, dtype=torch.int16)
    boxes = [CopyBox(0, 0, offset, 0, 2, (2, 3), strides, (3, 1))]
    reference.copy_boxes([source], [target], boxes)
    assert target.tolist() == expected


@pytest.mark.parametrize("lengths", [(0,), (3, 0), (0, 3)])
def test_an_empty_box_writes_nothing(lengths):
    strides = (1,) * len(lengths)
    source, target = torch.ones(0), torch.full((4,), -1.0)
    reference.copy_boxes([source], [target], [CopyBox(0, 0, 0, 0, 4, lengths, strides, strides)])
    slots = (Slot(0, 0, tuple(-stride for stride in strides)),)
    reference.reduce_slots([source], [target], [ReduceBox(0, 0, lengths, strides, slots)], "sum", 1)
    assert_equal(target, torch.full((4,), -1.0))


def test_a_box_without_dims_is_one_element():
    source, target = torch.tensor([7, 8, 9]), torch.zeros(2, dtype=torch.int64)
    reference.copy_boxes([source], [target], [CopyBox(0, 0, 2, 1, 8, (), (), ())])
    assert target.tolist() == [0, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_once(dtype):
    # 1 + eps/2 + eps/2: rounding after each addition would stay at 1.
    eps = torch.finfo(dtype).eps
    rows = torch.tensor([[1.0], [eps / 2], [eps / 2]], dtype=dtype)
    assert_equal(reduce_rows(rows, "sum"), torch.tensor([1 + eps], dtype=dtype))


def test_slots_are_added_in_their_order():
    rows = torch.tensor([[1e8, -1e8, 1.0], [-1e8, 1.0, -1e8], [1.0, 1e8, 1e8]])
    assert_equal(reduce_rows(rows, "sum"), torch.tensor([1.0, 0.0, 0.0]))
    assert_equal(reduce_rows(rows.flip(0), "sum"), torch.tensor([0.0, 0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [3, 7, 49])
def test_average_is_one_true_division(dtype, divisor):
    rows = torch.randn(1, 1000, dtype=dtype)
    expected = rows[0] / torch.full((1000,), divisor, dtype=dtype)
    assert_equal(reduce_rows(rows, "sum", divisor), expected)


def test_average_of_half_types_divides_before_it_rounds():
    # 65504 + 65504 is beyond float16, and so would be a sum rounded before the division.
    rows = torch.full((2, 1), 65504.0, dtype=torch.float16)
    assert_equal(reduce_rows(rows, "sum", 2), rows[0])


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins(op):
    rows = torch.tensor([[NAN, 1.0, INFINITY, NAN], [1.0, NAN, NAN, -INFINITY]])
    assert_equal(reduce_rows(rows, op), torch.full((4,), NAN))


@pytest.mark.parametrize("op", ["max", "min"])
def test_of_equal_values_the_first_is_kept(op):
    rows = torch.tensor([[-0.0, 0.0], [0.0, -0.0]]).repeat(1, 9)
    assert_equal(reduce_rows(rows, op).view(torch.int32), rows[0].view(torch.int32))


@pytest.mark.parametrize(("op", "expected"), [("max", [False, True, True, True]), ("min", [False, False, False, True])])
def test_bool(op, expected):
    rows = torch.tensor([[False, False, True, True], [False, True, False, True]])
    assert reduce_rows(rows, op).tolist() == expected


@pytest.mark.parametrize(("op", "expected"), [("sum", -56), ("product", 16)])
def test_integers_wrap(op, expected):
    rows = torch.tensor([[100], [100]], dtype=torch.int8)
    assert reduce_rows(rows, op).tolist() == [expected]


def test_complex_product_and_average():
    rows = torch.tensor([[1 + 2j], [3 - 1j]])
    assert reduce_rows(rows, "product").tolist() == [5 + 5j]
    assert reduce_rows(rows, "sum", 2).tolist() == [2 + 0.5j]


def test_parts_of_complex_numbers_are_added_by_themselves():
    rows = torch.complex(torch.tensor([[INFINITY, 1.0], [1.0, -INFINITY]]), torch.tensor([[2.0, NAN], [3.0, 4.0]]))
    total = reduce_rows(rows, "sum")
    assert_equal(total.real, torch.tensor([INFINITY, -INFINITY]))
    assert_equal(total.imag, torch.tensor([5.0, NAN]))


@pytest.mark.parametrize(
    ("dtype", "op", "divisor", "sentence"),
    [
        (torch.bool, "sum", 1, r"op 'sum' on torch.bool; allowed on it: max, min"),
        (torch.complex64, "max", 1, r"op 'max' on torch.complex64; allowed on it: sum, product"),
        (torch.float32, "avg", 1, r"op 'avg' on torch.float32; allowed on it: sum, product, max"),
        (torch.int32, "sum", 2, r"divisor 2 with op 'sum' on torch.int32; .* allowed with sum"),
        (torch.float32, "max", 2, r"divisor 2 with op 'max' on torch.float32; .* allowed with sum"),
        (torch.float32, "sum", 0, r"divisor 0; a divisor is 1 or more"),
    ],
)
def test_reductions_that_are_refused(dtype, op, divisor, sentence):
    with pytest.raises(ValueError, match=sentence):
        reduce_rows(torch.ones(2, 3, dtype=dtype), op, divisor)
