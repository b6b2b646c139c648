"""State dicts of distributed tensors in torch.distributed.checkpoint.state_dict, gathered to whole ones and cut again.

Torch knows its own class there and takes any other tensor for a plain one, so that `full_state_dict=True` would give
the shard of a rank as if it were the whole. The three functions through which all of it goes are wrapped.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tritondt.dtensor.distribute import distribute_tensor
from tritondt.dtensor.tensor import DTensor
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Replicate


def add_distributed_tensors(module: ModuleType) -> None:
    """Wraps the functions of `torch.distributed._state_dict_utils`, where others have imported them by name as well."""
    for name, wrap in (
        ("_gather_state_dict", _gathering),
        ("_broadcast_tensors", _broadcasting),
        ("_distribute_state_dict", _distributing),
    ):
        before = getattr(module, name)
        wrapped = wrap(before)
        setattr(module, name, wrapped)
        for other in [sys.modules[each] for each in tuple(sys.modules) if each.startswith("torch.distributed.")]:
            if vars(other).get(name) is before:
                setattr(other, name, wrapped)


def _gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    def gather_state_dict(
        state_dict: Mapping[str, Any], *, cpu_offload: bool = False, ranks_only: Sequence[int] = (), **options: Any
    ) -> Any:
        """The state dict with whole tensors, of distributed tensors too: a collective call."""
        group = options.get("pg")
        wanting = [rank if group is None else dist.get_global_rank(group, rank) for rank in ranks_only]
        with torch.no_grad():
            whole = _with_whole_tensors(state_dict, torch.device("cpu") if cpu_offload else None, wanting)
        return gather(whole, cpu_offload=cpu_offload, ranks_only=tuple(ranks_only), **options)

    return gather_state_dict


def _with_whole_tensors(item: Any, device: torch.device | None, wanting: Sequence[int]) -> Any:
    """`item` with a whole plain tensor for each distributed one, on `device`: on the ranks in `wanting`, or on all.

    Others have an empty tensor. One after another, so that a device holds one whole tensor at a time where they are
    moved off it.
    """
    if isinstance(item, DTensor):
        whole = _whole_on(item, wanting)
        return whole if device is None else whole.to(device)
    if isinstance(item, dict):
        return {key: _with_whole_tensors(value, device, wanting) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        items = [_with_whole_tensors(value, device, wanting) for value in item]
        return tuple(items) if isinstance(item, tuple) else items
    return item


def _whole_on(tensor: DTensor, wanting: Sequence[int]) -> torch.Tensor:
    """The whole tensor on those ranks of its mesh that are in `wanting`, or on all without such; empty on others.

    A collective call of the mesh.
    """
    mesh = tensor._spec.mesh
    holders = [rank for rank in mesh.ranks if rank in wanting or not wanting]
    if len(holders) == len(mesh.ranks):
        return tensor.full_tensor()
    if not holders:
        return tensor.to_local().new_empty(0)
    there = Mesh((len(holders),), ranks=holders, device_type=mesh.device_type)
    return tensor.redistribute(there, [Replicate()]).to_local()


def _broadcasting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_tensors(
        full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], keys: list[str], *rest: Any, **options: Any
    ) -> None:
        """Puts into `local_state_dict` what rank 0 has, as distributed tensors where they were: a collective call."""
        distributed = _distributed(local_state_dict, keys)
        broadcast(full_state_dict, local_state_dict, keys, *rest, **options)
        _cut_again(local_state_dict, distributed)

    return broadcast_tensors


def _distributing(distribute: Callable[..., Any]) -> Callable[..., Any]:
    def distribute_state_dict(
        full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], *rest: Any, **options: Any
    ) -> None:
        """Puts this rank's parts of whole tensors, which every rank has, into `local_state_dict`."""
        distributed = _distributed(local_state_dict, full_state_dict)
        distribute(full_state_dict, local_state_dict, *rest, **options)
        _cut_again(local_state_dict, distributed)

    return distribute_state_dict


def _distributed(state_dict: Mapping[str, Any], keys: Any) -> dict[str, DTensor]:
    """The distributed tensors among the entries of these keys."""
    return {key: state_dict[key] for key in keys if isinstance(state_dict.get(key), DTensor)}


def _cut_again(state_dict: dict[str, Any], distributed: Mapping[str, DTensor]) -> None:
    """Makes distributed tensors, laid out as before, of entries that have become whole plain ones on every rank."""
    for key, before in distributed.items():
        whole = state_dict[key]
        if isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor):
            spec = before._spec
            state_dict[key] = distribute_tensor(
                whole.detach(), spec.mesh, spec.placements, order=spec.order, src_data_rank=None
            )
