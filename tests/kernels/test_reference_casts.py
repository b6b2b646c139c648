"""The reference's casts against torch's, tables of all 8-bit values, and arithmetic written down here."""

import doctest
import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from tests.harness.torch_versions import needs_torch
from tritondt.kernels import reference
from tritondt.kernels.boxes import CastBox

NAN, INFINITY = float("nan"), float("inf")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SATURATES = needs_torch("2.13", "infinities become NaN in float8_e4m3fn")
FP8_OF_TORCH = (pytest.param(torch.float8_e4m3fn, marks=_SATURATES), torch.float8_e5m2)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of these, and of nothing else, torch makes one NaN here and another there (2.13, with vector instructions).
UNDECIDED = {
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.bfloat16),
    (torch.float16, torch.float32),
}


def bits(x):
    return x.view(INTEGERS[x.element_size()])


def all_or_random_bits(dtype):
    """Every value of a half type; of a wider one random bits, values near 1 and every kind of NaN."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    integer = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(integer)
    draw = torch.Generator().manual_seed(1)
    anything = torch.randint(limits.min, limits.max, (50_000,), generator=draw, dtype=integer).view(dtype)
    ordinary = torch.randn(50_000, generator=draw, dtype=dtype) * 2.0 ** torch.randint(
        -30, 20, (50_000,), generator=draw
    )
    infinity_bits = bits(torch.tensor(INFINITY, dtype=dtype)).item()
    nans = torch.randint(infinity_bits + 1, limits.max, (1_000,), generator=draw, dtype=integer)
    return torch.cat((anything, ordinary, nans.view(dtype), (nans | limits.min).view(dtype)))


def whole_box(x):
    return CastBox(0, 0, 0, 0, (x.numel(),), (1,), (1,))


def cast(x, dtype):
    target = torch.full((x.numel(),), -7.0, dtype=dtype)
    reference.cast_boxes([x], [target], [whole_box(x)])
    return target


def quantize(x, dtype):
    """One box of a contiguous tensor; its elements, and its scale as a number."""
    target, scales = torch.full((x.numel(),), 0x55, dtype=torch.uint8).view(dtype), torch.full((1,), -7.0)
    reference.quantize_boxes([x], [target], scales, [whole_box(x)])
    return target, scales.item()


def dequantize(x, scale, dtype):
    target = torch.full((x.numel(),), -7.0, dtype=dtype)
    reference.dequantize_boxes([x], [target], torch.tensor([scale]), [whole_box(x)])
    return target


def nearest_even(x, dtype):
    """Rounds float32 numbers below the largest 8-bit value by looking at all values."""
    codes = torch.arange(128, dtype=torch.uint8)
    values = codes.view(dtype).double()
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    above = torch.searchsorted(values, x.double().abs()).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    up, down = values[above] - x.double().abs(), x.double().abs() - values[below]
    takes_below = (down < up) | ((down == up) & (codes[below] % 2 == 0))
    return torch.where(takes_below, codes[below], codes[above]) | (torch.signbit(x).to(torch.uint8) << 7)


def test_examples_in_docstrings():
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for name in ("cast_boxes", "quantize_boxes", "dequantize_boxes"):
        for example in finder.find(getattr(reference, name), name, globs=dict(vars(reference))):
            assert len(example.examples) >= 4
            assert runner.run(example).failed == 0


def ways_of_torch(x, dtype):
    """What torch makes of a vector's elements: side by side, apart, one behind the other, and one by one."""
    apart, into = torch.zeros(len(x), 3, dtype=x.dtype), torch.zeros(len(x), 2, dtype=dtype)
    apart[:, 1] = x
    into[:, 1] = x
    few = x[:300]
    return {
        "contiguous": x.to(dtype),
        "strided source": apart[:, 1].to(dtype),
        "strided target": into[:, 1].contiguous(),
        "few": torch.cat([part.to(dtype) for part in few.split(3)]),
        "single": torch.stack([element.to(dtype) for element in few]),
    }


