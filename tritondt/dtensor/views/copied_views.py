"""Copied views: copies in place of views whose elements had to move, kept up to date with the tensor they view.

On one device a view sees what is written to its base. Where the shards of a view are not the base's own, the view is a
copy of a subclass, and operators on it look whether the base was written to since, and then copy again. A write to a
copied view is made to the base as well, where there is an operator for that, and refused elsewhere.

Copying is a collective call: whether to copy follows from how many operators have written to the base, which all ranks
count alike, and only operators and redistributions copy. The other ranks cannot know of a write by one rank to its
local tensor; this write is refused when it is found.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from tritondt.dtensor.list_positions import run_by_position, share_memory
from tritondt.dtensor.views.view_origins import Origin, can_write_back, write_back
from tritondt.dtensor.writes import (
    MEMORY,
    ORIGIN,
    Watch,
    held_local,
    memory_of,
    note_known_writes,
    num_foreign_writes,
    renew_elements,
)
from tritondt.errors import PropagationError
from tritondt.ops.propagation.fallback import admitted
from tritondt.ops.rules.views import VIEW_OF
from tritondt.sharding.placement import placements_text

# Of composites that give what they are given, the one that propagation has a rule for.
_POSITIVE = torch.ops.aten.positive.default


def _freshness(
    slot: Any, dispatch_any: Callable[..., Any]
) -> tuple[Callable[[Any], torch.Tensor], Callable[[Any], None]]:
    """How a copied view gives its local tensor to whoever looks, and how operators bring it up to date first."""

    def renew(tensor: Any, origin: Origin) -> None:
        """Copies the elements again: a collective call unless the origin `is_local`."""
        renewed_origin = origin.up_to_date()
        with admitted():
            results = dispatch_any(origin.op, (), tuple(origin.args), dict(origin.kwargs))
        renewed = results if origin.place is None else results[origin.place]
        if origin.is_alias:
            slot.__set__(tensor, held_local(renewed))
        else:  # where the copy lies: views of it, which share its memory, are still written through
            renew_elements(slot.__get__(tensor), held_local(renewed))
        tensor.__dict__[ORIGIN] = renewed_origin

    def current_local(tensor: Any) -> torch.Tensor:
        """The local tensor; PropagationError where it is out of date, and copying it again would send."""
        origin: Origin = tensor.__dict__[ORIGIN]
        origin.check_own(slot.__get__(tensor))
        if origin.is_local and origin.is_past_here() and not _is_past(origin.base):
            renew(tensor, origin)
        elif origin.is_past():
            raise PropagationError(origin.past_text("the local tensor"))
        else:
            origin.check_local()
        local: torch.Tensor = slot.__get__(tensor)
        return local

    def copy_again(tensor: Any) -> None:
        """Copies the elements again where operators have written to the base: a collective call then."""
        origin: Origin = tensor.__dict__[ORIGIN]
        origin.check_own(slot.__get__(tensor))
        if origin.is_past() or (origin.is_local and origin.is_past_here()):
            refresh(origin.base)
            renew(tensor, origin)
        elif origin.may_rise:
            tensor.__dict__[ORIGIN] = origin._replace(seen=origin.watch.count(origin.counted), may_rise=False)

    return current_local, copy_again


@lru_cache(maxsize=64)
def copied_view_class(tensor_class: type[torch.Tensor]) -> type[torch.Tensor]:
    """The subclass of `tensor_class` for copied views."""
    slot: Any = tensor_class._local_tensor  # type: ignore[attr-defined]
    wrap: Any = tensor_class
    dispatch_any: Callable[..., Any] = tensor_class.__torch_dispatch__

    current_local, copy_again = _freshness(slot, dispatch_any)

    def dispatch(
        op: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator and writes back to the bases of written copies; views of a copy become copied views too."""
        given = {} if kwargs is None else kwargs
        if torch.Tag.inplace_view in op.tags:
            return _reshape(op, args, given, dispatch_any)
        if share_memory(op, args):
            _check_reach_bases(op, (item for is_write, item in _aliased(op, args, given) if is_write))
            return run_by_position(op, args, given)
        for tensor in _tensors((*args, *given.values())):
            refresh(tensor)
        aliased = list(_aliased(op, args, given))
        written = [item for is_write, item in aliased if is_write]
        copies = _written_copies(op, written)
        versions = [(local, local._version) for local in map(slot.__get__, copies) if not local.is_inference()]
        result = dispatch_any(op, types, args, given)
        for local, version in versions:
            note_known_writes(local, version)
        for view in copies:
            write_back(view, lambda it: wrap(slot.__get__(it), it._spec))
            view.__dict__[ORIGIN] = view.__dict__[ORIGIN].up_to_date(may_rise=True)
        copies_view = not written and any(isinstance(item, view_class) for _, item in aliased) and not _has_parts(op)
        return track_base(result, op, args, given, is_alias=True) if copies_view else result

    view_class: type[torch.Tensor] = type(
        f"CopiedView{tensor_class.__name__}",
        (tensor_class,),
        {
            "__slots__": (),
            "__module__": tensor_class.__module__,
            "__torch_dispatch__": staticmethod(dispatch),
            "_local_tensor": property(current_local, _replace_local),
            "_copy_again": copy_again,
            "__repr__": lambda it, **options: _past_repr(it) or wrap.__repr__(it, **options),
            "wait": lambda it: it,
            # Files have the present values, and no base.
            "__reduce_ex__": lambda it, protocol: wrap(
                it._local_tensor, it._spec, requires_grad=it.requires_grad
            ).__reduce_ex__(protocol),
        },
    )
    return view_class


