"""Checks of tensors and boxes for the functions that take tensors, before anything is written."""

from collections.abc import Iterator, Sequence

import torch

from tritondt.kernels.bounds import Box, check_boxes
from tritondt.kernels.boxes import CopyBox


def check_tensors(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], boxes: Sequence[Box]) -> None:
    """Raises ValueError where a box leaves its tensors, or an element is written twice."""
    counts_bytes = bool(boxes) and isinstance(boxes[0], CopyBox)
    check_boxes(boxes, *([_reach(x, counts_bytes) for x in tensors] for tensors in (sources, targets)))


def common_device(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.device:
    """The device of all tensors, the CPU where there are none; ValueError where there are two."""
    first_name, first = "", torch.device("cpu")
    for name, tensor in _named(sources, targets):
        if not first_name:
            first_name, first = name, tensor.device
        elif tensor.device != first:
            raise ValueError(
                f"{first_name} lies on {first} and {name} on {tensor.device}; all tensors must lie on one device"
            )
    return first


def common_dtype(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The dtype of all tensors, None where there are none; ValueError where there are two.

    >>> common_dtype([torch.zeros(1)], [torch.zeros(1, dtype=torch.int8)])
    Traceback (most recent call last):
    ValueError: source 0 is torch.float32 and target 0 is torch.int8; all must have one dtype
    """
    first_name, first = "", None
    for name, tensor in _named(sources, targets):
        if first is None:
            first_name, first = name, tensor.dtype
        elif tensor.dtype != first:
            raise ValueError(f"{first_name} is {first} and {name} is {tensor.dtype}; all must have one dtype")
    return first


def _reach(x: torch.Tensor, counts_bytes: bool) -> int:
    """Elements, or bytes, from the first element of a tensor to its last."""
    if x.numel() == 0:
        return 0
    reach = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return reach * x.element_size() if counts_bytes else reach


def _named(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for side, tensors in (("source", sources), ("target", targets)):
        for number, tensor in enumerate(tensors):
            yield f"{side} {number}", tensor
