"""Floating-point dtypes as kernels convert them: to nearest, ties to even, on every device and in the interpreter."""

import triton
import triton.language as tl


@triton.jit
def to_float32(x, DTYPE: tl.constexpr):
    """Of an element as it is loaded, bfloat16 as bits; exact but for float64."""
    if DTYPE == "bfloat16":
        x = (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE != "float32":
        x = x.to(tl.float32)
    return x


@triton.jit
def to_bfloat16_bits(x):
    """Of float32; every NaN becomes 0x7fc0.

    By hand: Triton's interpreter (3.6 to 3.9) cuts the lower bits off, and a GPU's NaN is 0x7fff.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def cast_bits(x, SOURCE: tl.constexpr, TARGET: tl.constexpr):
    """The bits of an element in another dtype; half types by way of float32. A NaN becomes that of float("nan")."""
    if TARGET == "float64":
        wide = to_float32(x, SOURCE).to(tl.float64)
        bits = tl.where(wide != wide, 0x7FF8000000000000, wide.to(tl.uint64, bitcast=True))
    else:
        wide = to_float32(x, SOURCE)
        if TARGET == "bfloat16":
            bits = to_bfloat16_bits(wide)
        elif TARGET == "float16":
            bits = tl.where(wide != wide, 0x7E00, wide.to(tl.float16).to(tl.uint16, bitcast=True)).to(tl.uint16)
        else:
            bits = tl.where(wide != wide, 0x7FC00000, wide.to(tl.uint32, bitcast=True)).to(tl.uint32)
    return bits
