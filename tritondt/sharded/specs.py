"""Specs that say how a tensor is cut into shards: into chunks of one dim, or shard by shard."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch.distributed import _remote_device as RemoteDevice

from tritondt.errors import ArgumentError, LayoutError
from tritondt.errors.arguments import checked, checked_class
from tritondt.planning.box_exchange import first_overlap
from tritondt.sharded.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    remote_device,
)


class PlacementSpec(ABC):  # noqa: B024  as torch's: a base to derive from, without methods
    """Base of specs that place something on a device."""


@checked_class
@dataclass
class DevicePlacementSpec(PlacementSpec):
    """Placement on one rank's device, written as "rank:0/cpu".

    >>> DevicePlacementSpec("rank:0/cpu").device.rank()
    0
    """

    device: "RemoteDevice | str"

    def __post_init__(self) -> None:
        self.device = remote_device(self.device)


class ShardingSpec(ABC):
    """Base of sharding specs. A subclass defines the place of every shard in `build_metadata`.

    >>> class FirstRow(ShardingSpec):
    ...     def build_metadata(self, tensor_sizes, tensor_properties):
    ...         rows, columns = tensor_sizes
    ...         first = ShardMetadata([0, 0], [1, columns], "rank:0/cpu")
    ...         others = ShardMetadata([1, 0], [rows - 1, columns], "rank:1/cpu")
    ...         return ShardedTensorMetadata([first, others], tensor_sizes, tensor_properties)
    >>> FirstRow().build_metadata(torch.Size([3, 2]), TensorProperties()).shards_metadata[1].shard_sizes
    [2, 2]
    """

    # Set where sharded tensors are made (distribute.py).
    _shard: ClassVar[Callable[..., Any]]

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Metadata of a tensor of these sizes and properties, cut by this spec; raises LayoutError where that is
        impossible."""

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """Makes a ShardedTensor from the values of `tensor` on group rank `src_rank`: a collective call."""
        return type(self)._shard(tensor, self, src_rank, process_group)


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """Chunks of one dim, as torch.chunk cuts it, one for each of `placements`; trailing ones may be short or empty.

    `dim` is an int, counted from the end where negative; a name is a NotImplementedError, as in torch. `placements` are
    "rank:0/cpu" or torch's `_remote_device`; a rank may be named several times, or not at all.

    >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> [shard.shard_sizes for shard in spec.build_metadata(torch.Size([5]), TensorProperties()).shards_metadata]
    [[3], [2]]
    """

    dim: int
    placements: list[RemoteDevice]

    @checked
    def __init__(self, dim: int, placements: "Sequence[RemoteDevice | str]") -> None:
        if isinstance(dim, str):
            raise NotImplementedError(f"ChunkShardingSpec takes a dim by its number, got the name {dim!r}")
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise LayoutError(f"ChunkShardingSpec takes a dim as an int, got {dim!r}")
        if not placements:
            raise LayoutError(
                "ChunkShardingSpec takes a placement for every chunk, got none; write ['rank:0/cpu', ...]"
            )
        self.dim, self.placements = dim, [remote_device(placement) for placement in placements]

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Metadata of a tensor of these sizes; raises LayoutError if it lacks the dim."""
        ndim = len(tensor_sizes)
        if not -ndim <= self.dim < ndim:
            raise LayoutError(f"{self} cuts dim {self.dim} of a tensor of size {tuple(tensor_sizes)}, which has {ndim}")
        dim, length = self.dim % ndim, tensor_sizes[self.dim]
        size = -(-length // len(self.placements))
        shards = []
        for number, placement in enumerate(self.placements):
            offsets, sizes = [0] * ndim, list(tensor_sizes)
            offsets[dim] = min(size * number, length)
            sizes[dim] = min(size * (number + 1), length) - offsets[dim]
            shards.append(ShardMetadata(offsets, sizes, placement))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)


@checked_class
@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Explicit list of shards of any sizes: a rank may have several, none, or empty ones.

    Raises LayoutError for an empty list, shards of different numbers of dims, and overlapping shards; `build_metadata`
    refuses shards that do not cover the tensor.

    >>> halves = [ShardMetadata([0], [1], "rank:0/cpu"), ShardMetadata([1], [4], "rank:1/cpu")]
    >>> EnumerableShardingSpec(halves).build_metadata(torch.Size([5]), TensorProperties()).size
    torch.Size([5])
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        check_disjoint(self.shards)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Metadata of a tensor of these sizes; raises LayoutError where the shards do not cover it or reach beyond
        it."""
        check_covers(self.shards, tensor_sizes)
        return ShardedTensorMetadata(
            [shard.copy() for shard in self.shards], torch.Size(tensor_sizes), tensor_properties
        )


