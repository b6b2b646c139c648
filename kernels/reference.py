"""The reference of every kernel in plain torch, which the others equal bit for bit.

The arithmetic is spelled out where torch leaves it open. On CPU, `torch.mul` of complex numbers and
`torch.maximum` of -0.0 and 0.0 give other bits in the last few elements of a tensor than in the rest
(torch 2.13), so neither is used here; nor is `torch.add` of complex numbers, which mixes their parts.
"""

import math
from collections.abc import Callable, Sequence

import torch

from tritondt.kernels.arguments import check_tensors
from tritondt.kernels.boxes import CastBox, CopyBox, ReduceBox
from tritondt.kernels.cast_bits import FP8_DTYPES, bits_of, cast, keep_nan

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
# What may become what.
_CASTS = {
    "cast": (_FLOATS, _FLOATS),
    "quantize": (_EXACT_IN_FLOAT32, FP8_DTYPES),
    "dequantize": (FP8_DTYPES, _EXACT_IN_FLOAT32),
}
_SMALLEST_SCALE = 2.0**-126
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
    check_tensors(sources, targets, boxes)
    for box in boxes:
        source, target = (
            _byte_view(tensor, offset, box.itemsize, box.lengths, strides)
            for tensor, offset, strides in (
                (sources[box.source], box.source_offset, box.source_strides),
                (targets[box.target], box.target_offset, box.target_strides),
            )
        )
        target.copy_(source)


def cast_boxes(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], boxes: Sequence[CastBox]) -> None:
    """Copies every box from its source's dtype to its target's, rounding to nearest, ties to even.

    The dtypes are float32, float64, bfloat16 and float16, and differ. As in torch's `.to()`, what is too
    large becomes an infinity, subnormals are kept, and float64 goes to the half types by way of float32.
    A NaN becomes quiet and keeps its sign and what fits of its payload; in bfloat16 it is 0x7fc0, and from
    bfloat16 to float32 all its bits are kept.

    Example: 2 rows of a 2x3 tensor to bfloat16, transposed.

    >>> source = torch.tensor([[1.0, 1.00390625, 65535.0], [float("nan"), 1.01171875, 3.4e38]])
    >>> target = torch.full((7,), -1.0, dtype=torch.bfloat16)
    >>> cast_boxes([source], [target], [CastBox(0, 0, 0, 1, (2, 3), (3, 1), (1, 2))])
    >>> target.tolist()
    [-1.0, 1.0, nan, 1.0, 1.015625, 65536.0, inf]
    """
    check_tensors(sources, targets, boxes)
    for box in boxes:
        _check_dtypes("cast", sources[box.source].dtype, targets[box.target].dtype)
    for box in boxes:
        target = targets[box.target]
        source = _view(sources[box.source], box.source_offset, box.lengths, box.source_strides)
        _write(target, box, cast(source, target.dtype))


def quantize_boxes(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    scales: torch.Tensor,
    boxes: Sequence[CastBox],
) -> None:
    """Casts every box to 8 bits with a scale of its own; element = fp8(x / scale), rounded once, to nearest even.

    `scales` (float32, one per box) is written: the smallest power of two, 2**-126 or more, with which the
    box's largest finite magnitude divided by it is at most the format's largest value (448 of
    float8_e4m3fn, 57344 of float8_e5m2); 1.0 where that magnitude is 0 or there is no element. Sources
    are float32, bfloat16 or float16. Division by such a scale is exact but for quotients so small that
    they are 0 in fp8; zeros keep their signs. Infinities stay infinite in e5m2; in e4m3fn, which has
    none, they become the largest value, as in torch 2.13 (NaN in older ones). A NaN is 0x7f with its
    sign.

    Example: 500 / 2 lies between 240 and 256, 0.3 / 2 between 0.140625 and 0.15625.

    >>> source = torch.tensor([1.0, -3.0, 500.0, 0.3, 0.0, 0.0])
    >>> target = torch.zeros(6).to(torch.float8_e4m3fn)
    >>> scales = torch.empty(2)
    >>> boxes = [CastBox(0, 0, 0, 0, (4,), (1,), (1,)), CastBox(0, 0, 4, 4, (2,), (1,), (1,))]
    >>> quantize_boxes([source], [target], scales, boxes)
    >>> target.float().tolist(), scales.tolist()
    ([0.5, -1.5, 256.0, 0.15625, 0.0, 0.0], [2.0, 1.0])
    """
    check_tensors(sources, targets, boxes)
    _check_scales(scales, len(boxes))
    for box in boxes:
        _check_dtypes("quantize", sources[box.source].dtype, targets[box.target].dtype)
    for i, box in enumerate(boxes):
        target = targets[box.target]
        x = _view(sources[box.source], box.source_offset, box.lengths, box.source_strides)
        x = cast(x, torch.float32)
        largest = torch.finfo(target.dtype).max
        scales[i] = scale = _scale(x, largest)
        quotient = keep_nan(x, x / scale)
        if target.dtype == torch.float8_e4m3fn:
            quotient = keep_nan(x, quotient.clamp(-largest, largest))
        _write(target, box, cast(quotient, target.dtype))


