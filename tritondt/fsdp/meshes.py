"""Meshes of data parallelism: the axes that shard and replicate parameters, beside those that cut tensors."""

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tritondt.errors import FullyShardError, MeshError
from tritondt.sharding.coordinates import coordinate_at, position_of
from tritondt.sharding.mesh import Mesh, canonical_mesh


class JointMesh(NamedTuple):
    """Mesh of data and tensor axes, in the order of the whole mesh, and the numbers that both have in it."""

    mesh: Mesh
    data_axes: tuple[int, ...]
    tensor_axes: tuple[int, ...]


class DataMesh(NamedTuple):
    """Mesh over which parameters are sharded: of one axis, or of one that replicates and one that shards.

    `axes` are the numbers of its axes in `whole`, the mesh that has the tensor axes too; None where `whole` does not
    have them, such as one that was flattened. The last ones, of sizes `cuts`, shard; in `mesh` they are one axis. With
    `is_whole` every parameter is laid over all of `whole`.
    """

    mesh: Mesh
    whole: Mesh
    axes: tuple[int, ...] | None
    is_whole: bool
    cuts: tuple[int, ...]

    @property
    def shard_axis(self) -> int:
        """Number of the axis that shards, the last one."""
        return self.mesh.ndim - 1

    def in_groups_of(self, num_ranks: int) -> "DataMesh":
        """Data mesh of the same ranks in which only each `num_ranks` neighbours on the axis that shards share it."""
        *others, size = self.mesh.shape
        shape = (*others, size // num_ranks, num_ranks)
        mesh = Mesh(shape, ranks=self.mesh.ranks, device_type=self.mesh.device_type)
        return DataMesh(mesh, mesh, None, is_whole=False, cuts=(num_ranks,))

    def beside(self, tensor_mesh: Mesh | None) -> JointMesh:
        """Joint mesh with the axes of `tensor_mesh`; MeshError where no mesh is known that has both."""
        if tensor_mesh is None and not self.is_whole:
            return JointMesh(self.mesh, tuple(range(self.mesh.ndim)), ())
        if self.is_whole:
            assert self.axes is not None, "axes that were named are known"
            if tensor_mesh is self.whole:
                return JointMesh(self.whole, self.axes, tuple(range(self.whole.ndim)))
            return JointMesh(self.whole, self.axes, () if tensor_mesh is None else self._axes_of(tensor_mesh))
        assert tensor_mesh is not None, "a joint mesh without tensor axes is the data mesh"
        self._check_apart(tensor_mesh)
        tensor_axes = self._find_axes(tensor_mesh)
        if self.axes is None or tensor_axes is None:
            return self._concatenated(tensor_mesh)
        axes = sorted((*self.axes, *tensor_axes))
        return JointMesh(
            slice_of(self.whole, axes),
            tuple(axes.index(axis) for axis in self.axes),
            tuple(axes.index(axis) for axis in tensor_axes),
        )

    def _concatenated(self, tensor_mesh: Mesh) -> JointMesh:
        """Mesh of the axes of both, data axes first, where they come from one DeviceMesh, flattened or unflattened."""
        data, tensor = self.mesh.device_mesh, tensor_mesh.device_mesh
        concatenate = getattr(DeviceMesh, "_concatenate", None)  # from torch 2.10 on
        try:
            if concatenate is None or not (data and data.mesh_dim_names and tensor and tensor.mesh_dim_names):
                raise RuntimeError("they are no slices of one DeviceMesh")
            joint = canonical_mesh(concatenate([data, tensor]))
        except RuntimeError as error:
            raise MeshError(
                f"fully_shard got {self.mesh}, which says nothing of {tensor_mesh}, over which parameters are cut; "
                "allowed is a slice of a DeviceMesh that has both (mesh['dp']), or the whole mesh with "
                "dp_mesh_dims=DataParallelMeshDims(shard='dp')"
            ) from error
        numbers = tuple(range(joint.ndim))
        return JointMesh(joint, numbers[: self.mesh.ndim], numbers[self.mesh.ndim :])

    def without_data(self) -> Mesh | None:
        """Mesh of the axes of the whole mesh that are not for data; None where there are none."""
        others = self._others()
        return slice_of(self.whole, others) if others else None

    def _others(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(self.whole.ndim) if axis not in (self.axes or ()))

    def _check_apart(self, tensor_mesh: Mesh) -> None:
        if set(tensor_mesh.ranks) & set(self.mesh.ranks) != {tensor_mesh.identity.rank}:
            raise MeshError(
                f"fully_shard got {self.mesh} for parameters that are cut over {tensor_mesh} already, and the two "
                "share ranks; allowed is another axis, along which they are whole, as mesh['dp'] beside mesh['tp']"
            )

    def _find_axes(self, tensor_mesh: Mesh) -> tuple[int, ...] | None:
        """Numbers of the axes of `tensor_mesh` in the whole mesh; None where that does not have them."""
        for axes in combinations(self._others(), tensor_mesh.ndim):
            found = slice_of(self.whole, axes)
            if (found.ranks, found.shape) == (tensor_mesh.ranks, tensor_mesh.shape):
                return axes
        return None

    def _axes_of(self, tensor_mesh: Mesh) -> tuple[int, ...]:
        self._check_apart(tensor_mesh)
        found = self._find_axes(tensor_mesh)
        if found is None:
            raise MeshError(
                f"fully_shard got axes of {self.whole}, which has no axis like {tensor_mesh}, over which parameters "
                "are cut; allowed are slices of one mesh for both"
            )
        return found


def slice_of(whole: Mesh, axes: Sequence[int]) -> Mesh:
    """Mesh of some axes of `whole` through the calling rank, at its own index on the others."""
    own = whole.coordinate
    if own is None:
        raise MeshError(f"{whole} does not have this rank, {whole.identity.rank}; only its ranks can take a part of it")
    shape = tuple(whole.shape[axis] for axis in axes)
    ranks = []
    for position in range(prod(shape)):
        coordinate = list(own)
        for axis, index in zip(axes, coordinate_at(position, shape), strict=True):
            coordinate[axis] = index
        ranks.append(whole.ranks[position_of(coordinate, whole.shape)])
    names = None if whole.names is None else tuple(whole.names[axis] for axis in axes)
    found = Mesh(shape, names, ranks=ranks, device_type=whole.device_type)
    if found.device_mesh is None and whole.device_mesh is not None and names and list(axes) == sorted(axes):
        found.device_mesh = whole.device_mesh[names]
    return found


def data_mesh(mesh: DeviceMesh | Mesh | None, dims: Any) -> DataMesh:
    """Data mesh of the arguments of `fully_shard`; `dims` names axes of `mesh` where that has tensor axes too."""
    given = _mesh_of_world() if mesh is None else mesh
    found = canonical_mesh(given)
    if found.coordinate is None:
        raise MeshError(f"fully_shard was called on rank {found.identity.rank}, which is not in {found}")
    if dims is not None:
        return _of_named_axes(found, dims)
    if found.ndim > 2:
        raise MeshError(
            f"fully_shard takes a mesh of one axis, or of one that replicates and one that shards, got {found}; "
            "give it a slice, as mesh['dp'] or mesh['replicate', 'shard'], or dp_mesh_dims=DataParallelMeshDims("
            "shard=('dp', 'cp')) with the whole mesh"
        )
    whole = _root_of(given)
    cuts = found.shape[-1:]
    return DataMesh(found, found if whole is None else whole, axes_in(whole, found), is_whole=False, cuts=cuts)


def _of_named_axes(whole: Mesh, dims: Any) -> DataMesh:
    """Data mesh of axes of `whole`; several that shard, or that replicate, are one axis of it."""
    replicate, shard = (tuple(whole.axis(name) for name in _names(given)) for given in (dims.replicate, dims.shard))
    axes = (*replicate, *shard)
    if not shard or len(set(axes)) != len(axes):
        raise MeshError(
            f"fully_shard got dp_mesh_dims={dims!r}; allowed are one or more axes that shard, and others that replicate"
        )
    mesh = slice_of(whole, axes)
    if len(shard) > 1 or len(replicate) > 1:
        sizes = [prod(whole.shape[axis] for axis in found) for found in (replicate, shard) if found]
        mesh = Mesh(sizes, ranks=mesh.ranks, device_type=whole.device_type)
    return DataMesh(mesh, whole, axes, is_whole=True, cuts=tuple(whole.shape[axis] for axis in shard))


def _names(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _mesh_of_world() -> DeviceMesh | Mesh:
    if not dist.is_initialized():
        raise FullyShardError("fully_shard got no mesh; allowed without one is a world of torch.distributed")
    return init_device_mesh("cuda" if dist.get_backend() == "nccl" else "cpu", (dist.get_world_size(),))


def _root_of(mesh: DeviceMesh | Mesh) -> Mesh | None:
    """The mesh that a DeviceMesh was sliced from, itself where it was not; None for a Mesh, which does not know."""
    if isinstance(mesh, Mesh):
        return None
    return canonical_mesh(mesh._get_root_mesh())


def axes_in(whole: Mesh | None, part: Mesh) -> tuple[int, ...] | None:
    """Numbers of the axes of `part` in `whole`; None where it is no slice of it."""
    if whole is None:
        return None
    for axes in combinations(range(whole.ndim), part.ndim):
        found = slice_of(whole, axes)
        if (found.ranks, found.names) == (part.ranks, part.names):
            return axes
    return None
