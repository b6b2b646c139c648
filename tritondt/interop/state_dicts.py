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
        is_wanted = not ranks_only or dist.get_rank(options.get("pg")) in ranks_only
        with torch.no_grad():
            whole = _with_whole_tensors(state_dict, torch.device("cpu") if cpu_offload else None, is_wanted)
        return gather(whole, cpu_offload=cpu_offload, ranks_only=tuple(ranks_only), **options)

    return gather_state_dict


def _with_whole_tensors(item: Any, device: torch.device | None, is_wanted: bool) -> Any:
    """`item` with a whole plain tensor for each distributed one, on `device`, or None where this rank wants none.

    One after another, so that a device holds one whole tensor at a time where they are moved off it.
    """
    if isinstance(item, DTensor):
        whole = item.full_tensor()
        return (whole if device is None else whole.to(device)) if is_wanted else None
    if isinstance(item, dict):
        return {key: _with_whole_tensors(value, device, is_wanted) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        items = [_with_whole_tensors(value, device, is_wanted) for value in item]
        return tuple(items) if isinstance(item, tuple) else items
    return item


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
