"""Writes from the written memory itself: by index they are refused, else what is read is what was there before.

A kernel sees that two arguments share memory, and refuses them; where the tensors had to move first, it is given copies
and cannot see that. A write by index from the tensor itself has no defined order, and all ranks recognize it by the
object. The elements that two views share follow from addresses and strides of local tensors, which are not alike on all
ranks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.dtensor.list_positions import at_position
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

    `written` are the places of these among all tensors. Raises `error` where its reason is another one.
    """
    if _OVERLAPS not in str(error):
        raise error
    if local_args and isinstance(local_args[0], list | tuple):
        return _run_positions_apart(local, local_args, local_kwargs, error)
    given = [*local_args, *local_kwargs.values()]
    tensors = [*tensors_in(given)]
    targets = {id(tensor): _address(tensor) for place, tensor in enumerate(tensors) if place in written}
    memory = set(targets.values())
    copies = {
        id(tensor): tensor.clone() for tensor in tensors if id(tensor) not in targets and _address(tensor) in memory
    }
    args = [_replaced(argument, copies) for argument in given]
    return local(*args[: len(local_args)], **dict(zip(local_kwargs, args[len(local_args) :], strict=True)))


def _run_positions_apart(
    local: LocalOp, local_args: Sequence[Any], local_kwargs: Mapping[str, Any], error: RuntimeError
) -> None:
    """Writes to the first list from the position on that torch refused; those before are written to by then."""
    written, *others = local_args
    lists = [items for items in others if isinstance(items, list | tuple) and [*tensors_in(items)]]
    pairs = ((place, own, items[place]) for place, own in enumerate(written) for items in lists)
    refused = (place for place, own, other in pairs if _overlap_in_part(own, other))
    first = next(refused, None)
    if first is None:
        raise error
    for place in range(first, len(written)):
        read = [at_position(argument, place) for argument in others]
        memory = _address(written[place])
        copies = {id(tensor): tensor.clone() for tensor in tensors_in(read) if _address(tensor) == memory}
        local([written[place]], *(_replaced(argument, copies) for argument in read), **local_kwargs)


def _overlap_in_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether torch tells that a tensor has some of the other's memory, in another place."""
    if one is other or not (one.numel() and other.numel()) or _address(one) != _address(other):
        return False
    if not (_fills_its_memory(one) and _fills_its_memory(other)):
        return False
    starts = [tensor.data_ptr() for tensor in (one, other)]
    ends = [start + tensor.numel() * tensor.itemsize for start, tensor in zip(starts, (one, other), strict=True)]
    if starts[0] == starts[1] and ends[0] == ends[1]:
        return one.stride() != other.stride()
    return starts[0] < ends[1] and starts[1] < ends[0]


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether elements lie beside each other, none of them twice: of others torch does not tell what they share."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and step != expected:
            return False
        expected *= length
    return True


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
