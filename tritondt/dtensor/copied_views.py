"""Views that had to move: copies that stand for a view of another tensor, and follow it.

On one device a view sees what is written to its tensor. Where the shards of a view are not the tensor's own, the view
is a copy of them; it is of a subclass whose `_local_tensor` looks whether the tensor was written to since, and then
copies again. What is written to such a view is written to the tensor as well, where there is an operator that does so,
and refused elsewhere.

Copying is a collective call: whether to copy follows from how many operators have written to the tensor, which all
ranks know alike. What one rank writes to its local tensor the others cannot know; it is refused when it is found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt.errors import PropagationError
from tritondt.ops.propagation.fallback import admitted

aten = torch.ops.aten

_ORIGIN = "_tritondt_origin"
_INFERENCE = -1

# How often a tensor was written to: by operators on it, which all ranks know; then on its local tensor.
Versions = tuple[int, ...]

# What writes a view's elements into the tensor that it is a view of, with the arguments of the view after both.
_SCATTER_OF: Mapping[OpOverload, OpOverload] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
# Views of all elements in the same order.
_RESHAPES = frozenset({
    *(aten.view.default, aten._reshape_alias.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
})  # fmt: skip


class _Origin(NamedTuple):
    """Of what a tensor is a view, when it was copied, and how it is copied again: the result at `place` of a call.

    A view of a copy may share the copy's memory: it is an alias then.
    """

    base: Any
    base_local: torch.Tensor
    versions: Versions
    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    place: int | None
    is_alias: bool = False


@lru_cache(maxsize=64)
def copied_view_class(tensor_class: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of tensors of `tensor_class` that follow another."""
    slot: Any = tensor_class._local_tensor  # type: ignore[attr-defined]
    wrap: Any = tensor_class
    dispatch_any: Callable[..., Any] = tensor_class.__torch_dispatch__

    def refreshed(tensor: Any) -> torch.Tensor:
        """The local tensor, copied again where operators have written to the base; a collective call then."""
        origin: _Origin = tensor.__dict__[_ORIGIN]
        base_local = origin.base._local_tensor
        now = versions(origin.base, base_local)
        if now[0] == origin.versions[0] != _INFERENCE:
            if base_local is not origin.base_local or now != origin.versions:
                raise PropagationError(_unseen_write_text(origin))
        else:
            with admitted():
                results = dispatch_any(origin.op, (), tuple(origin.args), dict(origin.kwargs))
            renewed = results if origin.place is None else results[origin.place]
            slot.__set__(tensor, renewed._local_tensor)
            tensor.__dict__[_ORIGIN] = origin._replace(base_local=base_local, versions=now)
        local: torch.Tensor = slot.__get__(tensor)
        return local

    def dispatch(
        op: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Brings what is written to a copy to what it is a view of; a view of a copy follows it in turn."""
        given = {} if kwargs is None else kwargs
        aliased = list(_aliased(op, args, given))
        written = [item for is_write, item in aliased if is_write]
        copies = [item for item in written if isinstance(item, view_class)]
        roots = [_root(item) for item in written if isinstance(item, tensor_class)]
        for view in copies:
            # What is written to one of them first would have to be seen in the other.
            if sum(root is _root(view) for root in roots) > 1 or not _can_write_back(view):
                raise PropagationError(_refusal(op, view))
        result = dispatch_any(op, types, args, given)
        # The writes are counted by whoever called; until then the copies are not to look whether they are.
        for view in copies:
            _write_back(view, lambda it: wrap(slot.__get__(it), it._spec))
        copies_view = not written and any(isinstance(item, view_class) for _, item in aliased)
        return track_base(result, op, args, given, is_alias=True) if copies_view else result

    def untracked(tensor: Any) -> torch.Tensor:
        """The tensor as it is now, which follows nothing."""
        found: torch.Tensor = wrap(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)
        return found

    view_class: type[torch.Tensor] = type(
        f"CopiedView{tensor_class.__name__}",
        (tensor_class,),
        {
            "__slots__": (),
            "__module__": tensor_class.__module__,
            "__torch_dispatch__": staticmethod(dispatch),
            "_local_tensor": property(refreshed, slot.__set__),
            # What is not a leaf is left for the class itself to refuse.
            "__deepcopy__": lambda it, memo: wrap.__deepcopy__(untracked(it) if it.is_leaf else it, memo),
            "__reduce_ex__": lambda it, protocol: untracked(it).__reduce_ex__(protocol),
        },
    )
    return view_class


def _can_write_back(view: Any) -> bool:
    """Whether what is written to a copy can be written to what it follows, and so on."""
    origin: _Origin | None = view.__dict__.get(_ORIGIN)
    if origin is None:
        return True
    known = origin.op in _SCATTER_OF or origin.op in _RESHAPES or origin.op is aten.unbind.int
    return (origin.is_alias or known) and _can_write_back(origin.base)


def _write_back(view: Any, untracked: Callable[[Any], Any]) -> None:
    """Writes the elements of a copy to what it follows, which brings them to what it follows itself."""
    origin: _Origin = view.__dict__[_ORIGIN]
    base, given = origin.base, (*origin.args[1:], *origin.kwargs.values())
    if origin.is_alias:
        _write_back(base, untracked)
    elif origin.op in _RESHAPES:
        with admitted():
            base.copy_(aten.view.default(untracked(view), base.shape))
    elif origin.op is aten.unbind.int:
        base.copy_(aten.select_scatter.default(base, untracked(view), *(given or (0,)), origin.place))
    else:
        base.copy_(_SCATTER_OF[origin.op](base, untracked(view), *origin.args[1:], **origin.kwargs))


def _root(tensor: Any) -> Any:
    """Whose memory a tensor shares, or is to follow."""
    origin: _Origin | None = tensor.__dict__.get(_ORIGIN)
    if origin is not None:
        return _root(origin.base)
    return tensor if tensor._base is None else _root(tensor._base)


def versions(distributed: Any, local: torch.Tensor) -> Versions:
    """How often a tensor was written to: by operators on it, and on its local tensor, -1 where nobody counts.

    A view counts operators together with what it is a view of, writes to local tensors apart.
    """
    base = distributed._base
    counted = (distributed, local) if base is None else (distributed, local, base._local_tensor)
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in counted)


def track_base(
    results: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_alias: bool = False
) -> Any:
    """The results of a view of the first argument, made to follow it; `is_alias` where they share its memory.

    What autograd keeps as a gradient stays what it is: nobody knows of what it took a view.
    """
    if _is_kept_as_gradient():
        return results
    base, several = args[0], isinstance(results, list | tuple)
    local = base._local_tensor
    origin = _Origin(base, local, versions(base, local), op, tuple(args), dict(kwargs), None, is_alias)
    for place, result in enumerate(results if several else (results,)):
        if _ORIGIN not in result.__dict__:
            kind: Any = type(result)
            result.__class__ = copied_view_class(kind)
            result.__dict__[_ORIGIN] = origin._replace(place=place if several else None)
    return results


def _is_kept_as_gradient() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name().endswith("AccumulateGrad")


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


def _unseen_write_text(origin: _Origin) -> str:
    return (
        f"the local tensor of {origin.base._spec} was written to without an operator on it, which its view by "
        f"{origin.op} cannot see: its elements had to move; take the view again after writing"
    )
