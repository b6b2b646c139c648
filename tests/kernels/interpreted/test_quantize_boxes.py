"""Casts to and from fp8 with a scale per box, interpreted, against the reference, bit for bit."""

import doctest
import random

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.random_boxes import behind_alignment, random_bytes, random_cast_boxes, values_behind
from tritondt.kernels import reference
from tritondt.kernels.boxes import CastBox
from tritondt.kernels.gpu import quantize_boxes as module
from tritondt.kernels.gpu.fp8_tables import DeviceDequantizeTable, DeviceQuantizeTable
from tritondt.kernels.gpu.quantize_boxes import dequantize_boxes, quantize_boxes
from tritondt.kernels.gpu.tuning import Choice

# numpy, which interprets the kernel, warns of the infinities and NaN that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

LARGE = Choice(4096, 1, 3)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(wide, fp8) for wide in WIDE for fp8 in FP8]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(x):
    return x.view(INTEGERS[x.element_size()])


def name(dtype):
    return str(dtype).removeprefix("torch.")


def pointers(tensors):
    return [x.data_ptr() for x in tensors]


def assert_as_reference(kind, boxes, sources, targets, scales, choice=LARGE):
    """On equal random targets, so that an element outside the boxes shows up too."""
    expected, expected_scales = [target.clone() for target in targets], scales.clone()
    refer = reference.quantize_boxes if kind == "quantize" else reference.dequantize_boxes
    refer(sources, expected, expected_scales, boxes)
    make = DeviceQuantizeTable if kind == "quantize" else DeviceDequantizeTable
    table = make(boxes, name(sources[0].dtype), name(targets[0].dtype), "cpu", choice=choice)
    table.run(pointers(sources), pointers(targets), scales.data_ptr())
    for target, wanted in zip(targets, expected, strict=True):
        assert_close(bits(target), bits(wanted), rtol=0, atol=0)
    assert_close(bits(scales), bits(expected_scales), rtol=0, atol=0)
    return table


def codes_behind(num_elements, dtype, draw):
    return behind_alignment(random_bytes(num_elements), draw.choice((0, 0, 1, 5))).view(dtype)


def test_examples():
    results = doctest.testmod(module)
    assert results.attempted >= 9
    assert results.failed == 0


@pytest.mark.in_ci(5)
@pytest.mark.parametrize("seed", range(150))
def test_random_tables_there(seed):
    draw = random.Random(seed)
    wide, fp8 = PAIRS[seed % len(PAIRS)]
    boxes, needed, filled = random_cast_boxes(draw, 1 if seed % 5 else 4)
    sources = [values_behind(n, wide, draw) * 2.0 ** draw.randint(-60, 60) for n in needed]
    targets = [codes_behind(end + 5, fp8, draw) for end in filled]
    assert_as_reference("quantize", boxes, sources, targets, torch.full((len(boxes),), float("nan")))


@pytest.mark.in_ci(5)
@pytest.mark.parametrize("seed", range(150))
def test_random_tables_back(seed):
    draw = random.Random(seed)
    wide, fp8 = PAIRS[seed % len(PAIRS)]
    boxes, needed, filled = random_cast_boxes(draw, 1 if seed % 5 else 4)
    sources = [codes_behind(n, fp8, draw) for n in needed]
    targets = [values_behind(end + 5, wide, draw) for end in filled]
    assert_as_reference("dequantize", boxes, sources, targets, torch.randn(len(boxes)).exp2())


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("wide", WIDE)
def test_every_code_comes_back(fp8, wide):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8)
    box = CastBox(0, 0, 0, 1, (256,), (1,), (1,))
    for scale in (1.0, 2.0**-126, 2.0**100, 0.1):
        assert_as_reference("dequantize", [box], [codes], [torch.zeros(258, dtype=wide)], torch.tensor([scale]))


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("wide", WIDE)
def test_elements_around_every_middle_and_every_scale(fp8, wide):
    values = torch.arange(127, dtype=torch.uint8).view(fp8).double()
    values = values[values.isfinite()]
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat((values, middles, middles * (1 + 2**-7), middles * (1 - 2**-7)))
    near = near[near <= torch.finfo(fp8).max]
    x = torch.cat((near, -near)).to(wide)
    box = CastBox(0, 0, 0, 0, (len(x),), (1,), (1,))
    for power in (0, -20, 13, -126 if wide == torch.float32 else -3):
        shifted = (x.double() * 2.0**power).to(wide)
        assert_as_reference("quantize", [box], [shifted], [torch.zeros(len(x)).to(fp8)], torch.zeros(1))


@pytest.mark.in_ci(9)
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [float("inf"), -float("inf"), float("nan"), 1024.0],
        [float("inf"), float("nan")],
        [2.0**-149, -(2.0**-140)],
        [3.4028234663852886e38, 1.0],
        [448.0, 1.0],
        [448.00003, 1.0],
        [57344.0, 1.0],
        [57344.004, 1.0],
    ],
)
def test_scales_at_their_edges(fp8, values):
    x = torch.tensor(values)
    boxes = [
        CastBox(0, 0, 0, 0, (len(x),), (1,), (1,)),
        CastBox(0, 0, 0, 0, (0, 3), (1, 1), (1, 1)),  # its scale is 1
        CastBox(0, 0, 0, len(x), (1,), (1,), (1,)),
    ]
    assert_as_reference("quantize", boxes, [x], [torch.zeros(len(x) + 2).to(fp8)], torch.full((3,), float("nan")))


