"""ShardedTensor: shards of any boxes, any number of them to a rank, beside the metadata of all."""

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import LayoutError, PropagationError, TransportError
from tritondt.errors.arguments import checked_class
from tritondt.planning.box_exchange import Boxes
from tritondt.sharded.dtensor_layouts import laid_out, shards_of, shared_dtensor
from tritondt.sharded.groups import Group, boxes_of, device_type_of, mesh_of, own_device
from tritondt.sharded.held import HeldShards, gather_whole, moved_shards
from tritondt.sharded.metadata import Shard, ShardedTensorMetadata, TensorProperties
from tritondt.sharded.saving import saved_state
from tritondt.sharded.specs import ShardingSpec, built_metadata, check_spec, flat_size, infer_sharding_spec
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement

_FORMATS = (torch.preserve_format, torch.contiguous_format)


@checked_class
class ShardedTensor(torch.Tensor):
    """A tensor in shards, of which every rank of a group holds those that `sharding_spec` places on it.

    `ShardedTensor(spec, *size)` has uninitialized shards. `zeros`, `rand` and other functions of this package fill
    them, `init_from_local_shards` takes existing shards, and `spec.shard(tensor)` cuts a whole tensor. `process_group`
    is a process group, a mesh, or None for the world. Nothing is sent. Raises LayoutError, on all ranks alike, where
    the spec does not fit the size or the group; NotImplementedError with `init_rrefs`.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec
    >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> [tuple(x.local_tensor().shape) for x in run_ranks(2, lambda rank: ShardedTensor(spec, 5, 2))]
    [(3, 2), (2, 2)]
    """

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]
    _process_group: Group
    _mesh: Mesh
    _boxes: Boxes
    _init_rrefs = False
    # Of the result of a linear layer on rows of all ranks: how many of them each rank gave.
    _num_rows: Sequence[int] | None = None

    @staticmethod
    def __new__(
        cls: type["ShardedTensor"],
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> "ShardedTensor":
        """A tensor whose shards have undefined values."""
        if init_rrefs:
            raise NotImplementedError(
                "init_rrefs=True asks for torch.distributed.rpc's references to other ranks' shards, which are not "
                "made here; gather or reshard instead"
            )
        check_spec(sharding_spec)
        if layout is not torch.strided or memory_format is not torch.contiguous_format:
            raise LayoutError(
                f"shards are strided and contiguous, got layout={layout} and memory_format={memory_format}; leave both "
                "out"
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        properties = TensorProperties(dtype, layout, requires_grad, memory_format, pin_memory)
        metadata = built_metadata(sharding_spec, flat_size(size), properties)
        made = cls._assembled(sharding_spec, metadata, process_group)
        made._local_shards = [
            Shard(
                torch.empty(
                    shard.shard_sizes,
                    dtype=dtype,
                    device=None if shard.placement is None else shard.placement.device(),
                    requires_grad=requires_grad,
                    pin_memory=pin_memory,
                ),
                shard,
            )
            for shard in metadata.shards_metadata
            if shard.rank == made._mesh.identity.rank
        ]
        return made

    @classmethod
    def _assembled(
        cls,
        sharding_spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        process_group: Group,
        local_shards: Sequence[Shard] = (),
    ) -> "ShardedTensor":
        """The tensor of checked metadata and this rank's shards; LayoutError where ranks are not in the group."""
        mesh = mesh_of(process_group, device_type_of(metadata))
        boxes = boxes_of(metadata, mesh)
        properties = metadata.tensor_properties
        made: ShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            metadata.size,
            dtype=properties.dtype,
            layout=properties.layout,
            device=own_device(metadata, mesh),
            requires_grad=properties.requires_grad,
        )
        made._sharding_spec, made._metadata, made._local_shards = sharding_spec, metadata, list(local_shards)
        made._process_group, made._mesh, made._boxes = process_group, mesh, boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """A refusal: operators go through __torch_function__, and no kernel may meet a tensor without memory."""
        raise PropagationError(
            f"{func} was called on a sharded tensor from within torch, where it has no memory; call operators on "
            "local_shards(), or on to_dtensor()"
        )

    def _held(self) -> HeldShards:
        """This rank's shards beside what all ranks hold."""
        return HeldShards(self._mesh, self._boxes, self._metadata, [shard.tensor for shard in self._local_shards])

    def _with_tensors(self, tensors: Sequence[torch.Tensor], properties: TensorProperties) -> "ShardedTensor":
        """The tensor of new shards at the places, and on the devices, of this one's."""
        metadata = self._metadata.copy()
        metadata.tensor_properties = properties
        of_rank = [shard for shard in metadata.shards_metadata if shard.rank == self._mesh.identity.rank]
        shards = [Shard(tensor, found) for tensor, found in zip(tensors, of_rank, strict=True)]
        made = type(self)._assembled(self._sharding_spec, metadata, self._process_group, shards)
        made._num_rows = self._num_rows
        return made

    def metadata(self) -> ShardedTensorMetadata:
        """Metadata of the whole tensor, the same on all ranks."""
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        """Spec that cuts the tensor."""
        return self._sharding_spec

    def local_shards(self) -> list[Shard]:
        """Shards of this rank, in the metadata's order; none where it holds none."""
        return self._local_shards

    def local_tensor(self) -> torch.Tensor:
        """Tensor of this rank's one shard; NotImplementedError where the rank holds none or several."""
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"local_tensor() is the tensor of a rank's one shard, and rank {self._mesh.identity.rank} holds "
                f"{len(self._local_shards)}; use local_shards()"
            )
        return self._local_shards[0].tensor

    def remote_shards(self) -> dict[int, list[Any]]:
        """Raises RuntimeError: references to other ranks' shards need torch's RPC, which is not used here."""
        raise RuntimeError(
            "remote_shards() are references by torch.distributed.rpc, which tensors of tritondt.sharded do not have; "
            "gather or reshard instead"
        )

    def is_pinned(self, device: Any = None) -> bool:
        """Whether the shards are in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes the whole tensor to `out` on group rank `dst`; the other ranks pass no `out`. A collective call.

        Values travel as `dtype` (default: the tensor's) and are converted to that of `out`. `enforce_dtype` is
        deprecated. Before any value is sent, raises LayoutError for a `dst` outside the group. A rank whose `out` is
        missing, unexpected, or of another size raises LocalTensorError, and the others ShardingMismatchError, which all
        raise where `dst` or `dtype` differ.
        """
        if enforce_dtype:
            warnings.warn("enforce_dtype is deprecated; give dtype instead", FutureWarning, stacklevel=3)
        gather_whole(self._held(), dst, out, dtype)

    def reshard(self, resharding_spec: ShardingSpec) -> "ShardedTensor":
        """Changes the shards to those of another spec, in place, and returns the tensor: a collective call, one
        exchange.

        Ranks receive the elements they lack, for any two specs; unchanged shards do not move. It is differentiable: the
        gradient moves back, so every rank needs a shard, perhaps an empty one, before and after. Raises, on all ranks
        alike and before anything is sent, TypeError for anything but a spec and LayoutError for a spec that does not
        fit; MismatchError where ranks pass different ones.
        """
        check_spec(resharding_spec)
        metadata = built_metadata(resharding_spec, self._metadata.size, self._metadata.tensor_properties)
        if device_type_of(metadata) != self._mesh.device_type:
            raise LayoutError(
                f"reshard moves among devices of one type, {self._mesh.device_type} here, and was asked for "
                f"{device_type_of(metadata)}; call to() first"
            )
        boxes = boxes_of(metadata, self._mesh)
        if boxes != self._boxes:
            self._put(moved_shards(self._held(), boxes, own_device(metadata, self._mesh)), metadata)
        else:
            self._put([shard.tensor for shard in self._local_shards], metadata)
        self._sharding_spec, self._boxes = resharding_spec, boxes
        return self

    def _put(self, tensors: Sequence[torch.Tensor], metadata: ShardedTensorMetadata) -> None:
        of_rank = [shard for shard in metadata.shards_metadata if shard.rank == self._mesh.identity.rank]
        self._local_shards = [Shard(tensor, found) for tensor, found in zip(tensors, of_rank, strict=True)]
        self._metadata = metadata

    def to(self, *args: Any, process_group: Group = None, copy: bool = False, **kwargs: Any) -> "ShardedTensor":
        """Returns the tensor with shards of another dtype or device type, or this one where nothing changes; not
        collective.

        Arguments are those of torch.Tensor.to. Shards go to the current device of each rank. `process_group` replaces
        the group by one of the same ranks, where the other device type needs it. Raises LayoutError for a memory
        format.
        """
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if memory_format is not None and memory_format not in _FORMATS:
            raise LayoutError(f"shards are contiguous, got memory_format={memory_format}")
        found = own_device(self._metadata, self._mesh)
        device = found if device is None else torch.device(device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        dtype = self.dtype if dtype is None else dtype
        is_there = all(shard.tensor.device == device for shard in self._local_shards) and device.type == found.type
        if is_there and dtype is self.dtype and not copy and process_group is None:
            return self
        metadata = self._metadata.copy()
        properties = metadata.tensor_properties
        properties.dtype = dtype
        can_have_gradient = dtype.is_floating_point or dtype.is_complex
        properties.requires_grad = properties.requires_grad and can_have_gradient and torch.is_grad_enabled()
        metadata.shards_metadata = [
            shard if shard.rank != self._mesh.identity.rank and device.type == found.type else shard.on_device(device)
            for shard in metadata.shards_metadata
        ]
        own = [shard for shard in metadata.shards_metadata if shard.rank == self._mesh.identity.rank]
        shards = [
            Shard(shard.tensor.to(device, dtype, non_blocking=non_blocking, copy=copy), place)
            for shard, place in zip(self._local_shards, own, strict=True)
        ]
        group = self._process_group if process_group is None else process_group
        spec = self._sharding_spec if device.type == found.type else infer_sharding_spec(metadata)
        return type(self)._assembled(spec, metadata, group, shards)

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Group = None
    ) -> "ShardedTensor":
        """The tensor with shards on the CPU, or this one where they are there; arguments and errors as in `to`."""
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Group = None,
    ) -> "ShardedTensor":
        """The tensor with shards on each rank's current CUDA device, the only one that `device` may name.

        Arguments and errors as in `to`.
        """
        wanted = None if device is None else torch.device(device)
        if wanted is not None and wanted.index not in (None, torch.cuda.current_device()):
            raise TransportError(
                f"cuda() moves shards to each rank's current device, cuda:{torch.cuda.current_device()} here, and was "
                f"asked for {wanted}; call torch.cuda.set_device first, or reshard"
            )
        return self.to("cuda", non_blocking=non_blocking, memory_format=memory_format, process_group=process_group)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor], requires_grad: bool) -> "ShardedTensor":
        properties = self._metadata.copy().tensor_properties
        properties.requires_grad = requires_grad
        return self._with_tensors([change(shard.tensor) for shard in self._local_shards], properties)

    def clone(self, *, memory_format: torch.memory_format | None = None) -> "ShardedTensor":
        """A copy of the tensor, through which gradients pass; not collective."""
        if memory_format not in (None, *_FORMATS):
            raise LayoutError(f"shards are contiguous, got memory_format={memory_format}")
        requires_grad = self._metadata.tensor_properties.requires_grad and torch.is_grad_enabled()
        return self._each(torch.Tensor.clone, requires_grad)

    def detach(self) -> "ShardedTensor":
        """The tensor without its history, sharing memory; not collective."""
        return self._each(torch.Tensor.detach, requires_grad=False)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardedTensor":
        """This tensor, whose shards record gradients from now on, or no longer do; not collective."""
        for shard in self._local_shards:
            shard.tensor.requires_grad_(requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            super().requires_grad_(requires_grad)
        self._metadata.tensor_properties.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        made = self._each(lambda tensor: deepcopy(tensor, memo), self._metadata.tensor_properties.requires_grad)
        if getattr(self, "_is_param", False):
            made._is_param = True
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return saved_state(self)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor({self._metadata})"

    def to_dtensor(
        self, device_mesh: "DeviceMesh | Mesh | None" = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """Returns a distributed tensor with these values; gradients pass through.

        Without arguments it shares the shards' memory, on a mesh of the ranks with a shard, ordered along the cut dim,
        and sends nothing. Raises LayoutError unless every rank holds one shard at most, cut along one dim. With
        `device_mesh` and `placements` one exchange moves it to that layout, on a mesh within the group.
        """
        if device_mesh is None and placements is None:
            return shared_dtensor(self._held())
        if device_mesh is None or placements is None:
            raise LayoutError("to_dtensor takes device_mesh and placements together, or neither")
        return laid_out(self._held(), canonical_mesh(device_mesh), placements)

    @classmethod
    def from_dtensor(cls, tensor: DTensor, process_group: Group = None) -> "ShardedTensor":
        """Makes a sharded tensor from a distributed one; gradients pass through, and nothing is sent.

        Its group is that of the tensor's mesh unless `process_group`, which contains the mesh, is given. A shard shares
        the local tensor's memory where that is contiguous and in one piece. Raises LayoutError where elements are on
        several ranks, or a rank holds terms of them.
        """
        spec, (metadata, shards) = tensor._spec, shards_of(tensor)
        group = spec.mesh if process_group is None else process_group
        return cls._assembled(infer_sharding_spec(metadata), metadata, group, shards)
