"""Axes of a mesh by name and size, and what each is used for.

Modules are cut over one, parameters are sharded over another, and a third has copies of what the two others have.
"""

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any, NamedTuple

from tritondt.errors import MeshError
from tritondt.sharding.coordinates import coordinate_at, position_of
from tritondt.sharding.mesh import canonical_mesh

_TENSOR_NAMES = ("tp", "tensor", "model")
_DATA_NAMES = ("dp", "fsdp", "data", "dp_shard", "shard")
_REPLICATE_NAMES = ("replicate", "dp_replicate")
_ROLES = ("tensor", "data", "replicate")


class MeshAxes(NamedTuple):
    """Names and sizes of the axes of a mesh, and which of them cuts modules, shards parameters and replicates these."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    tensor: str | None
    data: str | None
    replicate: str | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes whose ranks have parts of the batch of their own: the one that replicates, and the one that shards."""
        return tuple(name for name in (self.replicate, self.data) if name is not None)

    @property
    def num_parts(self) -> int:
        """Number of parts of the batch."""
        return prod(map(self.size, self.data_axes))

    def part_of(self, rank: int) -> int:
        """Number of the part of the batch that a rank has.

        >>> axes = MeshAxes(("replicate", "dp", "tp"), (2, 2, 2), "tp", "dp", "replicate")
        >>> [axes.part_of(rank) for rank in range(8)], axes.num_parts
        ([0, 0, 1, 1, 2, 2, 3, 3], 4)
        """
        indices = [self.index_along(name, rank) for name in self.data_axes]
        return position_of(indices, [self.size(name) for name in self.data_axes])

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return prod(self.sizes)

    def size(self, name: str | None) -> int:
        """Number of ranks along an axis; 1 for None.

        >>> MeshAxes(("dp", "tp"), (4, 8), "tp", "dp").size("tp")
        8
        """
        return 1 if name is None else self.sizes[self.names.index(name)]

    def ranks_along(self, names: str | tuple[str, ...] | None, rank: int) -> tuple[int, ...]:
        """Ranks of the slice along one axis, or along several, that `rank` is in; `rank` alone for None.

        >>> MeshAxes(("dp", "tp"), (2, 2), "tp", "dp").ranks_along("dp", 1)
        (1, 3)
        """
        along = (names,) if isinstance(names, str) else names or ()
        found, coordinate = [], list(coordinate_at(rank, self.sizes))
        for indices in product(*(range(self.size(name)) for name in along)):
            for name, index in zip(along, indices, strict=True):
                coordinate[self.names.index(name)] = index
            found.append(position_of(coordinate, self.sizes))
        return tuple(found)

    def index_along(self, name: str | None, rank: int) -> int:
        """Index of a rank on an axis; 0 for None."""
        return 0 if name is None else coordinate_at(rank, self.sizes)[self.names.index(name)]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def mesh_axes(mesh: Any, axes: Mapping[str, str] | None = None) -> MeshAxes:
    """Axes of a DeviceMesh, a Mesh or a mapping from names to sizes; `axes` says which has which of the roles.

    Without `axes` names do: tp, tensor or model; dp, fsdp, data, dp_shard or shard; replicate or dp_replicate.
    MeshError for an axis of over one rank that has no role, for two axes of one role, and for one that replicates
    without one that shards after it.

    >>> str(mesh_axes({"dp": 4, "tp": 8})), mesh_axes({"x": 2}, {"tensor": "x"}).tensor
    ('dp=4,tp=8', 'x')
    """
    names, sizes = named_sizes(mesh)
    roles = _roles(names, axes)
    for name, size in zip(names, sizes, strict=True):
        if size > 1 and name not in roles.values():
            raise MeshError(
                f"nothing can use the axis {name!r} of {size} ranks: plans are found over one axis that cuts modules "
                f"({', '.join(_TENSOR_NAMES)}), one that shards parameters ({', '.join(_DATA_NAMES)}), and one before "
                f"it that replicates them ({', '.join(_REPLICATE_NAMES)}); name it so, or say its role: "
                f"axes={{'tensor': {name!r}}}"
            )
    replicate, data = (roles.get(role) for role in ("replicate", "data"))
    if replicate is not None and (data is None or names.index(data) < names.index(replicate)):
        raise MeshError(
            f"the axis {replicate!r} replicates what an axis after it shards, and the mesh is {names}; allowed is "
            f"({replicate!r}, 'dp', ...), with one rank on dp where parameters are not sharded"
        )
    used = {name: role for role, name in roles.items() if sizes[names.index(name)] > 1}
    found = {role: name for name, role in used.items()}
    if "replicate" in found and data is not None:
        found["data"] = data  # of one rank, too: fully_shard averages gradients over both
    return MeshAxes(names, sizes, *(found.get(role) for role in _ROLES))


def named_sizes(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of the axes of a mesh; one axis without a name is "tp"."""
    if isinstance(mesh, Mapping):
        sizes = tuple(mesh.values())
        if not mesh or not all(type(size) is int and size > 0 for size in sizes):
            raise MeshError(f"find_plan got the mesh {dict(mesh)!r}; allowed are sizes of at least 1 by name")
        return tuple(mesh), sizes
    found = canonical_mesh(mesh)
    if found.names is None:
        if found.ndim > 1:
            raise MeshError(f"find_plan got {found} without names; allowed is a mesh whose axes are named")
        return ("tp",), found.shape
    return found.names, found.shape


def _roles(names: tuple[str, ...], axes: Mapping[str, str] | None) -> dict[str, str]:
    if axes is None:
        found: dict[str, str] = {}
        for role, known in zip(_ROLES, (_TENSOR_NAMES, _DATA_NAMES, _REPLICATE_NAMES), strict=True):
            fitting = [name for name in names if name in known]
            if len(fitting) > 1:
                raise MeshError(f"the axes {fitting} would both have the role {role!r}; say which: axes={{...}}")
            if fitting:
                found[role] = fitting[0]
        return found
    unknown = [role for role, name in axes.items() if role not in _ROLES or name not in names]
    if unknown:
        raise MeshError(f"axes got {dict(axes)!r}; allowed are the roles {_ROLES} with names of the mesh, {names}")
    if len(set(axes.values())) < len(axes):
        raise MeshError(f"axes got {dict(axes)!r}, two roles for one axis; allowed is an axis for each role")
    return dict(axes)
