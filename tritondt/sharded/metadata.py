"""Values that describe a sharded tensor: where each shard lies in it and on which rank, and what its elements are."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import _remote_device as RemoteDevice

from tritondt.errors import LayoutError
from tritondt.errors.arguments import check_types, checked, checked_class
from tritondt.sharding.intervals import Box
from tritondt.sharding.spec import check_not_quantised

# Memory formats cannot be pickled; their names can.
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


def remote_device(placement: "RemoteDevice | str") -> RemoteDevice:
    """The rank and device that "rank:1/cpu" names; a worker of torch's RPC, or no rank, is a LayoutError."""
    try:
        found = placement if isinstance(placement, RemoteDevice) else RemoteDevice(placement)
    except (ValueError, RuntimeError) as error:
        raise LayoutError(f"{placement!r} is no placement of a shard ({error}); write 'rank:0/cpu'") from error
    if found.rank() is None:
        raise LayoutError(f"{str(found)!r} names no rank; a shard is placed as 'rank:0/cpu' or 'rank:0/cuda:0'")
    return found


@dataclass(eq=True)
class ShardMetadata:
    """Place of one shard: its first index and its length in every dim, and the rank and device that hold it.

    `placement` is "rank:0/cpu", torch's `_remote_device`, or None if no rank is chosen yet. LayoutError for lists of
    different lengths, or for negative numbers.

    >>> ShardMetadata([0, 4], [2, 4], "rank:0/cpu").box
    ((0, 2), (4, 8))
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None = None

    @checked
    def __init__(
        self, shard_offsets: list[int], shard_sizes: list[int], placement: "RemoteDevice | str | None" = None
    ) -> None:
        self.shard_offsets, self.shard_sizes = list(shard_offsets), list(shard_sizes)
        self.placement = None if placement is None else remote_device(placement)
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise LayoutError(
                f"a shard has an offset and a size for every dim, got offsets {self.shard_offsets} and sizes "
                f"{self.shard_sizes}"
            )
        if min([*self.shard_offsets, *self.shard_sizes], default=0) < 0:
            raise LayoutError(
                f"offsets and sizes of a shard are 0 or more, got offsets {self.shard_offsets} and sizes "
                f"{self.shard_sizes}"
            )

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes, self.placement))

    @property
    def box(self) -> Box:
        """Indices of the shard, per dim."""
        return tuple((start, start + size) for start, size in zip(self.shard_offsets, self.shard_sizes, strict=True))

    @property
    def rank(self) -> int:
        """World rank that holds the shard; raises LayoutError without a placement."""
        if self.placement is None:
            raise LayoutError(f"{self} has no placement; a shard of a tensor is placed as 'rank:0/cpu'")
        found = self.placement.rank()
        assert found is not None, f"{self} names no rank"
        return found

    def on_device(self, device: torch.device) -> "ShardMetadata":
        """The same place, on another device of its rank."""
        return ShardMetadata(self.shard_offsets, self.shard_sizes, f"rank:{self.rank}/{device}")

    def copy(self) -> "ShardMetadata":
        """The same values, in lists of their own."""
        return ShardMetadata(self.shard_offsets, self.shard_sizes, self.placement)


@checked_class
@dataclass
class TensorProperties:
    """Properties of a sharded tensor's elements and memory, alike on all ranks; pickled by value.

    >>> TensorProperties.create_from_tensor(torch.ones(2, dtype=torch.int64)).dtype
    torch.int64
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    def __post_init__(self) -> None:
        check_types(type(self).__init__, **vars(self))
        check_not_quantised("a sharded tensor", self.dtype)

    def __getstate__(self) -> tuple[Any, ...]:
        names = {memory_format: name for name, memory_format in _MEMORY_FORMATS.items()}
        return self.dtype, self.layout, self.requires_grad, names[self.memory_format], self.pin_memory

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, name, self.pin_memory = state
        self.memory_format = _MEMORY_FORMATS[name]

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> "TensorProperties":
        """Properties of a plain tensor."""
        return TensorProperties(
            tensor.dtype, tensor.layout, tensor.requires_grad, torch.contiguous_format, tensor.is_pinned()
        )


@checked_class
@dataclass
class ShardedTensorMetadata:
    """Description of a whole sharded tensor, alike on all ranks: every shard's place, the size, the properties.

    >>> ShardedTensorMetadata([ShardMetadata([0], [3], "rank:0/cpu")], torch.Size([3])).size
    torch.Size([3])
    """

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=torch.Size)
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    def __post_init__(self) -> None:
        given = {"shards_metadata": self.shards_metadata, "tensor_properties": self.tensor_properties}
        check_types(type(self).__init__, **given)

    def copy(self) -> "ShardedTensorMetadata":
        """The same values, in lists of their own."""
        properties = TensorProperties(**vars(self.tensor_properties))
        return ShardedTensorMetadata([shard.copy() for shard in self.shards_metadata], self.size, properties)


@checked_class
@dataclass
class Shard:
    """One shard of a ShardedTensor on this rank: a tensor, and its place in the whole.

    LayoutError where the tensor's size or device is not that of the metadata.

    >>> Shard.from_tensor_and_offsets(torch.ones(2, 3), [4, 0], rank=1).metadata.box
    ((4, 6), (0, 3))
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if list(self.tensor.shape) != self.metadata.shard_sizes:
            raise LayoutError(
                f"a shard's tensor has the size that its metadata says, {self.metadata.shard_sizes}; found "
                f"{list(self.tensor.shape)}"
            )
        placement = self.metadata.placement
        if placement is not None and placement.device() != self.tensor.device:
            raise LayoutError(
                f"a shard's tensor is on the device that its metadata says, {placement.device()}; found "
                f"{self.tensor.device}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: list[int], rank: int) -> "Shard":
        """Makes the shard `tensor` on world rank `rank`, with these first indices; shares memory with the tensor."""
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.shape), f"rank:{rank}/{tensor.device}"))
