"""Checks of tensors, sizes and ranks, before anything is sent."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritondt.errors import LocalTensorError, TransportError, WorldError
from tritondt.sharding.spec import check_not_quantised, check_strided


def check_tensors(text: str, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises TransportError where NCCL cannot carry a tensor, LocalTensorError where one is not contiguous."""
    for tensor in tensors:
        if tensor.device != device:
            raise TransportError(
                f"{text} was given a tensor on {tensor.device}; NCCL carries tensors on {device} here, and all of one "
                "call are to be on the same device"
            )
        if tensor.layout is not torch.strided:
            raise TransportError(
                f"{text} was given a tensor of the layout {tensor.layout}; NCCL carries torch.strided only"
            )
        if tensor.numel() and not tensor.data_ptr():
            raise LocalTensorError(
                f"{text} was given a tensor of shape {tuple(tensor.shape)} at address 0; its storage is empty, as "
                "after resize_(0), or it is of a subclass without memory: pass a tensor that holds its values"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise LocalTensorError(f"{text} was given a view that only says conjugated or negated; pass .clone() of it")
        if not tensor.is_contiguous():
            raise LocalTensorError(
                f"{text} was given a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}, which is "
                "not contiguous; pass .contiguous() to be sent, and a contiguous tensor to be written"
            )


def check_plain_dtypes(tensors: Sequence[torch.Tensor], describe: Callable[..., str], *arguments: Any) -> None:
    """Raises LocalTensorError for quantised tensors, TransportError for nested ones.

    `describe` says of `arguments` what was asked.
    """
    for tensor in tensors:
        if tensor.is_nested:
            check_strided(describe(*arguments), tensor)
        if tensor.is_quantized:
            check_not_quantised(describe(*arguments), tensor.dtype)


def check_dense(text: str, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises as `check_tensors`, but takes any order of dims whose elements lie without gaps."""
    check_tensors(text, [_laid_out(tensor) for tensor in tensors], device)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dims in the order of its strides."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def check_dtypes(text: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises TransportError where tensors are of several dtypes."""
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1:
        raise TransportError(f"{text} was given tensors of {_named(found)}; all must be of one dtype")


def check_number(text: str, what: str, found: int, allowed: int) -> None:
    """Raises LocalTensorError where too few or too many of `what` were given."""
    if found != allowed:
        raise LocalTensorError(f"{text} was given {found} {what}; there must be {allowed}")


def check_sizes(text: str, what: str, found: int, expected: int, why: str) -> None:
    """Raises LocalTensorError where a tensor has another number of elements than expected."""
    if found != expected:
        raise LocalTensorError(f"{text} was given {what} of {found} elements; {why} makes {expected}")


def check_group_rank(text: str, rank: int, size: int) -> None:
    """Raises WorldError where a group of `size` ranks has no such rank."""
    if not 0 <= rank < size:
        raise WorldError(f"{text} names rank {rank} of the process group; it has ranks 0 to {size - 1}")


def check_factor(text: str, factor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Raises TransportError where a factor is not one element of the tensors' dtype on their device."""
    for tensor in tensors:
        if (factor.numel(), factor.dtype, factor.device) != (1, tensor.dtype, tensor.device):
            raise TransportError(
                f"{text} was given a factor of {factor.numel()} {factor.dtype} on {factor.device}; it must be a number "
                f"or one {tensor.dtype} on {tensor.device}"
            )


def split_sizes(text: str, what: str, tensor: torch.Tensor, sizes: Sequence[int], size: int) -> list[int]:
    """Elements of `tensor` for each rank, by its first dim: as given, or equal parts.

    >>> split_sizes("all_to_all", "input", torch.zeros(5, 2), [1, 4], 2)
    [2, 8]
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % size:
            raise LocalTensorError(
                f"{text} was given an {what} of {rows} rows without split sizes; {size} ranks must divide them"
            )
        sizes = [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise LocalTensorError(
            f"{text} was given {what} split sizes {list(sizes)}; they must be {size} sizes that make the {rows} rows"
        )
    row = math.prod(tensor.shape[1:])
    return [length * row for length in sizes]


def check_parts(kind: str, describe: Callable[..., str], arguments: tuple[Any, ...], size: int) -> None:
    """Raises LocalTensorError for parts of an all-to-all that do not make its tensors, which Gloo sees in wait() only.

    `describe` says of `arguments`, those of torch's method `kind`, what was asked.
    """
    if kind == "alltoall":
        outputs, inputs, *_ = arguments
        check_number(describe(*arguments), "inputs", len(inputs), size)
        check_number(describe(*arguments), "outputs", len(outputs), size)
    elif kind == "alltoall_base":
        output, given, output_rows, input_rows, *_ = arguments
        split_sizes(describe(*arguments), "input", given, input_rows, size)
        split_sizes(describe(*arguments), "output", output, output_rows, size)


def _named(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