def nans_and_infinities(dtype):
    """Both infinities, and NaN of both signs, quiet and signaling, with no bit of payload, one, some and all."""
    integer = INTEGERS[dtype.itemsize]
    infinity = bits(torch.tensor(INFINITY, dtype=dtype)).item()
    mantissa = round(-math.log2(torch.finfo(dtype).eps))
    payloads = {0, *(1 << bit for bit in range(mantissa)), (1 << mantissa) - 1, (1 << (mantissa - 1)) - 1}
    positive = torch.tensor([infinity | payload for payload in sorted(payloads)], dtype=integer)
    return torch.cat((positive, positive | torch.iinfo(integer).min)).view(dtype)


HAS_VECTORS = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
vectors = pytest.mark.skipif(not HAS_VECTORS, reason="torch's casts to float16 without vectors drop payloads")


@vectors
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)))
def test_casts_are_those_of_torch_bit_for_bit(source, target):
    x = torch.cat((nans_and_infinities(source).repeat(3), all_or_random_bits(source)))
    found = bits(cast(x, target))
    for expected in ways_of_torch(x, target).values():
        different = found[: len(expected)] != bits(expected)
        if (source, target) in UNDECIDED:
            different &= ~x[: len(expected)].isnan()
        assert not different.any()


@vectors
@pytest.mark.parametrize(
    ("source", "target", "way"), [(*pair, "strided source") for pair in sorted(UNDECIDED, key=str)]
)
def test_where_torch_has_several_nan_ours_is_that_of_strided_tensors(source, target, way):
    x = nans_and_infinities(source)
    ways = ways_of_torch(x, target)
    assert_close(bits(cast(x, target)), bits(ways[way]), rtol=0, atol=0)
    assert any(not torch.equal(bits(other), bits(ways[way])[: len(other)]) for other in ways.values())


@pytest.mark.parametrize(
    ("source", "target", "given", "expected"),
    [
        (torch.float32, torch.float16, [0x7F812345, 0xFFC00000, 0x7F800001], [0x7E09, 0xFE00, 0x7E00]),
        (torch.float32, torch.bfloat16, [0x7F812345, 0xFFC00000], [0x7FC0, 0x7FC0]),
        (torch.bfloat16, torch.float32, [0x7F81, 0xFFFF], [0x7F810000, 0xFFFF0000]),
        (torch.bfloat16, torch.float16, [0x7F81, 0xFFA3], [0x7E08, 0xFF18]),
        (torch.float16, torch.float32, [0x7C01, 0xFD23], [0x7FC02000, 0xFFE46000]),
        (torch.float16, torch.bfloat16, [0x7C01, 0xFD23], [0x7FC0, 0x7FC0]),
    ],
)
def test_bits_of_nan(source, target, given, expected):
    def with_bits(numbers, dtype):
        width = 8 * dtype.itemsize
        signed = [number - (number >> (width - 1) << width) for number in numbers]
        return torch.tensor(signed, dtype=INTEGERS[dtype.itemsize])

    found = cast(with_bits(given, source).view(source), target)
    assert_close(bits(found), with_bits(expected, target), rtol=0, atol=0)


@vectors
@pytest.mark.parametrize("dtype", FP8_OF_TORCH)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinities_of_fp8_are_those_of_torch(dtype, source):
    x = torch.cat((nans_and_infinities(source), torch.tensor([torch.finfo(dtype).max], dtype=source)))
    codes, scale = quantize(x, dtype)
    assert scale == 1.0
    for expected in ways_of_torch(x, dtype).values():
        assert_close(bits(codes), bits(expected), rtol=0, atol=0)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    back = bits(dequantize(every, 1.0, source))
    for expected in ways_of_torch(every, source).values():
        assert_close(back[: len(expected)], bits(expected), rtol=0, atol=0)


def test_nan_that_a_scale_makes():
    codes = torch.tensor([0x00, 0x7C, 0xFE, 0x3C], dtype=torch.uint8).view(torch.float8_e5m2)
    for scale, makes in ((INFINITY, [0]), (0.0, [1]), (NAN, [0, 1, 3])):
        found = bits(dequantize(codes, scale, torch.float32)).tolist()
        assert [i for i, found_bits in enumerate(found) if found_bits == 0x7FC00000] == makes
        assert found[2] == 0xFFC00000 - 2**32


