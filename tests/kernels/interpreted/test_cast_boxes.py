"""The cast kernel, interpreted, against the reference, bit for bit."""

import doctest
import itertools
import random

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.random_boxes import random_cast_boxes, random_values, values_behind
from tritondt.kernels import reference
from tritondt.kernels.boxes import CastBox
from tritondt.kernels.gpu import cast_boxes as module
from tritondt.kernels.gpu.cast_boxes import DeviceCastTable, cast_boxes
from tritondt.kernels.gpu.pieces import Kind
from tritondt.kernels.gpu.tuning import Choice

# numpy, which interprets the kernel, warns of the infinities and NaN that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

LARGE = Choice(4096, 1, 3)
CASTS = list(itertools.permutations(("float32", "float64", "bfloat16", "float16"), 2))
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x):
    """All of them: which NaN is written is defined."""
    return x.view(INTEGERS[x.element_size()])


def assert_casts_as_reference(boxes, sources, targets, choice=LARGE):
    """On equal random targets, so that an element outside the boxes shows up too."""
    expected = [target.clone() for target in targets]
    reference.cast_boxes(sources, expected, boxes)
    source, target = (str(tensors[0].dtype).removeprefix("torch.") for tensors in (sources, targets))
    table = DeviceCastTable(boxes, source, target, "cpu", choice=choice)
    table.run([source.data_ptr() for source in sources], [target.data_ptr() for target in targets])
    for target, wanted in zip(targets, expected, strict=True):
        assert_close(bits(target), bits(wanted), rtol=0, atol=0)
    return table


def cast_all(values, dtype):
    """Casts a vector of values."""
    target = random_values(len(values) + 2, dtype)
    assert_casts_as_reference([CastBox(0, 0, 0, 1, (len(values),), (1,), (1,))], [values], [target])


def test_example():
    results = doctest.testmod(module)
    assert results.attempted >= 4
    assert results.failed == 0


@pytest.mark.in_ci(12)
@pytest.mark.parametrize("seed", range(500))
def test_random_tables(seed):
    draw = random.Random(seed)
    source, target = (getattr(torch, name) for name in CASTS[seed % len(CASTS)])
    boxes, needed, filled = random_cast_boxes(draw, 1 if seed % 10 else 4)
    sources = [values_behind(num_elements, source, draw) for num_elements in needed]
    targets = [values_behind(end + 5, target, draw) for end in filled]
    assert_casts_as_reference(boxes, sources, targets)


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_wide_and_narrow_rows(source, target):
    dtypes = getattr(torch, source), getattr(torch, target)
    values, placed = random_values(700, dtypes[0]), random_values(700, dtypes[1])
    lanes = 16 // min(dtype.itemsize for dtype in dtypes)
    for strides, width in (((96, 1), lanes), ((97, 1), 1)):
        table = assert_casts_as_reference([CastBox(0, 0, 0, 0, (7, 64), strides, (96, 1))], [values], [placed])
        (piece,) = table.pieces(table.nests)
        assert piece.width == width
        is_grouped = width == 1 and max(dtype.itemsize for dtype in dtypes) <= 4
        assert piece.kind is (Kind.GROUPS if is_grouped else Kind.RUNS)


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "float64", "float16", "bfloat16"])
def test_every_half_value(source, target):
    if source == target:
        return
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(getattr(torch, source))
    cast_all(values, getattr(torch, target))


@pytest.mark.parametrize("target", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_every_kind_of_nan(source, target):
    if source == target:
        return
    integer = INTEGERS[getattr(torch, source).itemsize]
    infinity = torch.tensor(float("inf"), dtype=getattr(torch, source)).view(integer)
    payloads = torch.tensor([1 << bit for bit in range(23 if source == "float32" else 52)], dtype=integer)
    positive = torch.cat((infinity[None], infinity | payloads, torch.tensor([torch.iinfo(integer).max], dtype=integer)))
    cast_all(
        torch.cat((positive, positive | torch.iinfo(integer).min)).view(getattr(torch, source)), getattr(torch, target)
    )


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_values_around_the_middle_between_two_halves(source, target):
    dtype = getattr(torch, target)
    halves = torch.arange(2**15 - 2, dtype=torch.int32).to(torch.int16).view(dtype)
    halves = halves[halves.isfinite()].to(torch.float64)
    middles = ((halves[1:] + halves[:-1]) / 2).to(getattr(torch, source))
    above, below = (torch.nextafter(middles, torch.tensor(end, dtype=middles.dtype)) for end in (1e30, -1e30))
    cast_all(torch.cat((middles, above, below, -middles)), dtype)


def test_float64_goes_to_half_types_by_way_of_float32():
    # Just above the middle between 1 and the next bfloat16; in float32 it is the middle.
    values = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40, 1e300, 2**-150], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        cast_all(values, dtype)


def test_nothing_to_cast():
    cast_boxes([], [], [])
    target = torch.ones(3, dtype=torch.float16)
    cast_boxes([torch.zeros(3)], [target], [CastBox(0, 0, 0, 0, (3, 0), (1, 1), (1, 1))])
    assert target.tolist() == [1, 1, 1]
    table = DeviceCastTable([], "float32", "float16", "cpu")
    table.run([], [])
    assert (table.num_boxes, table.num_bytes, table.num_dims, table.num_launches) == (0, 0, 0, 0)


def test_sizes():
    table = DeviceCastTable([CastBox(0, 0, 0, 0, (3, 4), (5, 1), (4, 1))], "float32", "bfloat16", "cpu")
    assert (table.num_boxes, table.num_bytes, table.num_dims) == (1, 12 * 4, 1)


BOX = CastBox(0, 0, 0, 0, (3,), (1,), (1,))


@pytest.mark.parametrize(
    ("sources", "targets", "boxes", "sentence"),
    [
        (
            [torch.ones(3)],
            [torch.ones(3)],
            [BOX],
            r"cast from float32 to float32; allowed are two different ones of fl",
        ),
        ([torch.ones(3).int()], [torch.ones(3)], [BOX], r"cast from int32 to float32; allowed are two different ones"),
        ([torch.ones(3)], [torch.ones(2).half()], [BOX], r"box 0: elements 0 to 2 of target 0, which has 2"),
        ([torch.ones(3)], [torch.ones(3).half()], [BOX, BOX], r"boxes 0 and 1 write element 0 of target 0"),
        (
            [torch.ones(3), torch.ones(3).half()],
            [torch.ones(3).half()],
            [BOX],
            r"source 0 is torch.float32 and source 1",
        ),
        ([torch.ones(3)], [torch.ones(3).half().to("meta")], [BOX], r"source 0 lies on cpu and target 0 on meta"),
    ],
)
def test_casts_that_are_refused(sources, targets, boxes, sentence):
    with pytest.raises(ValueError, match=sentence):
        cast_boxes(sources, targets, boxes)


@pytest.mark.parametrize(
    ("sources", "targets", "sentence"),
    [
        ([66], [64], r"source 0, whose address is 66; it must be a multiple of 4 and not null"),
        ([64], [65], r"target 0, whose address is 65; it must be a multiple of 2 and not null"),
    ],
)
def test_addresses_that_are_refused(sources, targets, sentence):
    with pytest.raises(ValueError, match=sentence):
        DeviceCastTable([BOX], "float32", "bfloat16", "cpu").run(sources, targets)
