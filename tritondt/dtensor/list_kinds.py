"""Lists of plain tensors and of distributed ones, on one mesh or several: each position runs with its own kind.

An operator on lists goes through them position by position, so that a list whose tensors are each right alone is right:
optimizers, clip_grad_norm_ and GradScaler pass the parameters of a whole model at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.dtensor.list_positions import written_lists
from tritondt.dtensor.writes import leaves_counting
from tritondt.errors import MeshError
from tritondt.redistribution.run import has_memory
from tritondt.sharding.mesh import Mesh

_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")

# The mesh of one position's distributed tensors; None where all are plain.
_Kind = Mesh | None


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


def _is_list_of_tensors(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and bool(argument) and isinstance(argument[0], torch.Tensor)
