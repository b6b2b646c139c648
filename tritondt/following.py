"""Views that had to move: copies that stand for a view of another tensor, and follow it.

On one device a view sees what is written to its tensor. Where the shards of a view are not the tensor's own, the view
is a copy of them; it is of a subclass whose `_local_tensor` looks whether the tensor was written to since, and then
copies again. Writing to such a view would not reach the tensor, and is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError

_ORIGIN = "_tritondt_origin"
_NO_BACKWARD = -1

Versions = tuple[int, ...]


class _Origin(NamedTuple):
    """Of what a tensor is a view, when it was copied, and how it is copied again: the result at `place` of a call."""

    base: Any
    base_local: torch.Tensor
    versions: Versions
    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    place: int | None


@lru_cache(maxsize=64)
def following_class(tensor_class: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of tensors of `tensor_class` that follow another."""
    slot: Any = tensor_class._local_tensor  # type: ignore[attr-defined]
    wrap: Any = tensor_class
    dispatch_any: Callable[..., Any] = tensor_class.__torch_dispatch__

    def current(tensor: Any) -> torch.Tensor:
        """The local tensor, copied again where the base was written to; a collective call then."""
        origin: _Origin = tensor.__dict__[_ORIGIN]
        base_local = origin.base._local_tensor
        if base_local is not origin.base_local or versions(origin.base, base_local) != origin.versions:
            results = dispatch_any(origin.op, (), tuple(origin.args), dict(origin.kwargs))
            renewed = results if origin.place is None else results[origin.place]
            slot.__set__(tensor, renewed._local_tensor)
            tensor.__dict__[_ORIGIN] = origin._replace(
                base_local=base_local, versions=versions(origin.base, base_local)
            )
        local: torch.Tensor = slot.__get__(tensor)
        return local

    def dispatch(
        op: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuses to write to a copy; a view of a copy follows it in turn."""
        given = {} if kwargs is None else kwargs
        for is_write, argument in _aliased(op, args, given):
            if not isinstance(argument, made):
                continue
            if is_write:
                raise PropagationError(_refusal(op, argument))
            return followed(dispatch_any(op, types, args, given), op, args, given)
        return dispatch_any(op, types, args, given)

    def settled(tensor: Any) -> torch.Tensor:
        """The tensor as it is now, which follows nothing."""
        found: torch.Tensor = wrap(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)
        return found

    made: type[torch.Tensor] = type(
        f"Following{tensor_class.__name__}",
        (tensor_class,),
        {
            "__slots__": (),
            "__module__": tensor_class.__module__,
            "__torch_dispatch__": staticmethod(dispatch),
            "_local_tensor": property(current, slot.__set__),
            # What is not a leaf is left for the class itself to refuse.
            "__deepcopy__": lambda it, memo: wrap.__deepcopy__(settled(it) if it.is_leaf else it, memo),
            "__reduce_ex__": lambda it, protocol: settled(it).__reduce_ex__(protocol),
        },
    )
    return made


def versions(distributed: Any, local: torch.Tensor) -> Versions:
    """How often a tensor was written to: by operators on it, and on its local tensor.

    A view counts operators together with what it is a view of, writes to local tensors apart.
    """
    base = distributed._base
    counted = (distributed, local) if base is None else (distributed, local, base._local_tensor)
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in counted)


def followed(results: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a view of the first argument, made to follow it.

    In a backward pass they stay what they are: nobody else knows what autograd takes views of.
    """
    if torch._C._current_graph_task_id() != _NO_BACKWARD:
        return results
    base, several = args[0], isinstance(results, list | tuple)
    local = base._local_tensor
    origin = _Origin(base, local, versions(base, local), op, tuple(args), dict(kwargs), None)
    for place, result in enumerate(results if several else (results,)):
        if _ORIGIN not in result.__dict__:
            kind: Any = type(result)
            result.__class__ = following_class(kind)
        result.__dict__[_ORIGIN] = origin._replace(place=place if several else None)
    return results


def _aliased(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[bool, Any]]:
    """The arguments that a call writes to or gives aliases of, and which of both."""
    for place, declared in enumerate(op._schema.arguments):
        if declared.alias_info is None:
            continue
        given = args[place] if place < len(args) else kwargs.get(declared.name)
        for argument in given if isinstance(given, list | tuple) else (given,):
            yield declared.alias_info.is_write, argument


def _refusal(op: OpOverload, tensor: Any) -> str:
    origin: _Origin = tensor.__dict__[_ORIGIN]
    return (
        f"{op} would write to a view by {origin.op} of {origin.base._spec} whose elements had to move, and would not "
        "reach what it is a view of; write to that, or to a copy: view.clone()"
    )
