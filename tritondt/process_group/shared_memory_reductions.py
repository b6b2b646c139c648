"""Reductions of torch.distributed on the CPU that run between ranks that read each other's memory.

Each function takes this rank's number, the group's size and torch's arguments, and gives what is to run; None where
Gloo reduces, or refuses to.
"""

from collections.abc import Hashable
from typing import Any

import torch

from tritondt.process_group import shared_memory_programs as programs
from tritondt.process_group.naming import number_of, op_name, text_of
from tritondt.process_group.shared_memory_programs import Reduction
from tritondt.process_group.shared_memory_steps import Call, Find, Lists, Step, Tensors, call_of, meet
from tritondt.process_group.staging import NewCopies, all_readable, in_place, readable, writable

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BITWISE = ("band", "bor", "bxor")
# The extension's name of torch's, by dtype. Of other dtypes and reductions Gloo decides: of a mean of integers, say.
# Complex numbers are taken apart by torch beforehand.
_OPS: dict[torch.dtype, dict[str, str]] = {
    **{key: {op: op for op in ("sum", "product", "min", "max", *_BITWISE)} for key in _INTEGERS},
    **{key: {"avg": "sum", **{op: op for op in ("sum", "product", "min", "max")}} for key in _FLOATS},
    torch.bool: {"sum": "bor", "product": "band", "min": "band", "max": "bor", **{op: op for op in _BITWISE}},
}
_found: dict[Hashable, Reduction | None] = {}


def reduction_of(dtype: torch.dtype, op: Any, size: int) -> Reduction | None:
    """The reduction of elements of a dtype by torch's `op` on `size` ranks; None where Gloo decides.

    >>> import torch.distributed as dist
    >>> reduction_of(torch.bfloat16, dist.ReduceOp.AVG, 4)
    Reduction(dtype='bfloat16', op='sum', divisor=4, itemsize=2)
    """
    key = (dtype, number_of(op), size)
    if key not in _found:
        asked = op_name(op)
        name = _OPS.get(dtype, {}).get(asked)
        divisor = size if asked == "avg" else 1
        _found[key] = None if name is None else Reduction(text_of(dtype), name, divisor, dtype.itemsize)
    return _found[key]


def _all_reduce(own: int, size: int, tensors: Tensors, opts: Any) -> Call | None:
    if len(tensors) != 1:
        return None
    step = _reduced(size, tensors[0], opts.reduceOp)
    return None if step is None else Call((step,), tensors)


def _all_reduce_coalesced(own: int, size: int, tensors: Tensors, opts: Any) -> Call | None:
    # Those without elements are so on all ranks, and have no step.
    return call_of([_reduced(size, tensor, opts.reduceOp) for tensor in tensors if tensor.numel()], tensors)


def _reduced(size: int, tensor: torch.Tensor, op: Any) -> Step | None:
    reduction, numel = reduction_of(tensor.dtype, op, size), tensor.numel()
    copies: NewCopies = []
    memory = None if reduction is None or numel == 0 else in_place(tensor, copies)
    if memory is None:
        return None
    return Step((programs.all_reduce, None, numel, reduction), (memory,), (memory,), copies)


def _reduce(own: int, size: int, tensors: Tensors, opts: Any) -> Call | None:
    root = opts.rootRank
    if len(tensors) != 1 or opts.rootTensor != 0 or not 0 <= root < size:
        return None
    tensor = tensors[0]
    copies: NewCopies = []
    reduction, numel = reduction_of(tensor.dtype, opts.reduceOp, size), tensor.numel()
    memory = None if reduction is None or numel == 0 else in_place(tensor, copies)
    if memory is None:
        return None
    written = copies if own == root else ()
    return Call((Step((programs.one_shot, None, numel, reduction, root), (memory,), (memory,), written),), tensors)


def _reduce_scatter_base(own: int, size: int, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Call | None:
    step = _scattered(own, size, output, given, opts.reduceOp)
    return None if step is None else Call((step,), (output,))


def _reduce_scatter_coalesced(own: int, size: int, outputs: Tensors, inputs: Tensors, opts: Any) -> Call | None:
    if len(outputs) != len(inputs):
        return None
    pairs = [pair for pair in zip(outputs, inputs, strict=True) if any(each.numel() for each in pair)]
    return call_of([_scattered(own, size, *pair, opts.reduceOp) for pair in pairs], outputs)


def _scattered(own: int, size: int, output: torch.Tensor, given: torch.Tensor, op: Any) -> Step | None:
    if given.numel() != output.numel() * size or given.dtype != output.dtype:
        return None
    reduction, whole, num_bytes = reduction_of(output.dtype, op, size), readable(given), output.nbytes
    if reduction is None or whole is None or num_bytes == 0:
        return None
    key = (programs.reduce_scatter_even, None, num_bytes, reduction)
    return _reduced_piece(key, (0, own * num_bytes), [whole], output)


def _reduce_scatter(own: int, size: int, outputs: Tensors, inputs: Lists, opts: Any) -> Call | None:
    if len(outputs) != 1 or len(inputs) != 1 or len(inputs[0]) != size:
        return None
    output, found = outputs[0], all_readable(inputs[0])
    if found is None or any(each.dtype != output.dtype for each in found):
        return None
    reduction = reduction_of(output.dtype, opts.reduceOp, size)
    pieces = tuple((number, 0, each.nbytes) for number, each in enumerate(found))
    if reduction is None or pieces[own][2] != output.nbytes or not any(piece[2] for piece in pieces):
        return None
    step = _reduced_piece((programs.reduce_scatter, None, pieces, reduction), (own, 0), found, output)
    return None if step is None else Call((step,), outputs)


def _reduced_piece(
    key: tuple[Any, ...], piece: tuple[int, int], sources: list[torch.Tensor], output: torch.Tensor
) -> Step | None:
    """The step that reduces this rank's piece, which begins in a source at a byte, to `output`, maybe the piece."""
    copies: NewCopies = []
    part = writable(output, copies)
    if part is None:
        return None
    tensor, start = piece
    is_piece = part.data_ptr() == sources[tensor].data_ptr() + start
    for number, each in enumerate(sources):
        if (not is_piece or number != tensor) and meet(each, part):  # which later rounds would read
            copies.append((part, torch.empty_like(part)))
            part = copies[-1][1]
            break
    return Step(key, sources, (part,), copies)


# By the name of the method of torch's group over Gloo.
REDUCTIONS: dict[str, Find] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
}
