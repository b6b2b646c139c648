"""Random numbers from random bits: their ranges, exactly, and their distributions, by moments of 200,000 of them."""

import math

import pytest
import torch

from tritondt.ops.random import distributions
from tritondt.ops.random.philox import random_words

NUM = 200_000
WORDS = tuple(random_words((((0, NUM),),), (NUM,), 12345, lane) for lane in (0, 1))
# The smallest and the largest numbers come from these.
ENDS = [torch.tensor([0, -1])]


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (torch.float64, 1 - 2**-53),
        (torch.float32, 1 - 2**-24),
        (torch.float16, 1 - 2**-11),
        (torch.bfloat16, 1 - 2**-8),
    ],
)
def test_uniform_numbers_are_at_least_0_and_below_1(dtype, most):
    assert distributions.uniform(ENDS, dtype).tolist() == [0.0, most]
    found = distributions.uniform(WORDS, dtype).double()
    assert abs(found.mean() - 0.5) < 0.004
    assert abs(found.var() - 1 / 12) < 0.002


def test_normal_numbers():
    assert abs(distributions.normal(ENDS, torch.float64)[0]) < 9
    assert distributions.normal(ENDS, torch.float64).sum() == 0
    found = distributions.normal(WORDS, torch.float64)
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs(found.pow(power).mean() - moment) < 0.06, power
    parts = distributions.normal(WORDS, torch.complex64)
    assert abs(parts.abs().pow(2).mean() - 1) < 0.01
    assert abs((parts.real * parts.imag).mean()) < 0.01


def test_other_distributions():
    waits = distributions.exponential(WORDS, 4.0)
    assert (waits > 0).all()
    assert abs(waits.mean() - 0.25) < 0.003
    assert abs(distributions.cauchy(WORDS, 3.0, 2.0).median() - 3) < 0.03
    assert abs((distributions.cauchy(WORDS, 3.0, 2.0) - 3).abs().median() - 2) < 0.03
    tries = distributions.geometric(WORDS, 0.25)
    assert tries.min() == 1
    assert abs(tries.mean() - 4) < 0.05
    assert distributions.geometric(ENDS, 1 - 1e-12).min() == 1
    assert abs(distributions.bernoulli(WORDS, 0.3).double().mean() - 0.3) < 0.004
    assert not distributions.bernoulli(ENDS, 0.0).any()
    assert distributions.bernoulli(ENDS, 1.0).all()
    assert math.isclose(distributions.bernoulli(WORDS, torch.tensor(0.3)).double().mean(), 0.3, abs_tol=0.004)


@pytest.mark.parametrize(
    ("low", "high"), [(-3, 4), (0, 1 << 62), (0, 1 << 63), (-5, 1 << 63), (-(1 << 63), 1 << 63), (-(1 << 62), 1 << 63)]
)
def test_whole_numbers_fill_their_range(low, high):
    found = distributions.integers(WORDS, low, high).double()
    assert found.min() >= low
    assert found.max() <= high
    span = high - low
    if span > 100:
        assert found.min() < low + span * 0.001
        assert found.max() > high - span * 0.001
        assert abs(found.mean() - (low + span / 2)) < span * (0.01 if span != (1 << 63) + (1 << 62) else 0.2)
    else:
        counts = torch.bincount((found - low).long()) / NUM
        torch.testing.assert_close(counts, torch.full((span,), 1 / span), rtol=0, atol=0.004)


def test_the_largest_whole_number_of_a_type():
    assert [distributions.largest_integer(dtype) for dtype in (torch.bool, torch.int8, torch.float32)] == [
        1,
        127,
        1 << 24,
    ]
