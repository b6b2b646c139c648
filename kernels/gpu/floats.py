"""Conversions of floating-point dtypes in kernels: to nearest, ties to even, on every device and in the interpreter.

Elements of 8 bits, and bfloat16, are loaded and stored as bits: Triton's interpreter (3.6 to 3.9) cuts what it should
round, and of fp8 the dtypes differ from one architecture to another.
"""

import triton
import triton.language as tl


@triton.jit
def to_float32(x, DTYPE: tl.constexpr):
    """Float32 of an element as it is loaded; exact but for float64."""
    if DTYPE == "bfloat16":
        x = (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float8_e4m3fn" or DTYPE == "float8_e5m2":
        x = _from_fp8(x.to(tl.uint32), DTYPE)
    elif DTYPE == "float16":
        # By way of a number with the mantissa of the NaN, of which only the exponent is wrong.
        is_nan = (0x7C00 - (x & 0x7FFF).to(tl.int32)) >> 31
        number = (x - (is_nan & 0x4000).to(tl.uint16)).to(tl.float16, bitcast=True).to(tl.float32)
        x = (number.to(tl.uint32, bitcast=True) | (is_nan & 0x7FC00000).to(tl.uint32)).to(tl.float32, bitcast=True)
    elif DTYPE == "float64":
        bits = x.to(tl.uint64, bitcast=True)
        nan = (bits >> 32).to(tl.uint32) & 0x80000000 | 0x7FC00000 | (bits >> 29).to(tl.uint32) & 0x3FFFFF
        x = tl.where(x != x, nan, x.to(tl.float32).to(tl.uint32, bitcast=True))
        x = x.to(tl.uint32).to(tl.float32, bitcast=True)
    return x


@triton.jit
def to_bits(x, DTYPE: tl.constexpr):
    """Bits of a float32 in another dtype; those of a NaN are put together by hand, for a GPU has but one NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE == "float64":
        # By way of a number with the mantissa of the NaN, whose exponent is one less; and by a mask, for neither shifts
        # of 64 bits nor so many conditions fit into the registers.
        is_nan = (0x7F800000 - (bits & 0x7FFFFFFF).to(tl.int32)) >> 31
        number = (bits + ((is_nan << 23).to(tl.uint32) & 0xFF800000)).to(tl.float32, bitcast=True)
        wide = number.to(tl.float64).to(tl.uint64, bitcast=True)
        bits = wide | (is_nan.to(tl.int64) & 0x7FF8000000000000).to(tl.uint64)
    elif DTYPE == "bfloat16":
        bits = to_bfloat16_bits(x)
    elif DTYPE == "float16":
        nan = bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x1FF
        bits = tl.where(x != x, nan.to(tl.uint16), x.to(tl.float16).to(tl.uint16, bitcast=True)).to(tl.uint16)
    elif DTYPE == "float8_e4m3fn" or DTYPE == "float8_e5m2":
        bits = _to_fp8(x, DTYPE)
    return bits


@triton.jit
def scaled(x, factor, IS_TO_FP8: tl.constexpr):
    """Product with a positive factor; a NaN stays as it is, of a NaN on its way to fp8 the sign does, another is
    positive.
    """
    bits = x.to(tl.uint32, bitcast=True)
    if IS_TO_FP8:
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * factor
        bits = (magnitude.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | (bits & 0x80000000)
    else:
        product = x * factor
        defined = tl.where(product != product, 0x7FC00000, product.to(tl.uint32, bitcast=True)).to(tl.uint32)
        bits = tl.where(x != x, bits, defined).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16_bits(x):
    """Bits in bfloat16 of a float32; every NaN becomes 0x7fc0 (a GPU's own is 0x7fff)."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def scale_bits(magnitude, DTYPE: tl.constexpr):
    """Bits of the least power of two, 2**-126 or more, that fits a magnitude into fp8; both are float32 as int32."""
    # The largest values are 1.75 * 2**8 and 1.75 * 2**15: a larger mantissa takes one more power of two.
    LARGEST_POWER: tl.constexpr = 8 if DTYPE == "float8_e4m3fn" else 15
    exponent = (magnitude + 0x1FFFFF) >> 23
    return tl.maximum(exponent - LARGEST_POWER, 1) << 23


@triton.jit
def _from_fp8(code, DTYPE: tl.constexpr):
    MANTISSA_BITS: tl.constexpr = 3 if DTYPE == "float8_e4m3fn" else 2
    # The exponent is put in place, and then made what it says: subnormal numbers come out right too.
    BIAS: tl.constexpr = 2.0**120 if DTYPE == "float8_e4m3fn" else 2.0**112
    shifted = ((code & 0x7F) << (23 - MANTISSA_BITS)).to(tl.float32, bitcast=True)
    bits = (shifted * BIAS).to(tl.uint32, bitcast=True) | (code & 0x80) << 24
    special = (code & 0x80) << 24 | 0x7F800000
    if DTYPE == "float8_e4m3fn":
        bits = tl.where((code & 0x7F) == 0x7F, special | 0x700000, bits).to(tl.uint32)
    else:
        bits = tl.where((code & 0x7F) == 0x7C, special, bits).to(tl.uint32)
        bits = tl.where((code & 0x7F) > 0x7C, special | 0x400000 | (code & 1) << 21, bits).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_fp8(x, DTYPE: tl.constexpr):
    """Bits in fp8 of a number that is at most the format's largest value, or not finite; e4m3fn has that value for
    an infinity.
    """
    MANTISSA_BITS: tl.constexpr = 3 if DTYPE == "float8_e4m3fn" else 2
    BIAS: tl.constexpr = 7 if DTYPE == "float8_e4m3fn" else 15
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    # A number whose last bit is worth as much as that of subnormal fp8: float32's own addition rounds there.
    LAST_BIT: tl.constexpr = 2.0**14 if DTYPE == "float8_e4m3fn" else 2.0**7
    LAST_BIT_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA_BITS) << 23
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (magnitude.to(tl.float32, bitcast=True) + LAST_BIT).to(tl.uint32, bitcast=True) - LAST_BIT_BITS
    rounded = (magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT
    normal = rounded - ((127 - BIAS) << MANTISSA_BITS)
    LARGEST: tl.constexpr = 0x7E if DTYPE == "float8_e4m3fn" else 0x7C
    code = tl.minimum(tl.where(magnitude < (128 - BIAS) << 23, small, normal), LARGEST)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | (bits >> 24) & 0x80).to(tl.uint8)
