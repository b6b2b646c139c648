"""Checks of tensors, sizes and ranks, before anything is sent."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritondt.errors import LocalTensorError, TransportError, WorldError
from tritondt.sharding.spec import check_not_quantised, check_strided


def check_carried(text: object, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises TransportError where a tensor is on another device or not strided, LocalTensorError for one of no memory.

    `text` says what was asked, as all checks have it: a string, or what becomes one where it is refused.
    """
    for tensor in tensors:
        if tensor.device != device:
            raise TransportError(
                f"{text} was given a tensor on {tensor.device}; all tensors of one call are to be on the same device, "
                f"which is {device} here"
            )
        if tensor.layout is not torch.strided:
            raise TransportError(
                f"{text} was given a tensor of the layout {tensor.layout}; collectives carry torch.strided only"
            )
        if not tensor.data_ptr() and tensor.numel():
            raise LocalTensorError(
                f"{text} was given a tensor of shape {tuple(tensor.shape)} at address 0; its storage is empty, as "
                "after resize_(0), or it is of a subclass without memory: pass a tensor that holds its values"
            )


def check_tensors(text: object, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises as `check_carried`, and LocalTensorError where a tensor is not contiguous, as NCCL needs them."""
    check_carried(text, tensors, device)
    for tensor in tensors:
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


def check_dense(text: object, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises as `check_tensors`, but takes any order of dims whose elements lie without gaps."""
    check_tensors(text, [_laid_out(tensor) for tensor in tensors], device)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dims in the order of its strides."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def check_dtypes(text: object, tensors: Sequence[torch.Tensor]) -> None:
    """Raises TransportError where tensors are of several dtypes."""
    dtype = tensors[0].dtype
    if any(tensor.dtype != dtype for tensor in tensors):
        found = {tensor.dtype for tensor in tensors}
        raise TransportError(f"{text} was given tensors of {_named(found)}; all must be of one dtype")


def check_number(text: object, what: str, found: int, allowed: int) -> None:
    """Raises LocalTensorError where too few or too many of `what` were given."""
    if found != allowed:
        raise LocalTensorError(f"{text} was given {found} {what}; there must be {allowed}")


def check_sizes(text: object, what: str, found: int, expected: int, why: str) -> None:
    """Raises LocalTensorError where a tensor has another number of elements than expected."""
    if found != expected:
        raise LocalTensorError(f"{text} was given {what} of {found} elements; {why} makes {expected}")


def check_group_rank(text: object, rank: int, size: int) -> None:
    """Raises WorldError where a group of `size` ranks has no such rank."""
    if not 0 <= rank < size:
        raise WorldError(f"{text} names rank {rank} of the process group; it has ranks 0 to {size - 1}")


def check_factor(text: object, factor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Raises TransportError where a factor is not one element of the tensors' dtype on their device."""
    for tensor in tensors:
        if (factor.numel(), factor.dtype, factor.device) != (1, tensor.dtype, tensor.device):
            raise TransportError(
                f"{text} was given a factor of {factor.numel()} {factor.dtype} on {factor.device}; it must be a number "
                f"or one {tensor.dtype} on {tensor.device}"
            )


def split_sizes(text: object, what: str, tensor: torch.Tensor, sizes: Sequence[int], size: int) -> list[int]:
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


def check_whole(text: object, what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raises LocalTensorError where a tensor has not the elements of a part on each of `size` ranks."""
    if whole.numel() != part.numel() * size:
        check_sizes(text, what, whole.numel(), part.numel() * size, f"{part.numel()} on each of {size} ranks")


def check_list(
    text: object, what: str, tensors: Sequence[torch.Tensor], own: torch.Tensor, device: torch.device, size: int
) -> None:
    """Checks a list of a tensor for each rank, beside this rank's `own` tensor: their number, device and dtypes."""
    check_number(text, what, len(tensors), size)
    check_carried(text, (*tensors, own), device)
    check_dtypes(text, (*tensors, own))


def check_rooted(
    text: object,
    what: str,
    lists: Sequence[Sequence[torch.Tensor]],
    own: torch.Tensor,
    device: torch.device,
    ranks: tuple[int, int, int],
) -> Sequence[torch.Tensor]:
    """The list that the root alone was given, a tensor for each rank, checked; an empty one on other ranks.

    `ranks` are this rank, their number and the root.
    """
    rank, size, root = ranks
    check_group_rank(text, root, size)
    if rank != root:
        check_number(text, f"lists of {what} on a rank that is not the root", len(lists), 0)
        check_carried(text, [own], device)
        return []
    check_number(text, f"lists of {what} on the root", len(lists), 1)
    check_list(text, what, lists[0], own, device, size)
    check_sizes(text, "a tensor", own.numel(), lists[0][root].numel(), f"the root's own among the {what}")
    return lists[0]


def _named(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