def test_programs_agree_on_the_scale():
    x = torch.randn(5000)
    x[4990] = 1e6
    box = CastBox(0, 0, 0, 3, (50, 99), (100, 1), (99, 1))
    for choice in (Choice(64, 1, 7), Choice(16, 1, 1000)):
        assert_as_reference("quantize", [box], [x], [torch.zeros(4960).to(FP8[0])], torch.zeros(1), choice)


def test_nothing_to_cast():
    quantize_boxes([], [], torch.empty(0), [])
    dequantize_boxes([], [], torch.empty(0), [])
    empty = [CastBox(0, 0, 0, 0, (3, 0), (1, 1), (1, 1))] * 2
    scales, target = torch.full((2,), -7.0), torch.ones(3).to(FP8[0])
    quantize_boxes([torch.ones(3)], [target], scales, empty)
    assert (scales.tolist(), target.float().tolist()) == ([1, 1], [1, 1, 1])
    table = DeviceQuantizeTable(empty, "float32", "float8_e5m2", "cpu")
    assert (table.num_boxes, table.num_bytes, table.num_dims) == (0, 0, 0)
    DeviceQuantizeTable([], "float32", "float8_e5m2", "cpu").run([], [], 0)
    DeviceDequantizeTable([], "float8_e5m2", "float32", "cpu").run([], [], 0)


def test_sizes():
    boxes = [CastBox(0, 0, 0, 0, (3, 4), (5, 1), (4, 1)), CastBox(0, 0, 0, 12, (2, 0), (5, 1), (4, 1))]
    there = DeviceQuantizeTable(boxes, "bfloat16", "float8_e5m2", "cpu")
    back = DeviceDequantizeTable(boxes, "float8_e5m2", "bfloat16", "cpu")
    for table in (there, back):
        assert (table.num_boxes, table.num_bytes, table.num_dims) == (1, 24, 1)


BOX = CastBox(0, 0, 0, 0, (3,), (1,), (1,))
FP8_ZEROS = torch.zeros(3).to(FP8[0])


@pytest.mark.parametrize(
    ("sources", "targets", "scales", "boxes", "sentence"),
    [
        (
            [torch.ones(3)],
            [torch.ones(3)],
            1,
            [BOX],
            r"quantize from float32 to float32; allowed are float32, bfloat16, ",
        ),
        ([torch.ones(3).double()], [FP8_ZEROS], 1, [BOX], r"quantize from float64 to float8_e4m3fn; allowed are fl"),
        ([torch.ones(3)], [FP8_ZEROS], 2, [BOX], r"scales are torch.float32 of shape \(2,\) for 1 boxes; they are"),
        ([torch.ones(2)], [FP8_ZEROS], 1, [BOX], r"box 0: elements 0 to 2 of source 0, which has 2"),
        ([torch.ones(3)], [FP8_ZEROS], 2, [BOX, BOX], r"boxes 0 and 1 write element 0 of target 0"),
        ([torch.ones(3)], [FP8_ZEROS.to("meta")], 1, [BOX], r"source 0 lies on cpu and target 0 on meta"),
        ([torch.ones(3)], [FP8_ZEROS, torch.ones(3).to(FP8[1])], 1, [BOX], r"target 0 is torch.float8_e4m3fn and"),
    ],
)
def test_casts_that_are_refused(sources, targets, scales, boxes, sentence):
    given = torch.full((scales,), -7.0)
    with pytest.raises(ValueError, match=sentence):
        quantize_boxes(sources, targets, given, boxes)
    assert given.tolist() == [-7.0] * scales


def test_scales_elsewhere_are_refused():
    scales = torch.ones(1, device="meta")
    with pytest.raises(ValueError, match=r"scales lie on meta and the tensors on cpu; all must lie on one device"):
        dequantize_boxes([FP8_ZEROS], [torch.ones(3)], scales, [BOX])
    with pytest.raises(ValueError, match=r"dequantize from float32 to float8_e4m3fn; allowed are float8_e4m3fn, "):
        dequantize_boxes([torch.ones(3)], [FP8_ZEROS], torch.ones(1), [BOX])


@pytest.mark.parametrize(
    ("sources", "targets", "scales", "sentence"),
    [
        ([66], [64], 64, r"source 0, whose address is 66; it must be a multiple of 4 and not null"),
        ([64], [64], 66, r"a box uses scales, whose address is 66; it must be a multiple of 4 and not null"),
        ([64], [64], 0, r"a box uses scales, whose address is 0; it must be a multiple of 4 and not null"),
        ([], [64], 64, r"a box uses source 0, but the number of pointers in source_ptrs is 0"),
        ([64], [], 64, r"a box uses target 0, but the number of pointers in target_ptrs is 0"),
    ],
)
def test_addresses_that_are_refused(sources, targets, scales, sentence):
    with pytest.raises(ValueError, match=sentence):
        DeviceQuantizeTable([BOX], "float32", "float8_e5m2", "cpu").run(sources, targets, scales)
    swapped = sentence.replace("source", "other").replace("target", "source").replace("other", "target")
    if "66" not in sentence.split("scales")[0]:
        with pytest.raises(ValueError, match=swapped):
            DeviceDequantizeTable([BOX], "float8_e5m2", "float32", "cpu").run(targets, sources, scales)