def test_float64_goes_to_half_types_by_way_of_float32():
    x = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert cast(x, torch.bfloat16)[0] == 1.0
    assert cast(x, torch.float16)[1] == 1.0


def test_a_strided_box_is_cast_and_nothing_else():
    source = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    target = torch.full((5, 7), -1.0, dtype=torch.float16)
    reference.cast_boxes([source], [target], [CastBox(0, 0, 5 + 12, 8, (2, 2), (-12, 4), (7, 1))])
    expected = torch.full((5, 7), -1.0, dtype=torch.float16)
    expected[1:3, 1:3] = source[:, 1:3, 1].flip(0)
    assert_close(target, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FP8)
def test_a_box_walked_backwards_there_and_back(dtype):
    x = torch.tensor([1.0, 2.0, 3.0, 448.0])
    codes, scales, back = torch.zeros(4).to(dtype), torch.zeros(1), torch.zeros(4)
    backwards = [CastBox(0, 0, 3, 0, (4,), (-1,), (1,))]
    reference.quantize_boxes([x], [codes], scales, backwards)
    assert codes.float().tolist() == [448.0 / scales.item(), *(value / scales.item() for value in (3.0, 2.0, 1.0))]
    reference.dequantize_boxes([codes], [back], scales, backwards)
    assert back.tolist() == x.tolist()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_scale_is_the_smallest_power_of_two_that_fits(dtype, source):
    largest = torch.finfo(dtype).max
    near = [largest * 2.0**power * (1 + step * torch.finfo(source).eps) for power in (-9, -1, 0) for step in (-1, 0, 1)]
    for value in [*near, 1.0, 0.3, torch.finfo(source).max, torch.finfo(source).smallest_normal]:
        x = torch.tensor([0.0, -value, value / 3], dtype=source)
        amax = x.double().abs().max().item()
        if not 0 < amax < INFINITY:
            continue
        _, scale = quantize(x, dtype)
        assert math.frexp(scale)[0] == 0.5
        assert amax / scale <= largest
        assert scale == 2.0**-126 or amax / (scale / 2) > largest


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_elements_are_rounded_once_to_nearest_even(dtype, source):
    # The largest element makes the scale 1; below it, every 8-bit value, every middle and its neighbours.
    values = torch.arange(127, dtype=torch.uint8).view(dtype).double()
    values = values[values.isfinite()]
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat((values, middles, middles * (1 + 2**-7), middles * (1 - 2**-7))).to(source)
    near = near[near.double() <= torch.finfo(dtype).max]
    x = torch.cat((near, -near))
    codes, scale = quantize(x, dtype)
    assert scale == 1.0
    assert_close(bits(codes), nearest_even(x.float(), dtype), rtol=0, atol=0)
    for power in (-20, 13):
        scaled_codes, scale = quantize(x.float() * 2.0**power, dtype)
        assert scale == 2.0**power
        assert_close(bits(scaled_codes), bits(codes), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FP8)
def test_random_boxes_there_and_back(dtype):
    x = torch.randn(10_000) * 2.0 ** torch.randint(-12, 3, (10_000,))
    codes, scale = quantize(x, dtype)
    assert_close(bits(codes), nearest_even(x / scale, dtype), rtol=0, atol=0)
    for target in (torch.float32, torch.bfloat16, torch.float16):
        exact = codes.double() * scale
        assert_close(dequantize(codes, scale, target), exact.to(target), rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "infinity"), [(torch.float8_e4m3fn, 0x7E), (torch.float8_e5m2, 0x7C)])