def check_disjoint(shards: Sequence[ShardMetadata]) -> None:
    """LayoutError for no shards, for shards of different numbers of dims, and naming two that overlap."""
    if not shards:
        raise LayoutError("a tensor has one shard or more, got an empty list of shards")
    for shard in shards:
        if len(shard.shard_sizes) != len(shards[0].shard_sizes):
            raise LayoutError(
                f"shards of one tensor have equally many dims, got {len(shards[0].shard_sizes)} in {shards[0]} and "
                f"{len(shard.shard_sizes)} in {shard}"
            )
    pair = first_overlap([shard.box for shard in shards])
    if pair is not None:
        raise LayoutError(f"shards {shards[pair[0]]} and {shards[pair[1]]} overlap; an element lies in one shard only")


def check_covers(shards: Sequence[ShardMetadata], sizes: Sequence[int]) -> None:
    """LayoutError where disjoint shards reach beyond a tensor of these sizes or leave some of it out."""
    for shard in shards:
        if len(shard.shard_sizes) != len(sizes):
            raise LayoutError(
                f"{shard} has {len(shard.shard_sizes)} dims, the tensor of size {tuple(sizes)} {len(sizes)}"
            )
        if any(stop > size for (_, stop), size in zip(shard.box, sizes, strict=True)):
            raise LayoutError(f"{shard} reaches beyond the tensor of size {tuple(sizes)}")
    held = sum(prod(shard.shard_sizes) for shard in shards)
    if held != prod(sizes):
        raise LayoutError(
            f"the shards have {held} elements in all, the tensor of size {tuple(sizes)} {prod(sizes)}; together they "
            "make up the whole tensor"
        )


def infer_sharding_spec(metadata: ShardedTensorMetadata) -> ShardingSpec:
    """Spec that gives these shards: chunks of the one dim that is cut where they are, else the shards one by one."""
    shards = metadata.shards_metadata
    cut = [dim for dim, size in enumerate(metadata.size) if any(shard.shard_sizes[dim] != size for shard in shards)]
    if len(cut) == 1 and all(shard.placement is not None for shard in shards):
        in_order = sorted(shards, key=lambda shard: (shard.shard_offsets[cut[0]], -shard.shard_sizes[cut[0]]))
        chunks = ChunkShardingSpec(cut[0], [shard.placement for shard in in_order if shard.placement is not None])
        found = chunks.build_metadata(metadata.size, metadata.tensor_properties)
        if found.shards_metadata == in_order:
            return chunks
    return EnumerableShardingSpec([shard.copy() for shard in shards])


def check_spec(spec: Any) -> None:
    """TypeError for what is no spec of this package."""
    if not isinstance(spec, ShardingSpec):
        raise ArgumentError(
            f"a sharding spec is a tritondt.sharded.ShardingSpec, such as ChunkShardingSpec(0, ['rank:0/cpu', ...]), "
            f"got {type(spec).__module__}.{type(spec).__qualname__}"
        )


def built_metadata(spec: ShardingSpec, size: Sequence[int], properties: TensorProperties) -> ShardedTensorMetadata:
    """Metadata that a spec, of the user's too, gives for a tensor; LayoutError where shards do not make it up."""
    metadata = spec.build_metadata(torch.Size(size), TensorProperties(**vars(properties)))
    check_disjoint(metadata.shards_metadata)
    check_covers(metadata.shards_metadata, size)
    return metadata


def flat_size(size: Sequence[Any]) -> torch.Size:
    """A size given as ints or as one sequence of them; TypeError for anything else."""
    dims = list(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else list(size)
    if any(isinstance(dim, bool) or not isinstance(dim, int) for dim in dims):
        raise ArgumentError(f"a size is ints, or one sequence of ints, got {dims}")
    return torch.Size(dims)
