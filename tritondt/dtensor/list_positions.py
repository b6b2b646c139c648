"""Lists of tensors that share memory: what an operator writes at one position it reads at a later one.

On one device an operator on lists goes through their positions in order. Where arguments have to move, each is replaced
by a tensor of its own, and a write to one would not be seen at the next.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.dtensor.writes import memory_of


@lru_cache(maxsize=1024)
def written_lists(op: OpOverload) -> tuple[int, ...]:
    """The places of the lists whose tensors an operator writes to position by position; none of other operators.

    >>> written_lists(torch.ops.aten._foreach_addcmul_.Scalar), written_lists(torch.ops.aten.add_.Tensor)
    ((0,), ())
    """
    if not op._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
        return ()
    return tuple(
        place
        for place, declared in enumerate(op._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write and not declared.is_out
    )


def share_memory(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether what a call writes at one position of its lists has the memory of a tensor at another, on all ranks.

    False for operators that take no lists.
    """
    places = written_lists(op)
    if not places or len(args) <= places[0] or len(args[places[0]]) < 2:
        return False
    holders: dict[int, int] = {}
    shared = set[int]()
    for items in filter(_is_list_of_tensors, args):
        for position, tensor in enumerate(items):
            for key in _keys(tensor):
                if holders.setdefault(key, position) != position:
                    shared.add(key)
    return bool(shared) and any(key in shared for place in places for tensor in args[place] for key in _keys(tensor))


def run_by_position(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs an operator that writes to lists on one position of them after another."""
    for position in range(len(args[written_lists(op)[0]])):
        op(*(at_position(item, position) for item in args), **kwargs)


def in_order(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled call of an operator on lists whose tensors move, by position where these share memory."""

    def run_in_order(
        local_args: Sequence[Any], local_kwargs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if share_memory(op, args):
            return run_by_position(op, args, kwargs)
        return run(local_args, local_kwargs, args, kwargs)

    return run_in_order


def at_position(argument: Any, position: int) -> Any:
    """What an argument has for one position: an item of a list, or one number of a tensor with one for each."""
    if isinstance(argument, torch.Tensor) and argument.ndim:
        return argument[position : position + 1]
    return [argument[position]] if isinstance(argument, list | tuple) and argument else argument


def _is_list_of_tensors(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and bool(argument) and isinstance(argument[0], torch.Tensor)


def _keys(tensor: torch.Tensor) -> Sequence[int]:
    return tuple(map(id, memory_of(tensor))) if hasattr(tensor, "_spec") else (id(tensor),)
