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
from tritondt.redistribution.given_local import given_local
from tritondt.redistribution.refusals import refusing_comparison
from tritondt.redistribution.run import check_address
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec


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
        full_state_dict: dict[str, Any],
        local_state_dict: dict[str, Any],
        keys: list[str],
        device: torch.device,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        """Puts into `local_state_dict` what rank 0 has, as distributed tensors where they were: a collective call.

        Each rank is sent its part of those on a mesh of all ranks, and each host what its ranks lack once.
        """
        distributed = _distributed(local_state_dict, keys)
        sent = _sent_by_all(distributed, keys, device, pg)
        for key in sent:
            local_state_dict[key] = _from_rank_0(full_state_dict[key], distributed.pop(key)._spec)
        rest = {key: _contiguous(full_state_dict[key]) for key in keys if key not in sent}
        if rest:
            broadcast(rest, local_state_dict, [*rest], device, pg)
            _cut_again(local_state_dict, distributed)

    return broadcast_tensors


def _sent_by_all(
    distributed: Mapping[str, DTensor], keys: Sequence[str], device: torch.device, pg: dist.ProcessGroup | None
) -> list[str]:
    """The keys whose tensors are on a mesh of all ranks with rank 0 first on every rank, which all find alike.

    A rank may lack a tensor of the others or have a plain one, and of other meshes some ranks know nothing, as those
    of another pipeline stage: whole tensors are then broadcast.
    """
    everyone = sorted(dist.get_process_group_ranks(pg))
    meshes = [distributed[key]._spec.mesh if key in distributed else None for key in keys]
    own = [mesh is not None and mesh.ranks[0] == 0 and sorted(mesh.ranks) == everyone for mesh in meshes]
    taken = [each.type for each in (pg or dist.group.WORLD)._device_types]  # type: ignore[union-attr]
    on_all = torch.tensor(own, dtype=torch.int32, device=device.type if device.type in taken else taken[0])
    dist.all_reduce(on_all, dist.ReduceOp.MIN, pg)
    return [key for key, is_sent in zip(keys, on_all.tolist(), strict=True) if is_sent]


def _contiguous(given: Any) -> Any:
    """A tensor by rows: Gloo broadcasts memory in its order, and the others take it for rows."""
    return given.contiguous() if isinstance(given, torch.Tensor) else given


def _from_rank_0(given: Any, before: DTensorSpec) -> DTensor:
    """A whole tensor of rank 0 laid out as before; other ranks have its size and dtype in place of it."""
    mesh = before.mesh
    with refusing_comparison(mesh):
        if isinstance(given, torch.Tensor):
            whole = given_local(given, "broadcast_from_rank0").detach()
            check_address(whole, before)
        else:
            whole = torch.empty((), dtype=given.dtype, device=mesh.device_type).expand(given.size)
    return distribute_tensor(whole, mesh, before.placements, order=before.order, src_data_rank=0)


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
