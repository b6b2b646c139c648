"""Random numbers of a distribution from random bits, element by element.

`words` holds 64 bits for each element, as int64, once or, for complex numbers, twice. Every element goes through
operators whose result depends on that element alone, so that a part gets what it would get in the whole.
"""

import math
from collections.abc import Sequence

import torch

_LOW_63 = (1 << 63) - 1
_LEAST = -1 << 63
# Bits of the fraction of each type, which hold every whole number up to 2 ** bits.
_FRACTION_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_OPEN_BITS = 52


def uniform(words: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Uniform numbers: multiples of the dtype's smallest fraction from [0, 1), for both parts of a complex number.

    >>> uniform([torch.tensor([-1, 0])], torch.float16)
    tensor([0.9995, 0.0000], dtype=torch.float16)
    """
    if dtype.is_complex:
        return torch.complex(*(uniform([of_part], dtype.to_real()) for of_part in words))
    num_bits = _FRACTION_BITS[dtype]
    return _high_bits(words[0], num_bits).to(dtype) * 2.0**-num_bits


def normal(words: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of mean 0 and variance 1, by the inverse of the distribution function in fp64."""
    parts = [torch.special.ndtri(_between(of_part)) for of_part in words]
    return (torch.complex(*parts) * math.sqrt(0.5) if dtype.is_complex else parts[0]).to(dtype)


def poisson(words: Sequence[torch.Tensor], rate: torch.Tensor) -> torch.Tensor:
    """Numbers of events at a mean `rate` of each element, by bisection of the distribution function in fp64.

    >>> poisson([torch.tensor([0, 0, 1 << 62])], torch.tensor([0.0, 4.0, 4.0])).tolist()
    [0.0, 0.0, 3.0]
    """
    wanted, mean = _between(words[0]), rate.double()
    # Numbers above are rarer than the least that 64 bits can tell.
    below, found = torch.full_like(mean, -1.0), (mean + 40 * mean.sqrt() + 60).ceil()
    while bool((found - below > 1).any()):
        middle = ((below + found) / 2).floor()
        reaches = torch.special.gammaincc(middle + 1, mean) >= wanted
        below, found = torch.where(reaches, below, middle), torch.where(reaches, middle, found)
    return found


def exponential(words: Sequence[torch.Tensor], rate: float) -> torch.Tensor:
    """Numbers of mean 1 / `rate`, above 0."""
    return -_between(words[0]).log() / rate


def cauchy(words: Sequence[torch.Tensor], median: float, sigma: float) -> torch.Tensor:
    """Numbers around `median`, half of them within `sigma`."""
    return ((_between(words[0]) - 0.5) * math.pi).tan() * sigma + median


def geometric(words: Sequence[torch.Tensor], probability: float) -> torch.Tensor:
    """Numbers of trials up to the first success."""
    return (_between(words[0]).log() / math.log1p(-probability)).ceil().clamp(min=1)


def bernoulli(words: Sequence[torch.Tensor], probability: float | torch.Tensor) -> torch.Tensor:
    """Bools that are True with a probability."""
    return uniform(words, torch.float64) < probability


def integers(words: Sequence[torch.Tensor], low: int, high: int) -> torch.Tensor:
    """Whole numbers from [low, high); a span that does not divide 2 ** 63 favours some, by span / 2 ** 63.

    >>> integers([torch.tensor([5, -1])], -2, 1)
    tensor([ 0, -1])
    """
    span = high - low
    if span <= _LOW_63:
        return (words[0] & _LOW_63) % span + low
    if span == 1 << 64:
        return words[0].clone()
    # As unsigned numbers, each of which contains the span once at most; sums wrap around.
    wrapped = span - (1 << 64)
    return torch.where((words[0] ^ _LEAST) < (wrapped ^ _LEAST), words[0], words[0] - wrapped) + low


def largest_integer(dtype: torch.dtype) -> int:
    """The largest number up to which every whole number has a value of the dtype."""
    if dtype is torch.bool:
        return 1
    return 1 << _FRACTION_BITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max


def _high_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    return (words >> (64 - num_bits)) & ((1 << num_bits) - 1)


def _between(words: torch.Tensor) -> torch.Tensor:
    """Numbers from (0, 1) in fp64, as likely near 0 as near 1."""
    return (_high_bits(words, _OPEN_BITS).double() + 0.5) * 2.0**-_OPEN_BITS
