"""Wire dtypes: the dtype that messages hold where a redistribution asks for a narrower one than its tensor has."""

from typing import NamedTuple

import torch

from tritondt.errors import TransportError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NARROWER = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.bfloat16, torch.float16, *_FP8),
    torch.bfloat16: _FP8,
    torch.float16: _FP8,
}


def is_scaled(wire_dtype: torch.dtype) -> bool:
    """Whether messages of this dtype have a scale in front of each box."""
    return wire_dtype in _FP8


class Wire(NamedTuple):
    """Dtypes of the messages of a redistribution and of those of its gradient; None for the tensor's own."""

    forward: torch.dtype | None
    backward: torch.dtype | None


def narrower(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype | None:
    """Dtype of the messages of a tensor of `dtype` where `wire_dtype` is asked for; None for the tensor's own.

    TransportError where the one does not go with the other.

    >>> narrower(torch.float32, torch.bfloat16), narrower(torch.float32, torch.float32)
    (torch.bfloat16, None)
    """
    if wire_dtype is None or wire_dtype is dtype:
        return None
    allowed = _NARROWER.get(dtype, ())
    if wire_dtype not in allowed:
        names = [str(each).removeprefix("torch.") for each in (dtype, *allowed)]
        found = "its own" if len(names) == 1 else f"{', '.join(names[1:])} and its own"
        raise TransportError(
            f"messages of {wire_dtype!r} were asked for a tensor of {names[0]}; allowed for {names[0]} is {found}"
        )
    return wire_dtype


def wire_of(
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    grad_wire_dtype: torch.dtype | None,
) -> Wire:
    """Wire dtypes of a redistribution and of its gradient, which by default has that of the redistribution."""
    back = wire_dtype if grad_wire_dtype is None else grad_wire_dtype
    return Wire(narrower(dtype, wire_dtype), narrower(gradient_dtype, back))
