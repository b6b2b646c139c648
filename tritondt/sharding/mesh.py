"""Canonical meshes: ranks of one world in a grid, as one rank sees them.

torch's DeviceMesh compares equal across ranks and across worlds, so it cannot key anything that depends on
either; a `Mesh` can, and equal meshes are one object.
"""

import os
import threading
import types
from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.device_mesh import init_device_mesh as _torch_init_device_mesh

from tritondt import identity
from tritondt.errors import MeshError
from tritondt.errors.arguments import check_types, checked
from tritondt.identity import Identity
from tritondt.sharding.coordinates import coordinate_at, ranks_text

_interned: "WeakValueDictionary[object, Mesh]" = WeakValueDictionary()
_interning = threading.Lock()
# The attribute of torch's meshes that has their canonical form, and those that have one, by id: equal ones are several.
_CANONICAL = "_tritondt_mesh"
_converted: "WeakValueDictionary[int, DeviceMesh]" = WeakValueDictionary()
os.register_at_fork(before=_interning.acquire, after_in_parent=_interning.release, after_in_child=_interning.release)


class Mesh:
    """Grid of ranks of the calling thread's world, its axes named or not; equal meshes are one object.

    `shape` has the size of each axis; `names`, one different name per axis, are optional; `ranks` are ranks of the
    world in row-major order (default: 0, 1, ...); `device_type` is that of local tensors, "cpu" or "cuda". A mesh needs
    no process groups, so any rank may make one at any time without the others: not a collective call. `coordinate` is
    this rank's index on every axis, None where this rank is not in the mesh.

    Raises MeshError where the world has not enough ranks, or where ranks or names do not fit the shape; WorldError
    where there is no world.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> mesh = run_ranks(4, lambda rank: Mesh((2, 2), ("dp", "tp")))[3]
    >>> mesh, mesh.coordinate, mesh.axis("tp")
    (Mesh(dp=2, tp=2 over ranks 0..3, cpu), (1, 1), 1)
    """

    __slots__ = ("__weakref__", "coordinate", "device_mesh", "device_type", "identity", "names", "ranks", "shape")

    identity: Identity
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    ranks: tuple[int, ...]
    device_type: str
    coordinate: tuple[int, ...] | None
    device_mesh: DeviceMesh | None

    @checked
    def __new__(
        cls,
        shape: Sequence[int],
        names: Sequence[str] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        device_type: str = "cpu",
    ) -> "Mesh":
        """Interned mesh of the given values in the calling thread's world."""
        # A text has names of one letter each: Mesh((2, 2), "ab").
        if type(names) not in (tuple, str, types.NoneType) or type(device_type) is not str:
            check_types(cls.__new__, names=names, device_type=device_type)
        who = identity.current()
        shape, names = tuple(shape), None if names is None else tuple(names)
        ranks = tuple(range(prod(shape))) if ranks is None else tuple(ranks)
        key = (who, shape, names, ranks, device_type)
        with _interning:
            found = _interned.get(key)
            if found is not None:
                return found
            _check(shape, names, ranks, who.size)
            made = object.__new__(cls)
            made.identity, made.shape, made.names = who, shape, names
            made.ranks, made.device_type, made.device_mesh = ranks, device_type, None
            made.coordinate = coordinate_at(ranks.index(who.rank), shape) if who.rank in ranks else None
            _interned[key] = made
            return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _mesh_from, (self.shape, self.names, self.ranks, self.device_type)

    def __repr__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        if self.names is not None:
            sizes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))
        return f"Mesh({sizes} over ranks {ranks_text(self.ranks)}, {self.device_type})"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def axis(self, name: int | str) -> int:
        """Number of the axis of a name; an int is a number already, counted from the end where negative."""
        if isinstance(name, int):
            if -self.ndim <= name < self.ndim:
                return name % self.ndim
        elif self.names is not None and name in self.names:
            return self.names.index(name)
        raise MeshError(f"{self} has no axis {name!r}; allowed are {self.names or ''} and 0..{self.ndim - 1}")


