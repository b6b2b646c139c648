"""Reductions by dtype, as in csrc/boxes/reduce_kernels."""

from typing import NamedTuple

_NUMBERS = ("sum", "product", "max", "min")


class Dtype(NamedTuple):
    """A dtype that has reductions. A complex number is two real elements of `element_bytes`."""

    ops: tuple[str, ...]
    element_bytes: int
    itemsize: int
    divides: bool


DTYPES = {
    "float32": Dtype(_NUMBERS, 4, 4, True),
    "bfloat16": Dtype(_NUMBERS, 2, 2, True),
    "float16": Dtype(_NUMBERS, 2, 2, True),
    "float64": Dtype(_NUMBERS, 8, 8, True),
    "int8": Dtype(_NUMBERS, 1, 1, False),
    "uint8": Dtype(_NUMBERS, 1, 1, False),
    "int16": Dtype(_NUMBERS, 2, 2, False),
    "int32": Dtype(_NUMBERS, 4, 4, False),
    "int64": Dtype(_NUMBERS, 8, 8, False),
    "bool": Dtype(("max", "min"), 1, 1, False),
    "complex64": Dtype(("sum", "product"), 4, 8, True),
    "complex128": Dtype(("sum", "product"), 8, 16, True),
}


def find_dtype(dtype: str, op: str, divisor: int) -> Dtype:
    """Entry of `DTYPES` for a reduction; ValueError where the dtype has no such reduction.

    >>> find_dtype("bool", "sum", 1)
    Traceback (most recent call last):
    ValueError: op 'sum' on dtype 'bool'; allowed on it are max, min
    """
    found = DTYPES.get(dtype)
    if found is None:
        raise ValueError(f"dtype {dtype!r} has no reductions; allowed are {', '.join(DTYPES)}")
    if op not in found.ops:
        raise ValueError(f"op {op!r} on dtype {dtype!r}; allowed on it are {', '.join(found.ops)}")
    if divisor < 1 or (divisor != 1 and not (op == "sum" and found.divides)):
        raise ValueError(
            f"divisor {divisor} with op {op!r} on dtype {dtype!r}; a divisor is 1 or more, and other than 1 only with "
            "sum, on floating-point and complex dtypes"
        )
    return found
