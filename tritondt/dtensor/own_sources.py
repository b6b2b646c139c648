"""Writes from the written memory itself: by index they are refused, else what is read is what was there before.

A kernel sees that two arguments share memory, and refuses that; where the tensors had to move first, it is given copies
and cannot. By index from the tensor itself there is no defined order, which all ranks tell by the object. What two
views share follows from addresses and strides of local tensors, which are not alike on all ranks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.schema import LocalOp

# What torch (2.13) says before it writes anything.
_OVERLAPS = "input tensor and the written-to tensor refer to a single memory location"

_BY_INDEX = frozenset({
    *("aten::scatter_", "aten::scatter_add_", "aten::scatter_reduce_", "aten::put_"),
    *("aten::index_add_", "aten::index_copy_", "aten::index_reduce_", "aten::index_fill_"),
    *("aten::index_put_", "aten::_index_put_impl_"),
})  # fmt: skip


def from_others(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled call that writes by index, refused where it reads from what it writes to; others as they are."""
    if op._schema.name not in _BY_INDEX:
        return run

    def write(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        check_from_others(op, args, kwargs)
        return run(local_args, local_kwargs, args, kwargs)

    return write


def check_from_others(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises PropagationError where a write by index reads from what it writes to."""
    if op._schema.name in _BY_INDEX and any(read is args[0] for read in (*args[1:], *kwargs.values())):
        raise PropagationError(
            f"{op} would read from {args[0]._spec} while it writes to it, in an order that is not defined; read from a "
            "copy: x.clone()"
        )


def run_apart(
    local: LocalOp,
    local_args: Sequence[Any],
    local_kwargs: Mapping[str, Any],
    written: Collection[int],
    error: RuntimeError,
) -> Any:
    """The results of an operator that raised `error`, with copies of what shares memory with tensors that it writes to.

    `written` are the places of these among all tensors. Raises `error` where its reason is another one, and for what
    writes to lists: some of their tensors have been written to by then.
    """
    if _OVERLAPS not in str(error) or (local_args and isinstance(local_args[0], list | tuple)):
        raise error
    given = [*local_args, *local_kwargs.values()]
    tensors = [*tensors_in(given)]
    targets = {id(tensor): _address(tensor) for place, tensor in enumerate(tensors) if place in written}
    memory = set(targets.values())
    copies = {
        id(tensor): tensor.clone() for tensor in tensors if id(tensor) not in targets and _address(tensor) in memory
    }
    args = [_replaced(argument, copies) for argument in given]
    return local(*args[: len(local_args)], **dict(zip(local_kwargs, args[len(local_args) :], strict=True)))


def _replaced(argument: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(argument, list | tuple):
        return [_replaced(item, copies) for item in argument]
    return copies.get(id(argument), argument)


def tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All tensors among arguments and in their lists, in order."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(argument)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
