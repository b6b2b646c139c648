"""Calls of NCCL on tensors: counts, dtypes and addresses, checked before anything is started."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritondt.errors import ArgumentError

# Elements that this rank reads and writes, in counts of the call: one, or one for each rank; None for neither.
_ONE, _EACH, _NONE = "one", "each", None
_SIZES: dict[str, tuple[str | None, str | None]] = {
    "all_gather": (_ONE, _EACH),
    "reduce_scatter": (_EACH, _ONE),
    "all_reduce": (_ONE, _ONE),
    "broadcast": (_ONE, _ONE),
    "reduce": (_ONE, _ONE),
    "all_to_all": (_EACH, _EACH),
    "gather": (_ONE, _EACH),
    "scatter": (_EACH, _ONE),
    "send": (_ONE, _NONE),
    "recv": (_NONE, _ONE),
}

RawCall = tuple[str, int, int, int, str, int | str, int]
Part = tuple[int, int]


class Call(NamedTuple):
    """One call of a group; see `Communicator.group`.

    Args:
        operation: all_gather, reduce_scatter, all_reduce, broadcast, reduce, all_to_all, gather, scatter, send or recv.
        source: The contiguous tensor that this rank reads; None where it reads none.
        target: The contiguous tensor that this rank writes, of the source's dtype; None where it writes none.
        op: "sum", "product", "max", "min", "avg", or the number that `Communicator.pre_mul_sum` gives.
        peer: The root, or the rank of the other end of a message.

    >>> Call("send", torch.zeros(3), peer=1).operation
    'send'
    """

    operation: str
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    op: str | int = "sum"
    peer: int = 0


def raw_call(call: Call, num_ranks: int) -> RawCall:
    """A call by addresses, as the extension takes it; ValueError where its tensors do not fit each other.

    >>> source, target = torch.zeros(3), torch.zeros(6)
    >>> raw_call(Call("all_gather", source, target), 2)[3:]
    (3, 'float32', 'sum', 0)
    >>> raw_call(Call("all_gather", source, torch.zeros(8)), 2)
    Traceback (most recent call last):
    tritondt.errors.ArgumentError: all_gather among 2 ranks was given a source of 3 and a target of 8 elements; 3 make 6
    """
    operation, source, target, op, peer = call
    tensors = [tensor for tensor in (source, target) if tensor is not None]
    if operation not in _SIZES:
        raise ArgumentError(f"the operation {operation!r} was asked for; NCCL has {', '.join(_SIZES)}")
    if not tensors:
        raise ArgumentError(f"{operation} was given neither a source nor a target; one of them says how much is moved")
    _check_tensors(operation, tensors)
    count = _count(operation, source, target, num_ranks)
    return operation, _address(source), _address(target), count, dtype_name(tensors[0].dtype), op, peer


def _count(operation: str, source: torch.Tensor | None, target: torch.Tensor | None, num_ranks: int) -> int:
    """Elements as NCCL counts them: those of one rank."""
    counts = []
    for what, tensor, size in zip(("source", "target"), (source, target), _SIZES[operation], strict=True):
        if tensor is None or size is _NONE:
            continue
        num_parts = num_ranks if size == _EACH else 1
        if tensor.numel() % num_parts:
            raise ArgumentError(
                f"{operation} among {num_ranks} ranks was given a {what} of {tensor.numel()} elements; "
                f"{num_ranks} must divide them"
            )
        counts.append(tensor.numel() // num_parts)
    if not counts:
        raise ArgumentError(f"{operation} was given no {'source' if operation == 'send' else 'target'}")
    if len(set(counts)) > 1:
        assert source is not None
        assert target is not None
        expected = counts[0] * (num_ranks if _SIZES[operation][1] == _EACH else 1)
        raise ArgumentError(
            f"{operation} among {num_ranks} ranks was given a source of {source.numel()} and a target of "
            f"{target.numel()} elements; {source.numel()} make {expected}"
        )
    return counts[0]


def raw_parts(operation: str, tensors: Sequence[torch.Tensor]) -> list[Part]:
    """Tensors as the parts of an uneven call: addresses and numbers of elements."""
    _check_tensors(operation, tensors)
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


def dtype_of(operation: str, tensors: Sequence[torch.Tensor]) -> str:
    """The name of the dtype of tensors; ValueError where there are several."""
    found = sorted({dtype_name(tensor.dtype) for tensor in tensors})
    if len(found) != 1:
        raise ArgumentError(f"{operation} was given tensors of {' and '.join(found) or 'no dtype'}; it takes one dtype")
    return found[0]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype by the name that NCCL's calls take.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def stream_handle(stream: Any, tensor: torch.Tensor | None) -> int:
    """A stream as a number: as given, or of a torch.cuda.Stream; by default the current one of the tensor's device.

    The default for a tensor on the CPU, which only a double of NCCL takes, is the double's default stream, 0.
    """
    if stream is None:
        is_on_gpu = tensor is not None and tensor.device.type == "cuda"
        return torch.cuda.current_stream(tensor.device).cuda_stream if is_on_gpu else 0  # type: ignore[union-attr]
    return stream if isinstance(stream, int) else int(stream.cuda_stream)


def _check_tensors(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ArgumentError(
                f"{operation} was given a tensor of shape {tuple(tensor.shape)} that is not contiguous; NCCL reads and "
                "writes elements end to end"
            )
    dtype_of(operation, tensors)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
