"""Every kernel again in plain torch: what the others must equal, bit for bit.

The arithmetic is spelled out where torch leaves it open. On CPU, `torch.mul` of complex numbers and
`torch.maximum` of -0.0 and 0.0 give other bits in the last few elements of a tensor than in the rest
(torch 2.13), so neither is used here; nor is `torch.add` of complex numbers, which mixes their parts.
"""

from collections.abc import Callable, Sequence

import torch

from tritondt.kernels.boxes import CopyBox, ReduceBox

_ACCUMULATION_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}

_Reducer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def copy_boxes(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], boxes: Sequence[CopyBox]) -> None:
    """Copies every box from its source to its target, byte for byte.

    Example: columns 1 and 2 of a 2x3 tensor, packed behind one word that nobody writes.

    >>> source = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    >>> target = torch.full((5,), -1, dtype=torch.int32)
    >>> copy_boxes([source], [target], [CopyBox(0, 0, 1, 1, 4, (2, 2), (3, 1), (2, 1))])
    >>> target.tolist()
    [-1, 1, 2, 4, 5]
    """
    for box in boxes:
        source, target = (
            _byte_view(tensor, offset, box.itemsize, box.lengths, strides)
            for tensor, offset, strides in (
                (sources[box.source], box.source_offset, box.source_strides),
                (targets[box.target], box.target_offset, box.target_strides),
            )
        )
        target.copy_(source)


def reduce_slots(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    boxes: Sequence[ReduceBox],
    op: str,
    divisor: int,
) -> None:
    """Reduces the slots of every box in their order, divides once, rounds once, and writes the target.

    `op` is sum, product, max or min; avg is sum with a divisor of n. bfloat16 and float16 accumulate in
    float32, every other dtype in its own; integers wrap. NaN propagates. Of equal values max and min
    keep the first, so the sign of a zero is defined. bool knows max (or) and min (and), complex sum and
    product; a divisor other than 1 goes with sum, of floats and complex numbers.

    Example: the average of two slots that lie behind each other in one buffer, 3 elements each.

    >>> from tritondt.kernels.boxes import Slot
    >>> buffer = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 9.0])
    >>> target = torch.full((4,), -1.0)
    >>> slots = (Slot(0, 0, (1,)), Slot(0, 3, (1,)))
    >>> reduce_slots([buffer], [target], [ReduceBox(0, 1, (3,), (1,), slots)], "sum", 2)
    >>> target.tolist()
    [-1.0, 1.5, 2.0, 6.0]
    """
    for box in boxes:
        target = targets[box.target]
        reducer = _reducer(op, target.dtype, divisor)
        contributions = [_view(sources[slot.source], slot.offset, box.lengths, slot.strides) for slot in box.slots]
        accumulation_dtype = _ACCUMULATION_DTYPES.get(target.dtype, target.dtype)
        total = contributions[0].to(accumulation_dtype)
        for contribution in contributions[1:]:
            total = reducer(total, contribution.to(accumulation_dtype))
        if divisor != 1:
            total = _divide(total, divisor)
        _view(target, box.target_offset, box.lengths, box.target_strides).copy_(total)


def _view(x: torch.Tensor, offset: int, lengths: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The box of `x` as a tensor; a copy where a stride is negative, which no torch view can be."""
    backward_dims = [dim for dim, stride in enumerate(strides) if stride < 0]
    start = x.storage_offset() + offset
    if 0 not in lengths:
        start += sum((lengths[dim] - 1) * strides[dim] for dim in backward_dims)
    view = x.as_strided(lengths, [abs(stride) for stride in strides], start)
    return view.flip(backward_dims) if backward_dims else view


def _byte_view(
    x: torch.Tensor, offset: int, itemsize: int, lengths: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """The box of `x` as bytes with a last dim of `itemsize`, so that no alignment is asked of `x`."""
    storage = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    return _view(
        storage,
        int(x.storage_offset()) * x.element_size() + offset * itemsize,
        (*lengths, itemsize),
        (*(stride * itemsize for stride in strides), 1),
    )


def _reducer(op: str, dtype: torch.dtype, divisor: int) -> _Reducer:
    reducers = _REDUCERS
    if dtype == torch.bool:
        reducers = _BOOL_REDUCERS
    elif dtype.is_complex:
        reducers = _COMPLEX_REDUCERS
    if op not in reducers:
        raise ValueError(f"op {op!r} on {dtype}; allowed on it: {', '.join(reducers)}")
    if divisor < 1:
        raise ValueError(f"divisor {divisor}; a divisor is 1 or more")
    if divisor != 1 and not (op == "sum" and (dtype.is_floating_point or dtype.is_complex)):
        raise ValueError(
            f"divisor {divisor} with op {op!r} on {dtype}; "
            "a divisor other than 1 is allowed with sum, on floating-point and complex dtypes"
        )
    return reducers[op]


def _larger(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where((value > total) | (value != value), value, total)


def _smaller(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where((value < total) | (value != value), value, total)


def _complex_sum(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # torch.add multiplies by its alpha, 1 + 0i, first: what is infinite in one part becomes NaN in the other.
    return torch.complex(total.real + value.real, total.imag + value.imag)


def _complex_product(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # (a+bi)(c+di) by four real products, each rounded by itself.
    a, b, c, d = total.real, total.imag, value.real, value.imag
    return torch.complex(a * c - b * d, a * d + b * c)


def _divide(total: torch.Tensor, divisor: int) -> torch.Tensor:
    # The divisor is a tensor because CUDA turns a division by a Python number into a product with its
    # reciprocal; complex numbers are divided part by part because torch's complex division rounds
    # more than once.
    parts = torch.view_as_real(total) if total.is_complex() else total
    parts = parts / torch.tensor(divisor, dtype=parts.dtype, device=parts.device)
    return torch.view_as_complex(parts) if total.is_complex() else parts


_REDUCERS: dict[str, _Reducer] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": _larger,
    "min": _smaller,
}
_BOOL_REDUCERS: dict[str, _Reducer] = {"max": torch.logical_or, "min": torch.logical_and}
_COMPLEX_REDUCERS: dict[str, _Reducer] = {"sum": _complex_sum, "product": _complex_product}
