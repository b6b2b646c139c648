"""Lists of tensors of which some share memory, or some are plain and others distributed, on one mesh or several.

On one device an operator on lists goes through their positions in order. Where arguments have to move, each is replaced
by a tensor of its own, and a write to one would not be seen at the next. A list whose tensors are each right alone is
right: optimizers, clip_grad_norm_ and GradScaler pass the parameters of a whole model at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.dtensor.writes import leaves_counting, memory_of
from tritondt.errors import MeshError
from tritondt.kernels.memory import has_memory
from tritondt.sharding.mesh import Mesh

_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")

# The mesh of one position's distributed tensors; None where all are plain.
_Kind = Mesh | None


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
    """The part of an argument for one position: an item of a list, or one number of a tensor with one for each."""
    if isinstance(argument, torch.Tensor) and argument.ndim:
        return argument[position : position + 1]
    return [argument[position]] if isinstance(argument, list | tuple) and argument else argument


def _is_list_of_tensors(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and bool(argument) and isinstance(argument[0], torch.Tensor)


def _keys(tensor: torch.Tensor) -> Sequence[int]:
    return tuple(map(id, memory_of(tensor))) if hasattr(tensor, "_spec") else (id(tensor),)


def run_by_kind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], tensor_class: type) -> Any:
    """The results of an operator on lists of several kinds, run kind by kind; NotImplemented for all other calls."""
    if not op._schema.name.startswith(_LISTS):
        return NotImplemented
    length = next((len(item) for item in args if _is_list_of_tensors(item)), 0)
    groups: dict[_Kind, list[int]] = {}
    for place in range(length):
        groups.setdefault(_kind_at(args, place, tensor_class), []).append(place)
    if len(groups) < 2:
        return NotImplemented
    # GradScaler's operator adds each group's find to one number: the group of most ranks, last, tells the most of them.
    parts = sorted(groups.items(), key=lambda group: 0 if group[0] is None else len(group[0].ranks))
    writes = op._schema.is_mutable
    if writes and _share_memory(args, groups, tensor_class):
        parts = [(_kind_at(args, place, tensor_class), [place]) for place in range(length)]
    found: list[Any] = [None] * length
    for kind, places in parts:
        chosen = [_chosen(item, places, length, op, kind, tensor_class) for item in args]
        named = {name: _chosen(item, places, length, op, kind, tensor_class) for name, item in kwargs.items()}
        if kind is None and writes and leaves_counting(op):
            torch._C._increment_version([tensor for place in written_lists(op) for tensor in chosen[place]])
        for place, result in zip(places, op(*chosen, **named) or (), strict=False):
            found[place] = result
    return found if op._schema.returns else None


def number_on(op: OpOverload, number: Any, kind: _Kind) -> torch.Tensor:
    """A distributed tensor without dims as the plain number that it is on every rank of its mesh.

    A collective call where it holds terms. MeshError where the ranks that need the number, those of `kind` or for
    None the calling one, are not all on that mesh.
    """
    mesh: Mesh = number._spec.mesh
    if kind is not None and not set(kind.ranks) <= set(mesh.ranks):
        raise MeshError(
            f"{op} got a number on {mesh} for tensors on {kind}, some ranks of which do not hold it; give the number's "
            f"value, or make it on a mesh of all ranks{clipping(op)}"
        )
    if kind is None and mesh.coordinate is None:
        raise MeshError(
            f"{op} got a number on {mesh} for a plain tensor on a rank outside that mesh, which does not hold the "
            "number; call it on the mesh's ranks alone, or give the number's value"
        )
    with torch.no_grad():
        value: torch.Tensor = number.full_tensor()
    return value if mesh.coordinate is not None else torch.zeros((), dtype=number.dtype)


def clipping(op: OpOverload) -> str:
    """The sequel of a refusal of tensors on several meshes, where torch's clip_grad_norm_ calls so."""
    if op._schema.name in ("aten::stack", "aten::_foreach_mul_", "aten::mul_"):
        return "; for gradients on several meshes call tritondt.clip_grad_norm_ in place of torch's"
    return ""


def _kind_at(args: Sequence[Any], place: int, tensor_class: type) -> _Kind:
    for item in args:
        if _is_list_of_tensors(item) and place < len(item) and isinstance(item[place], tensor_class):
            mesh: Mesh = item[place]._spec.mesh
            return mesh
    return None


def _chosen(item: Any, places: Sequence[int], length: int, op: OpOverload, kind: _Kind, tensor_class: type) -> Any:
    """An argument for some positions of the lists."""
    if isinstance(item, list | tuple):
        return [item[place] for place in places] if len(item) == length else item
    if isinstance(item, torch.Tensor) and item.ndim:  # one number for each position
        return item[list(places)] if len(item) == length else item
    if isinstance(item, tensor_class) and item._spec.mesh is not kind:  # type: ignore[attr-defined]
        return number_on(op, item, kind)
    return item


def _share_memory(args: Sequence[Any], groups: Mapping[_Kind, Sequence[int]], tensor_class: type) -> bool:
    """Whether tensors of two kinds share memory, as a distributed one and its local part do."""
    holders: dict[int, _Kind] = {}
    for kind, places in groups.items():
        for tensor in _local_tensors(args, places, tensor_class):
            if has_memory(tensor) and holders.setdefault(tensor.untyped_storage()._cdata, kind) is not kind:
                return True
    return False


def _local_tensors(args: Sequence[Any], places: Sequence[int], tensor_class: type) -> Iterator[torch.Tensor]:
    for item in filter(_is_list_of_tensors, args):
        for place in places:
            yield item[place]._local_tensor if isinstance(item[place], tensor_class) else item[place]