def _has_parts(op: OpOverload) -> bool:
    """Whether dispatch takes an operator apart, so that its parts were views or not: composites, in inference_mode."""
    return op is not _POSITIVE and bool(op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def _replace_local(tensor: Any, local: torch.Tensor) -> None:
    """Sets another local tensor: the tensor is no view any more."""
    kind: Any = type(tensor).__base__
    kind._local_tensor.__set__(tensor, local)
    if tensor.__dict__.pop(ORIGIN, None) is not None:
        tensor.__class__ = kind


def _written_copies(op: OpOverload, written: Sequence[Any]) -> list[Any]:
    """The copied views among what an operator writes to; PropagationError where it would not reach their bases."""
    tensors = [item for item in written if hasattr(item, "_spec")]
    memories = [set(map(id, memory_of(item))) for item in tensors]
    copies = [item for item in tensors if ORIGIN in item.__dict__]
    for view in copies:
        # What is written to one of them first would have to be seen in the other.
        shared = sum(not memory.isdisjoint(map(id, memory_of(view))) for memory in memories)
        if shared > 1 or not can_write_back(view):
            raise PropagationError(view.__dict__[ORIGIN].refusal(op))
    return copies


def _check_reach_bases(op: OpOverload, written: Iterable[Any]) -> None:
    """Raises PropagationError where a write would not reach a base, before those ahead of it in a list are made."""
    for item in written:
        if hasattr(item, "_spec") and not can_write_back(item):
            raise PropagationError(item.__dict__[ORIGIN].refusal(op))


def _is_past(tensor: Any) -> bool:
    origin: Origin | None = tensor.__dict__.get(ORIGIN)
    return origin is not None and origin.is_past()


def refresh(tensor: Any) -> None:
    """Brings a tensor up to date, for who communicates anyway: nothing but for a copied view whose base was written to.

    A collective call.
    """
    if ORIGIN in tensor.__dict__:
        tensor._copy_again()


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

    `is_local` says that copying them again is no collective call. A gradient that autograd keeps stays what it is: of
    whose view it is nobody can say.
    """
    if _is_kept_as_gradient():
        return results
    several, base = isinstance(results, list | tuple), _as_it_is(args[0])
    origin = _origin(base, args[0], op, (base, *args[1:]), kwargs, is_alias=is_alias, is_local=is_local)
    for place, result in enumerate(results if several else (results,)):
        if ORIGIN not in result.__dict__:
            _set_origin(result, origin._replace(place=place if several else None))
    return results


def share_origin(tensor: Any, new: Any) -> None:
    """Makes a tensor that was given the memory of a copied view one too."""
    if ORIGIN in new.__dict__:
        _set_origin(tensor, new.__dict__[ORIGIN])


def _origin(
    base: Any,
    counted: Any,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_alias: bool,
    is_local: bool = False,
) -> Origin:
    watch = Watch(memory_of(base))
    counts = watch.count(counted), watch.local_count(base)
    return Origin(base, counted, watch, *counts, op, tuple(args), dict(kwargs), None, is_alias, is_local)


def _set_origin(tensor: Any, origin: Origin) -> None:
    if ORIGIN not in tensor.__dict__:  # outside the mesh a copied view that was changed in place is still one
        kind: Any = type(tensor)
        tensor.__class__ = copied_view_class(kind)
    seen_own = None if origin.is_alias else num_foreign_writes(held_local(tensor))
    tensor.__dict__.update({ORIGIN: origin._replace(seen_own=seen_own), MEMORY: origin.watch.memory})


def _as_it_is(tensor: Any) -> Any:
    """An alias that keeps shape and memory, whatever the tensor itself is changed into."""
    kind: Any = type(tensor)
    origin: Origin | None = tensor.__dict__.get(ORIGIN)
    alias = (kind if origin is None else kind.__base__)(held_local(tensor), tensor._spec)
    alias.__dict__[MEMORY] = memory_of(tensor)
    if origin is not None:
        _set_origin(alias, origin)
    return alias


def _reshape(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dispatch_any: Callable[..., Any]) -> Any:
    """Changes the shape of a copied view in place: the view becomes one of what it was."""
    tensor, view = args[0], VIEW_OF.get(op)
    origins = [item.__dict__[ORIGIN] for item in _tensors((*args, *kwargs.values())) if ORIGIN in item.__dict__]
    if view is None or ORIGIN not in tensor.__dict__:
        raise PropagationError(
            f"{op} would put a view by {origins[0].op} of {origins[0].base._spec}, whose elements had to move, and a "
            f"tensor of other elements into one memory; allowed in place are {', '.join(sorted(map(str, VIEW_OF)))}, "
            "and anything on a copy: view.clone()"
        )
    refresh(tensor)
    origin, before = tensor.__dict__[ORIGIN], _as_it_is(tensor)
    dispatch_any(op, (), args, kwargs)
    _set_origin(tensor, _origin(before, origin.counted, view, (before, *args[1:]), kwargs, is_alias=True))
    return tensor


def _is_kept_as_gradient() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name().endswith("AccumulateGrad")


def _past_repr(tensor: Any) -> str:
    """The text of a view that is out of date, which shows no elements; empty where it is up to date."""
    origin: Origin = tensor.__dict__[ORIGIN]
    if not origin.is_past():
        return ""
    spec = tensor._spec
    return (
        f"DTensor({placements_text(spec.placements)} of {tuple(spec.shape)} on {spec.mesh}, a view by {origin.op} "
        "whose base was written to: the next operator on it, called on all ranks, copies its elements again)"
    )


def _aliased(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[bool, Any]]:
    """Arguments that a call writes to or returns aliases of, each with whether it is written to."""
    for place, declared in enumerate(op._schema.arguments):
        if declared.alias_info is None:
            continue
        given = args[place] if place < len(args) else kwargs.get(declared.name)
        for argument in given if isinstance(given, list | tuple) else (given,):
            yield declared.alias_info.is_write, argument


def _tensors(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from _tensors(argument)
        elif isinstance(argument, torch.Tensor):
            yield argument
