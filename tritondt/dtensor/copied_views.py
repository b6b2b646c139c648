"""Copied views: copies in place of views whose elements had to move, kept up to date with the tensor they view.

On one device a view sees what is written to its base. Where the shards of a view are not the base's own, the view is a
copy of a subclass whose `_local_tensor` looks whether the base was written to since, and then copies again. What is
written to a copied view is written to the base as well, where there is an operator for that, and refused elsewhere.

Copying is a collective call: whether to copy follows from how many operators have written to the base, which all ranks
count alike. What one rank writes to its local tensor the others cannot know; it is refused when it is found.
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
    """How a tensor was made as a view, and the versions of the base then: the result at `place` of a call.

    A view of a copied view may share the copy's memory: it is an alias then. One that `is_local` is copied from this
    rank's part of the base alone.
    """

    base: Any
    base_local: torch.Tensor
    versions: Versions
    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    place: int | None
    is_alias: bool = False
    is_local: bool = False


@lru_cache(maxsize=64)
def copied_view_class(tensor_class: type[torch.Tensor]) -> type[torch.Tensor]:
    """The subclass of `tensor_class` for copied views."""
    slot: Any = tensor_class._local_tensor  # type: ignore[attr-defined]
    wrap: Any = tensor_class
    dispatch_any: Callable[..., Any] = tensor_class.__torch_dispatch__

    def refreshed(tensor: Any) -> torch.Tensor:
        """The local tensor, copied again where operators have written to the base: a collective call then."""
        origin: _Origin = tensor.__dict__[_ORIGIN]
        base_local = origin.base._local_tensor
        now = versions(origin.base, base_local)
        is_known = now[0] == origin.versions[0] != _INFERENCE
        is_stale = base_local is not origin.base_local or now != origin.versions
        if is_known and is_stale and not origin.is_local:
            raise PropagationError(_unseen_write_text(origin))
        if is_stale or not is_known:
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
        """Runs an operator and writes back to the bases of written copies; views of a copy become copied views too."""
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
        """A tensor of the plain class with the present values, which tracks no base."""
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
    """Whether what is written to a copied view can be written to its base, and to that base's own."""
    origin: _Origin | None = view.__dict__.get(_ORIGIN)
    if origin is None:
        return True
    known = origin.op in _SCATTER_OF or origin.op in _RESHAPES or origin.op is aten.unbind.int
    return (origin.is_alias or known) and _can_write_back(origin.base)


def _write_back(view: Any, untracked: Callable[[Any], Any]) -> None:
    """Writes the elements of a copied view to its base, and from there on to that base's own."""
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
    """The tensor at the end of the chain of bases."""
    origin: _Origin | None = tensor.__dict__.get(_ORIGIN)
    if origin is not None:
        return _root(origin.base)
    return tensor if tensor._base is None else _root(tensor._base)


def versions(distributed: Any, local: torch.Tensor) -> Versions:
    """Numbers of writes to a tensor: by operators on it, and on its local tensor, -1 where nobody counts.

    A view counts operators together with its base, writes to local tensors apart.
    """
    base = distributed._base
    counted = (distributed, local) if base is None else (distributed, local, base._local_tensor)
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in counted)


def track_base(
    results: Any,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_alias: bool = False,
    is_local: bool = False,
) -> Any:
    """The results of a view of the first argument as copied views; `is_alias` where they share its memory.

    `is_local` says that copying them again is no collective call.

    A gradient that autograd keeps stays what it is: of whose view it is nobody can say.
    """
    if _is_kept_as_gradient():
        return results
    base, several = args[0], isinstance(results, list | tuple)
    local = base._local_tensor
    origin = _Origin(base, local, versions(base, local), op, tuple(args), dict(kwargs), None, is_alias, is_local)
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
    """Arguments that a call writes to or returns aliases of, each with whether it is written to."""
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
