"""Questions about a spec in the words of torch's sharding rules: by tensor dim, with -1 for a dim that is whole."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import LayoutError
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard


class ShardOrderEntry(NamedTuple):
    """A dim that is cut, and the axes of the mesh that cut it, the first cut first."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


class DimMaps:
    """Base of DTensorSpec with the names of torch's spec that rules written for torch.distributed.tensor read."""

    __slots__ = ()

    mesh: Mesh
    placements: tuple[Placement, ...]
    tensor_meta: Any
    ndim: Any
    order: tuple[int, ...]

    @property
    def shard_order(self) -> tuple[ShardOrderEntry, ...]:
        """For each dim that is cut, in order, the axes that cut it, the first cut first.

        >>> from tritondt.comm.transports.threads import run_ranks
        >>> from tritondt.sharding.spec import DTensorSpec, TensorMeta
        >>> def order(rank):
        ...     meta = TensorMeta.contiguous((5, 3))
        ...     return DTensorSpec(Mesh((2, 2)), [Shard(1), Shard(1)], meta, (1, 0)).shard_order
        >>> run_ranks(4, order)[0]
        (ShardOrderEntry(tensor_dim=1, mesh_dims=(1, 0)),)
        """
        axes_of: dict[int, list[int]] = {}
        for axis in self.order:
            placement = self.placements[axis]
            if isinstance(placement, Shard):
                axes_of.setdefault(placement.dim, []).append(axis)
        return tuple(ShardOrderEntry(dim, tuple(axes)) for dim, axes in sorted(axes_of.items()))

    @property
    def stride(self) -> tuple[int, ...]:
        """Global stride, in elements."""
        stride: tuple[int, ...] = self.tensor_meta.stride
        return stride

    @property
    def num_shards(self) -> int:
        """Number of different parts that the tensor is cut into, over all axes."""
        return prod(self.num_shards_map)

    @property
    def dim_map(self) -> list[int]:
        """The axis that cuts each dim, -1 where none does. Raises LayoutError where several cut one dim.

        >>> from tritondt.comm.transports.threads import run_ranks
        >>> from tritondt.sharding.spec import DTensorSpec, TensorMeta
        >>> def maps(rank):
        ...     spec = DTensorSpec(Mesh((2, 2)), [Shard(1), Partial()], TensorMeta.contiguous((5, 3)))
        ...     return spec.dim_map, spec.num_shards_map, spec.sums
        >>> run_ranks(4, maps)[0]
        ([-1, 0], [1, 2], [1])
        """
        found = [-1] * self.ndim
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                if found[placement.dim] >= 0:
                    raise LayoutError(
                        f"{self} has no dim_map: axes {found[placement.dim]} and {axis} both cut dim {placement.dim}; "
                        "read spec.placements and spec.order"
                    )
                found[placement.dim] = axis
        return found

    @property
    def num_shards_map(self) -> list[int]:
        """Number of pieces that each dim is cut into, over all axes."""
        found = [1] * self.ndim
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                found[placement.dim] *= self.mesh.shape[axis]
        return found

    @property
    def sums(self) -> list[int]:
        """The axes that hold terms of a reduction."""
        return [axis for axis, placement in enumerate(self.placements) if isinstance(placement, Partial)]

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(isinstance(placement, Replicate) for placement in self.placements)

    def is_sharded(self) -> bool:
        """Whether an axis cuts a dim."""
        return any(isinstance(placement, Shard) for placement in self.placements)


def placements_of_map(mesh: "DeviceMesh | Mesh", dim_map: Sequence[int], sums: Sequence[int]) -> list[Placement]:
    """Placements that cut each dim by the axis that `dim_map` names, with sums on the axes in `sums`.

    Raises LayoutError for an axis that the mesh has not, or that is named twice.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> run_ranks(2, lambda rank: placements_of_map(Mesh((2, 1)), [-1, 0], [1]))[0]
    [S1, P(sum)]
    """
    ndim = canonical_mesh(mesh).ndim
    found: dict[int, Placement] = {}
    named: list[tuple[int, Placement]] = [(axis, Partial()) for axis in sums]
    named += [(axis, Shard(dim)) for dim, axis in enumerate(dim_map) if axis != -1]
    for axis, placement in named:
        if not 0 <= axis < ndim:
            raise LayoutError(f"from_dim_map got axis {axis} of {mesh}; allowed are 0..{ndim - 1}, and -1 for none")
        if axis in found:
            raise LayoutError(
                f"from_dim_map got axis {axis} for {found[axis]} and for {placement}; allowed is one placement an axis"
            )
        found[axis] = placement
    return [found.get(axis, Replicate()) for axis in range(ndim)]
