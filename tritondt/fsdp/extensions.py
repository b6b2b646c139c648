"""The extension by which torch's FullyShardedDataParallel shards parameters that are distributed tensors already.

That class flattens what a rank holds of its parameters, and asks an extension for what goes in and comes out.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as HeldShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _init_utils
from torch.distributed.fsdp._common_utils import _set_fsdp_flattened
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions as TorchExtensions

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import FullyShardError, LayoutError, MeshError
from tritondt.fsdp.meshes import axes_in, data_mesh
from tritondt.fsdp.parameter import ShardedParameter, User
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec


class DTensorExtensions(TorchExtensions):
    """Extension of FullyShardedDataParallel for distributed tensors, of this library and of torch.

    `device_handle` is torch's module of the device (torch.cpu, torch.cuda), on whose `compute_stream` parameters are
    rebuilt. Shards may be uneven, and the data mesh may have an axis that replicates. Made by
    FullyShardedDataParallel, after `register_fsdp_extensions`. Source: torch.distributed.tensor.parallel.fsdp.

    >>> DTensorExtensions(torch.cpu).pre_flatten_transform(torch.ones(2))
    (tensor([1., 1.]), None)
    """

    def __init__(self, device_handle: Any) -> None:
        super().__init__(device_handle)

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """This rank's part of a distributed tensor, and the spec that rebuilds it; a plain tensor and None."""
        if isinstance(tensor, DTensor):
            return tensor._local_tensor.detach().requires_grad_(tensor.requires_grad), tensor._spec
        return super().pre_flatten_transform(tensor)

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        """Distributed tensor of this rank's part, made on the compute stream."""
        if not isinstance(param_extension, DTensorSpec):
            return super().post_unflatten_transform(tensor, param_extension)
        spec = param_extension
        with self.device_handle.stream(self.compute_stream or self.device_handle.current_stream()):
            found = DTensor.from_local(
                tensor, spec.mesh, spec.placements, shape=spec.shape, stride=spec.tensor_meta.stride, order=spec.order
            )
            _set_fsdp_flattened(found)
        return found

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> Any:
        """This rank's part, on the mesh of data and tensor axes, of a tensor that each data rank has whole.

        Not collective. MeshError where `device_mesh` is no slice of a mesh with a tensor axis.
        """
        data = data_mesh(device_mesh, None)
        values = tensor.detach()
        if not isinstance(values, DTensor):
            if data.axes is None or data.whole.ndim <= data.mesh.ndim:
                raise MeshError(
                    f"chunk_dtensor got {data.mesh}; allowed is a slice of a mesh that has a tensor axis too"
                )
            values = _replicated(values, device_mesh)
            if values.ndim == 0:
                return values
            data = data._replace(is_whole=True)
        parameter = nn.Parameter(values, requires_grad=False)
        found = ShardedParameter([User(nn.Module(), "", "a tensor of a state dict")], parameter, data, 0, None)
        return DTensor(found.shard.clone(), found.spec)

    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """ShardedTensor over the tensor axis, of which each rank holds one over `pg`: not collective."""
        if not isinstance(tensor, DTensor):
            return super().chunk_tensor(tensor, rank, world_size, num_devices_per_node, pg, device)
        spec, local = tensor._spec, tensor._local_tensor.detach()
        inner = _create_chunk_sharded_tensor(local, rank, world_size, num_devices_per_node, pg)
        described = _metadata(spec, tensor)
        own = dist.get_rank()
        held = next(each for each in described.shards_metadata if _rank_of(each) == own)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [HeldShard(inner, held)],
            sharded_tensor_metadata=described,
            process_group=_group(spec),
            init_rrefs=False,
        )

    def all_gather_dtensor(self, tensor: Any, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Gathers a tensor over the data axes, and returns the part that the tensor axis, the last one, gives this
        rank: a collective call of the data axes."""
        if not isinstance(tensor, DTensor):
            return super().all_gather_dtensor(tensor, parent_mesh)
        spec = tensor._spec
        if parent_mesh is not None and not _is_of(parent_mesh, spec.mesh):
            raise MeshError(
                f"{spec} is loaded into a module on {canonical_mesh(parent_mesh)}; it must be on that mesh, or on a "
                "slice of it"
            )
        placements = [Replicate()] * (spec.mesh.ndim - 1)
        return tensor.redistribute(placements=[*placements, spec.placements[-1]], order=spec.order).to_local()


def _is_of(parent: DeviceMesh, mesh: Mesh) -> bool:
    """Whether a mesh is a slice of a DeviceMesh, or of axes that were made of its own."""
    if axes_in(canonical_mesh(parent), mesh) is not None:
        return True
    return mesh.device_mesh is not None and mesh.device_mesh._get_root_mesh() == parent._get_root_mesh()


def _replicated(tensor: torch.Tensor, device_mesh: DeviceMesh) -> DTensor:
    """Plain tensor, alike on all ranks of the whole mesh, as a distributed one."""
    whole = canonical_mesh(device_mesh._get_root_mesh())
    return DTensor.from_local(tensor.clone(), whole, [Replicate()] * whole.ndim)


def _group(spec: DTensorSpec) -> dist.ProcessGroup:
    mesh = spec.device_mesh
    if spec.mesh.ndim != 1 or not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"a ShardedTensor of {spec} needs a process group; allowed is a DeviceMesh of one axis, or a state dict of "
            "distributed tensors, which FullyShardedDataParallel(device_mesh=mesh['dp']) gives"
        )
    return mesh.get_group()


def _rank_of(shard: ShardMetadata) -> int | None:
    placement: Any = shard.placement
    rank: int | None = placement.rank()
    return rank


def _metadata(spec: DTensorSpec, tensor: DTensor) -> ShardedTensorMetadata:
    """Description of the whole tensor: the box of every rank, of this one alone where all have everything."""
    own = dist.get_rank()
    coordinates = (
        spec.layout.coordinates() if not spec.placements[0].is_replicate() else [(spec.mesh.ranks.index(own),)]
    )
    shards = []
    for coordinate in coordinates:
        region = spec.layout.region(coordinate)
        if any(len(intervals) > 1 for intervals in region):
            raise LayoutError(
                f"a ShardedTensor of {spec}, of which a rank has several boxes; allowed is a state dict of distributed "
                "tensors, which FullyShardedDataParallel(device_mesh=mesh['dp']) gives"
            )
        offsets = [
            intervals[0][0] if intervals else length for intervals, length in zip(region, spec.shape, strict=True)
        ]
        rank = spec.mesh.ranks[spec.layout.position(coordinate)]
        sizes = list(spec.layout.local_shape(coordinate))
        shards.append(ShardMetadata(offsets, sizes, f"rank:{rank}/{tensor._local_tensor.device}"))
    properties = TensorProperties(dtype=spec.dtype, layout=torch.strided, requires_grad=False)
    return ShardedTensorMetadata(shards, torch.Size(spec.shape), properties)


def register_fsdp_extensions() -> None:
    """Lets torch's FullyShardedDataParallel take distributed tensors of this library; once, before the first is made.

    Not collective. FullyShardedDataParallel(model, device_mesh=mesh["dp"]) then shards modules that
    `parallelize_module` has laid out over mesh["tp"], with either value of `use_orig_params`.

    >>> register_fsdp_extensions()
    >>> _init_utils.DTensorExtensions is DTensorExtensions  # which FullyShardedDataParallel makes for its mesh
    True
    """
    modules: tuple[Any, Any] = (_init_utils, _flat_param)
    initializing, flattening = modules
    if initializing.DTensorExtensions is DTensorExtensions:
        return
    initializing.DTensorExtensions = DTensorExtensions
    wrapper: Any = FullyShardedDataParallel
    for name, place in (("clip_grad_norm_", 0), ("_optim_state_dict_impl", 0), ("_optim_state_dict_to_load_impl", 1)):
        setattr(wrapper, name, _without_distributed_parameters(wrapper, name, place))
    flattening._same_storage = _same_storage_with(flattening._same_storage)
    handle = flattening.FlatParamHandle
    handle._use_unsharded_views = _with_distributed_parameters(handle._use_unsharded_views)


def _without_distributed_parameters(wrapper: Any, name: str, place: int) -> Any:
    """Method `name` of FullyShardedDataParallel, refused where it would take what a rank holds for the whole.

    The module is its argument number `place`, or the keyword `model`.
    """
    before = getattr(wrapper, name)

    def checked(*args: Any, **kwargs: Any) -> Any:
        model = args[place] if len(args) > place else kwargs["model"]
        for module in FullyShardedDataParallel.fsdp_modules(model):
            handle: Any = module._handle
            if handle is not None and any(
                isinstance(each, DTensorSpec) for each in handle.flat_param._param_extensions
            ):
                raise FullyShardError(
                    f"FullyShardedDataParallel.{name} of {type(model).__name__}, whose parameters are cut over a "
                    "tensor axis: it counts what a rank holds for the whole; use tritondt.fsdp.fully_shard, with "
                    "torch.nn.utils.clip_grad_norm_ and optimizer.state_dict()"
                )
        return before(*args, **kwargs)

    return checked if name == "clip_grad_norm_" else staticmethod(checked)


def _same_storage_with(before: Any) -> Any:
    def same_storage(first: Any, second: Any) -> Any:
        """Whether two tensors, or the parts that this rank has of distributed ones, share memory."""
        parts = (each._local_tensor if isinstance(each, DTensor) else each for each in (first, second))
        return before(*parts)

    return same_storage


def _with_distributed_parameters(before: Any) -> Any:
    """The function that shows whole parameters, with parameters of our class in place of those that it cannot set.

    It sets `.data` of a plain parameter, but for torch's own class.
    """

    def use_unsharded_views(handle: Any, as_params: bool) -> None:
        flat = handle.flat_param
        extensions = flat._param_extensions
        if not (as_params and handle._use_orig_params and any(isinstance(each, DTensorSpec) for each in extensions)):
            before(handle, as_params)
            return
        kept = flat._params
        flat._params = [
            nn.Parameter(DTensor(held.new_empty(spec.local_shape), spec), held.requires_grad)
            if isinstance(spec, DTensorSpec)
            else held
            for held, spec in zip(kept, extensions, strict=True)
        ]
        try:
            before(handle, as_params)
        finally:
            flat._params = kept

    return use_unsharded_views