def test_elements_that_are_not_finite_leave_the_scale_alone(dtype, infinity):
    x = torch.tensor([INFINITY, -INFINITY, NAN, -NAN, 1024.0, -0.0])
    codes, scale = quantize(x, dtype)
    assert scale == {torch.float8_e4m3fn: 4.0, torch.float8_e5m2: 2.0**-5}[dtype]
    assert bits(codes).tolist()[:4] == [infinity, infinity | 0x80, 0x7F, 0xFF]
    assert codes.float()[4:].tolist() == [1024.0 / scale, 0.0]
    assert bits(codes)[5] == 0x80
    back = dequantize(codes, scale, torch.float32)
    largest = INFINITY if dtype == torch.float8_e5m2 else 448.0 * scale
    assert_close(back, torch.tensor([largest, -largest, NAN, NAN, 1024.0, -0.0]), rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(back[2:4]).tolist() == [False, True]


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("values", [[], [0.0, -0.0], [INFINITY, NAN]])
def test_scale_is_one_where_nothing_needs_one(dtype, values):
    codes, scale = quantize(torch.tensor(values), dtype)
    assert scale == 1.0
    assert codes.numel() == len(values)


@pytest.mark.parametrize("dtype", FP8)
def test_subnormals_and_the_largest_numbers(dtype):
    smallest = torch.tensor([2.0**-149, -(2.0**-140), 2.0**-126])
    codes, scale = quantize(smallest, dtype)
    assert scale == 2.0**-126
    assert_close(bits(codes), nearest_even(smallest * 2.0**126, dtype), rtol=0, atol=0)
    for source in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([torch.finfo(source).max, 1.0], dtype=source)
        codes, scale = quantize(x, dtype)
        # The largest number has more ones than fp8: rounding doubles its power of two.
        assert codes.double()[0] * scale == 2.0 ** math.frexp(torch.finfo(source).max)[1]
        assert dequantize(codes, scale, source)[0] == INFINITY


@pytest.mark.parametrize(
    ("verb", "source", "target", "sentence"),
    [
        (
            "cast",
            torch.int32,
            torch.float32,
            "cast from torch.int32 to torch.float32; allowed are two different ones of",
        ),
        ("cast", torch.float32, torch.float32, "allowed are two different ones of float32, float64, bfloat16, float16"),
        ("cast", torch.float32, torch.float8_e5m2, "cast from torch.float32 to torch.float8_e5m2; allowed are two"),
        (
            "quantize",
            torch.float64,
            torch.float8_e5m2,
            "quantize from torch.float64 to .* allowed are float32, bfloat16, fl",
        ),
        ("quantize", torch.float32, torch.float16, "to torch.float16; .* to float8_e4m3fn, float8_e5m2"),
        ("dequantize", torch.float32, torch.float32, "allowed are float8_e4m3fn, float8_e5m2 to float32, bfloat16"),
    ],
)
def test_dtypes_that_are_refused_before_anything_is_written(verb, source, target, sentence):
    allowed = {
        "cast": (torch.float32, torch.float16),
        "quantize": (torch.float32, FP8[0]),
        "dequantize": (FP8[0], torch.float32),
    }
    sources = [torch.ones(3).to(dtype) for dtype in (allowed[verb][0], source)]
    targets = [torch.zeros(3).to(dtype) for dtype in (allowed[verb][1], target)]
    scales = [] if verb == "cast" else [torch.full((2,), -7.0)]
    boxes = [CastBox(i, i, 0, 0, (3,), (1,), (1,)) for i in range(2)]
    with pytest.raises(ValueError, match=sentence):
        getattr(reference, f"{verb}_boxes")(sources, targets, *scales, boxes)
    assert targets[0].float().tolist() == [0.0, 0.0, 0.0]
    assert all(values.tolist() == [-7.0, -7.0] for values in scales)


@pytest.mark.parametrize("scales", [torch.ones(2), torch.ones(1, dtype=torch.float64), torch.ones(1, 1)])
def test_scales_that_are_refused(scales):
    fp8 = torch.zeros(3, dtype=torch.float8_e5m2)
    box = CastBox(0, 0, 0, 0, (3,), (1,), (1,))
    sentence = r"scales are torch.float.* for 1 boxes; they are torch.float32 of shape \(1,\), one per box"
    with pytest.raises(ValueError, match=sentence):
        reference.quantize_boxes([torch.zeros(3)], [fp8], scales, [box])
    with pytest.raises(ValueError, match=sentence):
        reference.dequantize_boxes([fp8], [torch.zeros(3)], scales, [box])


def test_no_boxes_write_nothing():
    reference.cast_boxes([], [], [])
    reference.quantize_boxes([], [], torch.empty(0), [])
    reference.dequantize_boxes([], [], torch.empty(0), [])
