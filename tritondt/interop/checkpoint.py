"""The part of a checkpoint (torch.distributed.checkpoint) that a rank writes and reads: a chunk for each of its boxes.

Imported as soon as a program has imported torch.distributed.checkpoint; torch's protocol is `_Checkpointable`. A
checkpoint names places in the whole tensor, so that it is read on any mesh, under any layout, by any number of ranks.
"""

from functools import lru_cache
from itertools import product
from typing import NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tritondt import identity
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError
from tritondt.sharding.intervals import Intervals
from tritondt.sharding.placement import Partial
from tritondt.sharding.spec import DTensorSpec


class Chunk(NamedTuple):
    """A box of the whole tensor that a rank holds, and where it lies in the rank's local tensor."""

    offsets: torch.Size
    sizes: torch.Size
    local: tuple[slice, ...]


@lru_cache(maxsize=4096)
def chunks(spec: DTensorSpec) -> tuple[Chunk, ...]:
    """Chunks that the calling rank holds, in the order of its boxes; none outside the mesh or where it holds nothing.

    A tensor without elements is one chunk on every rank, so that a checkpoint knows of it. Raises LayoutError for
    Partial, of which a rank holds a term and no values.
    """
    if any(isinstance(placement, Partial) for placement in spec.placements):
        raise LayoutError(
            f"a checkpoint of {spec}: a rank holds a term of each element there, not its value; redistribute to Shard "
            "or Replicate first"
        )
    if spec.coordinate is None:
        return ()
    if 0 in spec.shape:
        return (Chunk(torch.Size([0] * spec.ndim), torch.Size(spec.shape), (slice(None),) * spec.ndim),)
    located = [_located(intervals) for intervals in spec.layout.region(spec.coordinate)]
    return tuple(
        Chunk(
            torch.Size([start for start, _, _ in box]),
            torch.Size([stop - start for start, stop, _ in box]),
            tuple(slice(at, at + stop - start) for start, stop, at in box),
        )
        for box in product(*located)
    )


def _located(intervals: Intervals) -> list[tuple[int, int, int]]:
    """Intervals of a dim with the index at which each starts in the local tensor."""
    found, at = [], 0
    for start, stop in intervals:
        found.append((start, stop, at))
        at += stop - start
    return found


def _values(tensor: DTensor) -> torch.Tensor:
    """The rank's own part, without its history."""
    return cast(DTensor, tensor.detach()).to_local()


def _create_write_items(tensor: DTensor, fqn: str, _tensor: object) -> list[WriteItem]:
    """The chunks that this rank would write; where several ranks hold one, torch's planner chooses one of them."""
    local = _values(tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets, index),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(chunk.offsets, chunk.sizes),
                properties=TensorProperties.create_from_tensor(local),
                size=tensor.size(),
            ),
        )
        for index, chunk in enumerate(chunks(tensor._spec))
    ]


def _create_chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """The chunks that this rank wants when it loads, which counts as a write: what reads the local tensor is stale."""
    torch.autograd.graph.increment_version(tensor)
    return [ChunkStorageMetadata(chunk.offsets, chunk.sizes) for chunk in chunks(tensor._spec)]


def _get_tensor_shard(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The part of the local tensor that a chunk is, sharing memory; ValueError where this rank has no such chunk."""
    held = chunks(tensor._spec)
    for chunk in held:
        if chunk.offsets == index.offset:
            return _values(tensor)[chunk.local]
    raise ValueError(
        f"{index.fqn}: no chunk of this rank starts at {index.offset}; those of {tensor._spec} start at "
        f"{', '.join(str(tuple(chunk.offsets)) for chunk in held) or 'no place'}"
    )


# At import, which may be what makes torch import its planner and so comes here twice.
for _name, _method in (
    ("__create_write_items__", _create_write_items),
    ("__create_chunk_list__", _create_chunk_list),
    ("__get_tensor_shard__", _get_tensor_shard),
):
    setattr(DTensor, _name, _method)


identity.on_end(chunks.cache_clear)
