"""The part of a checkpoint (torch.distributed.checkpoint) that a rank's shards are: a chunk for each shard.

Imported as soon as a program has imported torch.distributed.checkpoint, and gives ShardedTensor the three methods of
torch's protocol `_Checkpointable`.
"""

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tritondt.sharded.metadata import ShardMetadata
from tritondt.sharded.tensor import ShardedTensor


def _chunk(metadata: ShardMetadata) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(metadata.shard_offsets), torch.Size(metadata.shard_sizes))


def _is_stored(metadata: ShardMetadata, size: torch.Size) -> bool:
    """Whether a shard has elements; of a tensor without any, all shards are told, so that a checkpoint knows of it."""
    return 0 not in metadata.shard_sizes or 0 in size


def _create_write_items(tensor: ShardedTensor, fqn: str, _tensor: object) -> list[WriteItem]:
    """Write items for this rank's shards, which no other rank holds."""
    size = tensor.metadata().size
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(shard.metadata.shard_offsets), number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(shard.metadata),
                properties=TensorProperties.create_from_tensor(shard.tensor),
                size=size,
            ),
        )
        for number, shard in enumerate(tensor.local_shards())
        if _is_stored(shard.metadata, size)
    ]


def _create_chunk_list(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """The chunks that this rank wants when it loads."""
    size = tensor.metadata().size
    return [_chunk(shard.metadata) for shard in tensor.local_shards() if _is_stored(shard.metadata, size)]


def _get_tensor_shard(tensor: ShardedTensor, index: MetadataIndex) -> torch.Tensor:
    """The shard that a chunk is, without its history; ValueError where this rank has no shard that starts there."""
    size = tensor.metadata().size
    held = [shard for shard in tensor.local_shards() if _is_stored(shard.metadata, size)]
    for shard in held:
        if index.offset is not None and shard.metadata.shard_offsets == list(index.offset):
            return shard.tensor.detach()
    raise ValueError(
        f"{index.fqn}: no shard of this rank starts at {index.offset}; those that it holds start at "
        f"{', '.join(str(tuple(shard.metadata.shard_offsets)) for shard in held) or 'no place'}"
    )


# At import, which may be what makes torch import its planner and so comes here twice.
for _name, _method in (
    ("__create_write_items__", _create_write_items),
    ("__create_chunk_list__", _create_chunk_list),
    ("__get_tensor_shard__", _get_tensor_shard),
):
    setattr(ShardedTensor, _name, _method)