def dequantize_boxes(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    scales: torch.Tensor,
    boxes: Sequence[CastBox],
) -> None:
    """Casts every box back from 8 bits; element = dtype(fp8 * scale), multiplied in float32.

    `scales` (float32, one per box) is read. Targets are float32, bfloat16 or float16. With the scales of
    `quantize_boxes` the product is exact, but where rounding to fp8 went beyond the dtype's largest
    value: it is an infinity then. A NaN is cast as if its scale were 1; one that the product makes is
    that of `float("nan")`.

    Example: what the example of `quantize_boxes` made.

    >>> source = torch.tensor([0.5, -1.5, 256.0, 0.15625, 0.0, 0.0]).to(torch.float8_e4m3fn)
    >>> target = torch.empty(6, dtype=torch.float16)
    >>> boxes = [CastBox(0, 0, 0, 0, (4,), (1,), (1,)), CastBox(0, 0, 4, 4, (2,), (1,), (1,))]
    >>> dequantize_boxes([source], [target], torch.tensor([2.0, 1.0]), boxes)
    >>> target.tolist()
    [1.0, -3.0, 512.0, 0.3125, 0.0, 0.0]
    """
    check_tensors(sources, targets, boxes)
    _check_scales(scales, len(boxes))
    for box in boxes:
        _check_dtypes("dequantize", sources[box.source].dtype, targets[box.target].dtype)
    for i, box in enumerate(boxes):
        source, target = sources[box.source], targets[box.target]
        # As bytes, for torch does not flip 8-bit floats.
        codes = _view(source.view(torch.uint8), box.source_offset, box.lengths, box.source_strides)
        x = cast(codes.view(source.dtype), torch.float32)
        product = x * scales[i]
        defined = torch.where(product.isnan(), float("nan"), product)
        _write(target, box, cast(keep_nan(x, defined), target.dtype))


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
    check_tensors(sources, targets, boxes)
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
    """View of a box of `x`; a copy where a stride is negative, which no torch view can have."""
    backward_dims = [dim for dim, stride in enumerate(strides) if stride < 0]
    start = x.storage_offset() + offset
    if 0 not in lengths:
        start += sum((lengths[dim] - 1) * strides[dim] for dim in backward_dims)
    view = x.as_strided(lengths, [abs(stride) for stride in strides], start)
    return view.flip(backward_dims) if backward_dims else view


def _write(target: torch.Tensor, box: CastBox, values: torch.Tensor) -> None:
    """Writes values as integers, for a copy of floats need not keep the bits of a NaN."""
    view = _view(bits_of(target), box.target_offset, box.lengths, box.target_strides)
    view.copy_(bits_of(values))


def _scale(x: torch.Tensor, largest: float) -> float:
    """Least power of two that brings the finite elements of a float32 box to magnitudes of `largest` or less."""
    finite = x[x.isfinite()]
    largest_magnitude = float(finite.abs().max()) if finite.numel() else 0.0
    if largest_magnitude == 0.0:
        return 1.0
    fraction, exponent = math.frexp(largest_magnitude / largest)  # fraction is in [0.5, 1)
    return max(math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent), _SMALLEST_SCALE)


def _check_dtypes(verb: str, source: torch.dtype, target: torch.dtype) -> None:
    sources, targets = _CASTS[verb]
    if source in sources and target in targets and source != target:
        return
    allowed = (
        f"two different ones of {_names(sources)}" if sources == targets else f"{_names(sources)} to {_names(targets)}"
    )
    raise ValueError(f"{verb} from {source} to {target}; allowed are {allowed}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_scales(scales: torch.Tensor, num_boxes: int) -> None:
    if scales.dtype != torch.float32 or scales.shape != (num_boxes,):
        raise ValueError(
            f"scales are {scales.dtype} of shape {tuple(scales.shape)} for {num_boxes} boxes; "
            f"they are torch.float32 of shape ({num_boxes},), one per box"
        )


def _byte_view(
    x: torch.Tensor, offset: int, itemsize: int, lengths: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """View of a box of `x` as bytes with a last dim of `itemsize`, so that no alignment is asked of `x`."""
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
