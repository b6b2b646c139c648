"""Saved sharded tensors: a rank's own shards and the metadata, as plain values that torch.load takes by default."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tritondt import identity
from tritondt.errors import WorldError
from tritondt.errors.arguments import first
from tritondt.sharded.groups import Group, ranks_of
from tritondt.sharded.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from tritondt.sharded.specs import ChunkShardingSpec, EnumerableShardingSpec


class _Loading(threading.local):
    """Group that the calling thread loads sharded tensors with; ranks may be threads."""

    is_set = False
    process_group: Group = None


_loading = _Loading()


class GroupState(NamedTuple):
    """Places of the saving rank in its group and its world, and the sizes of both."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int


@first("process_group")
@contextmanager
def load_with_process_group(process_group: Group) -> Iterator[Group]:
    """Context in which sharded tensors are loaded for a process group, or a mesh, instead of for the world.

    RuntimeError (WorldError) where one context is within another.

    >>> with load_with_process_group(None) as group:
    ...     print(group)
    None
    """
    if _loading.is_set:
        raise WorldError("load_with_process_group is within another one; leave the outer one first")
    _loading.is_set, _loading.process_group = True, process_group
    try:
        yield process_group
    finally:
        _loading.is_set, _loading.process_group = False, None


def current_process_group() -> Group:
    """Group of the surrounding `load_with_process_group`, None for the world."""
    return _loading.process_group


def group_state(process_group: Group) -> GroupState:
    """Places of the calling rank in the group, -1 where it is none of its ranks, and in the world."""
    who, ranks = identity.current(), ranks_of(process_group)
    return GroupState(ranks.index(who.rank) if who.rank in ranks else -1, who.rank, len(ranks), who.size)


def saved_state(tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that rebuilds a sharded tensor, and its arguments: tensors and plain values.

    A spec of a class of the user's is pickled as it is.
    """
    metadata, spec = tensor.metadata(), tensor.sharding_spec()
    shards = [(shard.shard_offsets, shard.shard_sizes, str(shard.placement)) for shard in metadata.shards_metadata]
    own = [number for number, shard in enumerate(metadata.shards_metadata) if shard.rank == identity.current().rank]
    if isinstance(spec, ChunkShardingSpec):
        spec = ("chunks", spec.dim, [str(placement) for placement in spec.placements])
    elif isinstance(spec, EnumerableShardingSpec):
        spec = ("shards",)
    properties = metadata.tensor_properties
    return rebuild_sharded_tensor, (
        type(tensor),
        list(zip(own, [shard.tensor for shard in tensor.local_shards()], strict=True)),
        (shards, tuple(metadata.size), properties.dtype, properties.requires_grad, properties.pin_memory),
        tuple(group_state(tensor._process_group)),
        spec,
        getattr(tensor, "_is_param", False),
    )


def rebuild_sharded_tensor(
    make: Any,
    own: list[tuple[int, torch.Tensor]],
    values: tuple[Any, ...],
    saved: tuple[int, int, int, int],
    spec: Any,
    is_parameter: bool,
) -> Any:
    """The sharded tensor of class `make` that was saved, for the group of `load_with_process_group` or the world.

    WorldError (RuntimeError) where the rank, or a size, is not that of the rank that saved.
    """
    group = current_process_group()
    for what, before, now in zip(GroupState._fields, saved, group_state(group), strict=True):
        if before != now:
            raise WorldError(
                f"a sharded tensor was saved with {what.replace('_', ' ')} {before} and is loaded with {now}; load "
                "what this rank saved, within load_with_process_group where it was saved for a group, or use "
                "torch.distributed.checkpoint"
            )
    shards, size, dtype, requires_grad, pin_memory = values
    places = [ShardMetadata(*shard) for shard in shards]
    properties = TensorProperties(dtype, requires_grad=requires_grad, pin_memory=pin_memory)
    metadata = ShardedTensorMetadata(places, torch.Size(size), properties)
    if isinstance(spec, tuple):
        spec = ChunkShardingSpec(*spec[1:]) if spec[0] == "chunks" else EnumerableShardingSpec(places)
    made = make._assembled(spec, metadata, group, [Shard(tensor, places[number]) for number, tensor in own])
    if is_parameter:
        made._is_param = True
    return made
