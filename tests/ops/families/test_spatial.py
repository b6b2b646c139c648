"""Convolution, pooling, padding and resampling: batch and channels cut, images gathered where they are cut."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.sharded import Case, check

GENERATOR = torch.Generator().manual_seed(6)


def randn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


IMAGES = randn(5, 4, 6, 5)
LAYOUTS = ["S0", "S1", "S0(sizes=4/0/1)", "S2", "P"]


@pytest.mark.parametrize("placements", LAYOUTS)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 2, padding=1),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        lambda x: F.adaptive_max_pool2d(x, 2),
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2], output_size=(6, 5)),
        lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
        lambda x: F.pad(x, (1, 1, 0, 2), mode="replicate"),
        lambda x: F.unfold(x, 2),
        lambda x: F.fold(x.flatten(2)[..., :12].repeat(1, 4, 1), (5, 4), 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, (3, 4), mode="bicubic"),
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: F.channel_shuffle(x, 2),
    ],
)
def test_values_and_gradients_are_those_of_one_device(function, placements):
    check(function, Case((3,), (IMAGES,), (placements,)), gradients=True)


WEIGHT, BIAS = randn(6, 4, 3, 3), randn(6)


@pytest.mark.parametrize(
    ("of_image", "of_weight", "of_bias", "expect"),
    [
        ("S0", "R", "R", "S0"),
        ("S0(sizes=0/5/0)", "R", "R", "S0(sizes=0/5/0)"),
        ("R", "S0", "S0", "S1"),
        ("R", "S0(unit=2)", "R", "S1(unit=2)"),
        ("S2", "R", "R", "R"),
        ("P", "R", "R", "P"),
        ("S1", "S1", "R", None),
    ],
)
def test_convolution(of_image, of_weight, of_bias, expect):
    case = Case((3,), (IMAGES, WEIGHT, BIAS), (of_image, of_weight, of_bias))
    check(lambda x, w, b: F.conv2d(x, w, b, padding=1), case, gradients=True, expect=expect)


def test_convolution_of_cut_input_channels_leaves_terms():
    case = Case((2,), (IMAGES, WEIGHT), ("S1", "S1"))
    check(F.conv2d, case, gradients=True, expect="P")


@pytest.mark.parametrize(("of_image", "of_weight"), [("S0", "R"), ("S1", "S0"), ("R", "S1"), ("S0, S1", "R, S0")])
def test_transposed_and_grouped_convolution(of_image, of_weight):
    mesh = (2, 2) if "," in of_image else (2,)
    case = Case(mesh, (IMAGES, randn(4, 3, 2, 2)), (of_image, of_weight))
    check(F.conv_transpose2d, case, gradients=True)
    grouped = Case(mesh, (IMAGES, randn(6, 2, 2, 2)), (of_image, of_weight))
    check(lambda x, w: F.conv2d(x, w, groups=2), grouped, gradients=True)


@pytest.mark.parametrize(("of_image", "of_grid"), [("S0", "S0"), ("S1", "R"), ("R", "S0"), ("S0, S1", "R, R")])
def test_sampling_at_a_grid(of_image, of_grid):
    mesh = (2, 2) if "," in of_image else (2,)
    case = Case(mesh, (IMAGES, randn(5, 3, 2, 2).tanh()), (of_image, of_grid))
    check(lambda x, grid: F.grid_sample(x, grid, align_corners=False), case, gradients=True)


@pytest.mark.parametrize("placements", ["S0", "S0(sizes=0/2/5)", "S0(sizes=7/0/0)", "S0(repeats=7)", "S1", "P"])
@pytest.mark.parametrize("pads", [(0, 0, 2, 1), (1, 0), (0, 0, -2, 3), (0, 0, -3, -2), (0, 0, 0, -6), (2, -1, 1, 1)])
@pytest.mark.parametrize("value", [0.0, 2.5])
def test_padding_by_a_number(placements, pads, value):
    case = Case((3,), (randn(7, 4),), (placements,))
    check(lambda x: F.pad(x, pads, value=value), case, gradients=True, exact=placements != "P")


def test_padding_moves_nothing():
    check(lambda x: F.pad(x, (0, 0, 2, 1)), Case((3,), (randn(7, 4),), ("S0",)), expect="S0(sizes=5/3/2)")
    check(lambda x: F.pad(x, (0, 0, 2, 1)), Case((3,), (randn(7, 4),), ("P",)), expect="P")