def _check(shape: tuple[int, ...], names: tuple[str, ...] | None, ranks: tuple[int, ...], world_size: int) -> None:
    if not shape or any(size < 1 for size in shape):
        raise MeshError(f"a mesh needs one or more axes of size 1 or more, got shape {shape}")
    if prod(shape) != len(ranks) or len(set(ranks)) != len(ranks):
        raise MeshError(f"a mesh of shape {shape} takes {prod(shape)} different ranks, got {ranks_text(ranks)}")
    if names is not None and not all(isinstance(name, str) for name in names):
        raise MeshError(f"a mesh takes names of axes, each a str, got {names}")
    if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
        raise MeshError(f"a mesh of shape {shape} takes {len(shape)} different names, got {names}")
    if min(ranks) < 0 or max(ranks) >= world_size:
        raise MeshError(
            f"a mesh of shape {shape} needs rank {max(ranks)}, but the world has {world_size} ranks "
            f"(0..{world_size - 1}); start {max(ranks) + 1} or make the mesh smaller"
        )


def _mesh_from(shape: tuple[int, ...], names: tuple[str, ...] | None, ranks: tuple[int, ...], device_type: str) -> Mesh:
    return Mesh(shape, names, ranks=ranks, device_type=device_type)


def canonical_mesh(mesh: "Mesh | DeviceMesh") -> Mesh:
    """Canonical form of a DeviceMesh or a Mesh in the calling thread's world; MeshError for anything else."""
    if isinstance(mesh, Mesh):
        here = identity.current()
        if mesh.identity is not here and mesh.identity != here:
            raise MeshError(f"{mesh} was made in another world; make it again in this one")
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"a mesh is a DeviceMesh or a tritondt Mesh, got {type(mesh).__name__}")
    if is_dynamo_compiling():
        # Torch's meshes are opaque in a graph. Raising breaks the graph here, and the call runs outside it.
        raise MeshError(f"within a graph of torch.compile a mesh is a tritondt Mesh, got a {type(mesh).__name__}")
    who = identity.current()
    known: tuple[Identity, Mesh] | None = mesh.__dict__.get(_CANONICAL)
    if known is not None and (known[0] is who or known[0] == who):
        return known[1]
    found = Mesh(
        tuple(mesh.mesh.shape),
        mesh.mesh_dim_names,
        ranks=mesh.mesh.flatten().tolist(),
        device_type=mesh.device_type,
    )
    found.device_mesh = found.device_mesh or mesh
    mesh.__dict__[_CANONICAL] = who, found
    _converted[id(mesh)] = mesh
    return found


def _forget_canonical() -> None:
    """Takes the canonical forms away from torch's meshes: each has the other, and torch's the groups of its world."""
    for mesh in tuple(_converted.values()):
        mesh.__dict__.pop(_CANONICAL, None)
    _converted.clear()


identity.on_end(_forget_canonical)


def mesh_or_current(mesh: "DeviceMesh | Mesh | None") -> "DeviceMesh | Mesh":
    """The given mesh, or that of the surrounding `with mesh:` where None is given; MeshError where there is none."""
    if mesh is not None:
        return mesh
    if not _mesh_resources.mesh_stack:
        raise MeshError("no mesh was given, and there is no `with mesh:` around the call; give it a device_mesh")
    return _mesh_resources.get_current_mesh()


@checked
def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None, **options: Any
) -> DeviceMesh:
    """Makes a DeviceMesh of `mesh_shape` over ranks 0, 1, ... of the world, with torch's function of this name.

    `device_type` is "cpu" or "cuda", `mesh_shape` the size of each axis, `mesh_dim_names` one name per axis; further
    options are torch's. A collective call of all ranks, since torch makes process groups. Raises MeshError, before any
    group is made, for a mesh larger than the world; torch's own errors for its options. Source:
    torch.distributed.device_mesh.init_device_mesh.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("fake", rank=0, world_size=4)
    >>> init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).mesh.tolist()
    [[0, 1], [2, 3]]
    >>> dist.destroy_process_group()
    """
    shape = tuple(mesh_shape)
    if dist.is_initialized():
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        _check(shape, names, tuple(range(prod(shape))), dist.get_world_size())
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    return _torch_init_device_mesh(device_type, shape, mesh_dim_names=names, **options)
