"""Casts of tensors in plain torch in which every bit is defined, those of NaN too.

From float16 to float32, and from the wide dtypes to bfloat16, torch's own NaN has other bits in the last few elements
of a tensor, or with other strides, than in the rest (2.13 and AVX2), so what a NaN becomes is put together here.
"""

import math

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_BFLOAT16_NAN_BITS, _FP8_NAN_BITS = 0x7FC0, 0x7F
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tensor in another dtype, as `x.to(dtype)`; a NaN becomes quiet and keeps its sign and what fits of its payload.

    In bfloat16 it becomes 0x7fc0, in fp8 0x7f with its sign; from bfloat16 to float32 all its bits are kept.

    >>> nan = torch.tensor([0x7F812345], dtype=torch.int32).view(torch.float32)
    >>> hex(bits_of(cast(nan, torch.float16)).item()), hex(bits_of(cast(nan, torch.bfloat16)).item())
    ('0x7e09', '0x7fc0')
    """
    if x.dtype == dtype:
        return x
    return torch.where(x.float().isnan(), _nan_bits(x, dtype), bits_of(x.to(dtype))).view(dtype)


def keep_nan(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`result`, computed from `x` and of its dtype, with the bits of `x` wherever that is a NaN."""
    return torch.where(x.isnan(), bits_of(x), bits_of(result)).view(x.dtype)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor as integers of their width."""
    return x.view(_INTEGERS[x.element_size()])


def _nan_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits in another dtype that every element would have if it were a NaN."""
    integer = _INTEGERS[dtype.itemsize]
    if dtype == torch.bfloat16:
        return torch.full(x.shape, _BFLOAT16_NAN_BITS, dtype=integer, device=x.device)
    bits = bits_of(x).long()
    sign = (bits >> (8 * x.element_size() - 1) & 1) << (8 * dtype.itemsize - 1)
    if dtype in FP8_DTYPES:
        return (sign | _FP8_NAN_BITS).to(integer)
    given, wanted = _mantissa_bits(x.dtype), _mantissa_bits(dtype)
    payload = bits & ((1 << given) - 1)
    payload = payload << (wanted - given) if wanted > given else payload >> (given - wanted)
    quiet = 0 if (x.dtype, dtype) == (torch.bfloat16, torch.float32) else 1 << (wanted - 1)
    exponent = ((1 << (8 * dtype.itemsize - 1 - wanted)) - 1) << wanted
    return (sign | exponent | quiet | payload).to(integer)


def _mantissa_bits(dtype: torch.dtype) -> int:
    return round(-math.log2(torch.finfo(dtype).eps))
