"""Operators that users register for sharded tensors, and for those of one class of specs."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils._pytree import tree_leaves

from tritondt.errors import ArgumentError, PropagationError
from tritondt.errors.arguments import first
from tritondt.sharded.specs import ShardingSpec
from tritondt.sharded.tensor import ShardedTensor

# (types, args, kwargs, process_group), as __torch_function__ has them, with the group of the first sharded tensor.
Implementation = Callable[[Any, Any, Any, Any], Any]
# Functions of torch have no common type.
Function = Callable[..., Any]

_of_all: dict[Function, Implementation] = {}
_of_specs: dict[tuple[type[ShardingSpec], Function], Implementation] = {}


@first("func")
def custom_sharded_op_impl(func: Function) -> Callable[[Implementation], Implementation]:
    """Decorator that registers a function `(types, args, kwargs, process_group)` for calls of `func` on sharded
    tensors; it replaces the package's own.

    Raises TypeError for a function with other parameters. A call without sharded tensors is a TypeError, one with
    tensors of several groups a PropagationError (RuntimeError).

    >>> import torch
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec, ones
    >>> @custom_sharded_op_impl(torch.special.i0)
    ... def i0(types, args, kwargs, process_group):
    ...     return [shard.tensor.shape for shard in args[0].local_shards()]
    >>> run_ranks(1, lambda rank: torch.special.i0(ones(ChunkShardingSpec(0, ["rank:0/cpu"]), 2)))
    [[torch.Size([2])]]
    """
    return lambda function: _register(_of_all, func, func, function)


@first("sharding_spec_class", "func")
def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Function
) -> Callable[[Implementation], Implementation]:
    """Decorator like `custom_sharded_op_impl`, for tensors whose spec is of the class `sharding_spec_class`.

    Raises TypeError as that one does.

    >>> import torch
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec, ones
    >>> @custom_sharding_spec_op(ChunkShardingSpec, torch.special.i1)
    ... def i1(types, args, kwargs, process_group):
    ...     return args[0].sharding_spec().dim
    >>> run_ranks(1, lambda rank: torch.special.i1(ones(ChunkShardingSpec(1, ["rank:0/cpu"]), 2, 3)))
    [1]
    """
    return lambda function: _register(_of_specs, (sharding_spec_class, func), func, function)


def _register(table: dict[Any, Implementation], key: Any, func: Function, function: Implementation) -> Implementation:
    parameters = inspect.signature(function).parameters
    if len(parameters) != 4:
        raise ArgumentError(
            f"an operator of sharded tensors takes (types, args, kwargs, process_group), got a function of "
            f"({', '.join(parameters)})"
        )

    @wraps(function)
    def checked(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        check_group(func, args, kwargs)
        return function(types, args, kwargs, process_group)

    table[key] = checked
    return checked


def registered(func: Function, tensor: ShardedTensor) -> Implementation | None:
    """Implementation registered for a function of torch: for all tensors, or else for the kind of the tensor's spec."""
    found = _of_all.get(func)
    return _of_specs.get((type(tensor._sharding_spec), func)) if found is None else found


def tensors_among(args: Any, kwargs: Any) -> list[ShardedTensor]:
    """Sharded tensors among arguments, in order."""
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedTensor)]


def check_group(func: Function, args: Any, kwargs: Any) -> None:
    """TypeError without sharded tensors among the arguments, PropagationError where these are of several groups."""
    found = tensors_among(args, kwargs)
    name = name_of(func)
    if not found:
        raise ArgumentError(f"{name} of sharded tensors was called without any; got {args} and {kwargs}")
    for tensor in found[1:]:
        if tensor._mesh is not found[0]._mesh:
            raise PropagationError(
                f"{name} takes sharded tensors of one group, got {found[0]._mesh.ranks} and {tensor._mesh.ranks}; "
                "gather or make them on one group"
            )


def name_of(func: Function) -> str:
    """Name of a function of torch, for errors."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else str(name)
