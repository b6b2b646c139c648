"""Elements of a tensor that every coordinate of a mesh holds, in closed form and without any process.

    layout = Layout((2, 4), (Shard(0), Replicate()), (5, 3))
    layout.boxes((1, 2))        # (((3, 5), (0, 3)),)

Layouts are interned: equal layouts are one object, so that plans and dispatch can be cached by identity.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import lcm, prod
from weakref import WeakValueDictionary

from tritondt.errors import LayoutError, OpenLengthError
from tritondt.errors.arguments import checked
from tritondt.sharding import intervals as regions
from tritondt.sharding.coordinates import coordinate_at, position_of
from tritondt.sharding.cut import ChunkCut, Cut
from tritondt.sharding.intervals import Box, Interval, Intervals, Region
from tritondt.sharding.lengths import are_open, hint_of, settled
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard, as_placements, placements_text

Coordinate = tuple[int, ...]

_interned: "WeakValueDictionary[object, Layout]" = WeakValueDictionary()
_interning = threading.Lock()
os.register_at_fork(before=_interning.acquire, after_in_parent=_interning.release, after_in_child=_interning.release)


class Layout:
    """Division of a tensor among the coordinates of a mesh, without ranks or processes; equal layouts are one object.

    `mesh_shape` has the size of each axis, `placements` one placement per axis, and `shape` the tensor's global lengths
    in elements, which may be 0. `order` lists the axes in the order in which they cut (default: left to right); it
    matters only where several axes shard one dim, and is kept per dim, so layouts of equal boxes from equal placements
    are one object. Needs no process and no collective call.

    Raises LayoutError for impossible layouts: a wrong number of placements, a dim that does not exist, units that do
    not divide, sizes with a wrong sum, reductions by different ops.

    >>> layout = Layout((2, 4), (Shard(0), Replicate()), (5, 3))
    >>> layout.local_shape((1, 2)), layout.boxes((1, 2))
    ((2, 3), (((3, 5), (0, 3)),))
    >>> Layout((2, 2), (Shard(0), Shard(0)), (5,)).boxes((0, 1))
    (((2, 3),),)
    >>> Layout((2, 2), (Shard(0), Shard(0)), (5,), order=(1, 0)).boxes((0, 1))
    (((3, 4),),)
    """

    __slots__ = ("__weakref__", "_cuts", "axes_of_dim", "mesh_shape", "placements", "shape")

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    axes_of_dim: tuple[tuple[int, ...], ...]
    _cuts: tuple[Cut | None, ...]

    @checked
    def __new__(
        cls,
        mesh_shape: Sequence[int],
        placements: Sequence[Placement],
        shape: Sequence[int],
        order: Sequence[int] | None = None,
    ) -> "Layout":
        """Interned layout of the given values."""
        mesh_shape, shape = tuple(mesh_shape), tuple(shape)
        if are_open(shape):
            shape = tuple(map(settled, shape))
        placements = _checked_placements(mesh_shape, as_placements(placements), shape)
        axes_of_dim = _axes_of_dims(placements, len(shape), order)
        if are_open(shape):
            return cls._make(mesh_shape, placements, shape, axes_of_dim)
        key = (mesh_shape, placements, shape, axes_of_dim)
        with _interning:
            found = _interned.get(key)
        if found is not None:
            return found
        made = cls._make(mesh_shape, placements, shape, axes_of_dim)
        with _interning:
            return _interned.setdefault(key, made)

    @classmethod
    def _make(
        cls,
        mesh_shape: tuple[int, ...],
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        axes_of_dim: tuple[tuple[int, ...], ...],
    ) -> "Layout":
        made = object.__new__(cls)
        made.mesh_shape, made.placements, made.shape, made.axes_of_dim = mesh_shape, placements, shape, axes_of_dim
        made._cuts = _checked_cuts(mesh_shape, placements, shape, axes_of_dim)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.mesh_shape, self.placements, self.shape, self.order)

    def __repr__(self) -> str:
        mesh = "x".join(map(str, self.mesh_shape))
        return f"Layout({self} of {self.shape} on {mesh})"

    def __str__(self) -> str:
        text = placements_text(self.placements)
        if any(list(axes) != sorted(axes) for axes in self.axes_of_dim):
            text += " in order (" + ", ".join(map(str, self.order)) + ")"
        return text

    @property
    def order(self) -> tuple[int, ...]:
        """All axes; those that cut one dim stand in their cut order."""
        slots = list(range(len(self.mesh_shape)))
        for axes in self.axes_of_dim:
            for slot, axis in zip(sorted(axes), axes, strict=True):
                slots[slot] = axis
        return tuple(slots)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def num_ranks(self) -> int:
        """Number of coordinates of the mesh."""
        return prod(self.mesh_shape)

    def coordinate(self, position: int) -> Coordinate:
        """Coordinate at a row-major position of the mesh."""
        return coordinate_at(position, self.mesh_shape)

    def position(self, coordinate: Coordinate) -> int:
        """Row-major position of a coordinate in the mesh."""
        return position_of(coordinate, self.mesh_shape)

    def coordinates(self) -> Iterator[Coordinate]:
        """All coordinates in row-major order; for tests and small meshes, since planning never enumerates them."""
        return product(*map(range, self.mesh_shape))

    def intervals(self, dim: int, coordinate: Coordinate) -> Intervals:
        """Indices of `dim` that a coordinate holds; raises OpenLengthError for a cut dim with a symbolic length."""
        length, axes = self.shape[dim], self.axes_of_dim[dim]
        if not isinstance(length, int) and any(self.mesh_shape[axis] > 1 for axis in axes):
            self.check_known(dim)
        held: Intervals = ((0, length),) if length > 0 else ()
        for axis in axes:
            held = self.cut(axis).piece(held, coordinate[axis])
        return held

    def region(self, coordinate: Coordinate) -> Region:
        """Elements that a coordinate holds, as one list of intervals per dim."""
        return tuple(self.intervals(dim, coordinate) for dim in range(len(self.shape)))

    def regions(self, coordinate: Coordinate) -> tuple[Region, ...]:
        """Region of a coordinate as a tuple of one, the form that flat pieces share."""
        return (self.region(coordinate),)

    def boxes(self, coordinate: Coordinate) -> tuple[Box, ...]:
        """Boxes that a coordinate holds: one without `repeats` and `block`, none where the coordinate holds nothing."""
        return tuple(regions.boxes(self.region(coordinate)))

    def bounds(self, dim: int, coordinate: Coordinate) -> Interval:
        """First index and end of the one piece of `dim` that a coordinate holds; symbolic if the dim's length is.

        OpenLengthError where the length is left open and a coordinate may hold several pieces.

        >>> Layout((2,), (Shard(0),), (5,)).bounds(0, (1,))
        (3, 5)
        """
        start, held = 0, self.shape[dim]
        for axis in self.axes_of_dim[dim]:
            cut, shard = self.cut(axis), self.placements[axis]
            if not (isinstance(shard, Shard) and shard.is_one_run):
                self.check_known(dim)
            first, stop = cut.bounds(held, coordinate[axis])
            start, held = start + first, stop - first
        return start, start + held

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Shape of the local tensor at a coordinate; lengths are symbolic if those of the tensor are."""
        if are_open(self.shape):
            return tuple(self._local_length(dim, coordinate) for dim in range(len(self.shape)))
        return tuple(regions.total(intervals) for intervals in self.region(coordinate))

    def _local_length(self, dim: int, coordinate: Coordinate) -> int:
        if isinstance(self.shape[dim], int):
            return regions.total(self.intervals(dim, coordinate))
        axes = self.axes_of_dim[dim]
        cut = self.cut(axes[0]) if len(axes) == 1 else None
        if not isinstance(cut, ChunkCut) or cut.repeats == 1:
            start, stop = self.bounds(dim, coordinate)
            return stop - start
        start, stop = cut.bounds(self.shape[dim] // cut.repeats, coordinate[axes[0]])
        return cut.repeats * (stop - start)

    def check_known(self, dim: int) -> None:
        """Raises OpenLengthError where the length of `dim` is left open."""
        if not isinstance(self.shape[dim], int):
            raise OpenLengthError(f"{self!r} leaves open how long dim {dim} is; its indices are known for ints")

    def cut(self, axis: int) -> Cut:
        """Division of the dim that `axis` shards."""
        cut = self._cuts[axis]
        assert cut is not None, f"axis {axis} of {self!r} shards no dim"
        return cut

    def holders(self, wanted: Region, pinned: Mapping[int, int]) -> Iterator[tuple[Coordinate, Region]]:
        """Coordinates that hold any of `wanted`, ascending per dim, each with the region held of `wanted`.

        An axis in `pinned` is searched at that index only. The cost grows with the number of holders, not with the
        mesh.
        """
        per_dim = [list(self.dim_holders(dim, wanted[dim], pinned)) for dim in range(len(self.shape))]
        idle = [axis for axis, cut in enumerate(self._cuts) if cut is None]
        choices = [[pinned[axis]] if axis in pinned else range(self.mesh_shape[axis]) for axis in idle]
        coordinate = [0] * len(self.mesh_shape)
        for found in product(*per_dim):
            for axis, index in (item for indices, _ in found for item in indices):
                coordinate[axis] = index
            held = tuple(intervals for _, intervals in found)
            for indices in product(*choices):
                for axis, index in zip(idle, indices, strict=True):
                    coordinate[axis] = index
                yield tuple(coordinate), held

    def dim_holders(
        self, dim: int, wanted: Intervals, pinned: Mapping[int, int]
    ) -> Iterator[tuple[tuple[tuple[int, int], ...], Intervals]]:
        """Indices on the axes that cut `dim`, with the indices of `wanted` held there."""
        self.check_known(dim)

        def descend(
            axes: tuple[int, ...], held: Intervals, indices: tuple[tuple[int, int], ...]
        ) -> Iterator[tuple[tuple[tuple[int, int], ...], Intervals]]:
            common = regions.intersect_intervals(held, wanted)
            if not common:
                return
            if not axes:
                yield indices, common
                return
            axis, cut = axes[0], self.cut(axes[0])
            candidates = [pinned[axis]] if axis in pinned else cut.pieces_meeting(held, common)
            for index in candidates:
                yield from descend(axes[1:], cut.piece(held, index), (*indices, (axis, index)))

        return descend(self.axes_of_dim[dim], regions.merge([(0, self.shape[dim])]), ())

    @property
    def max_local_shape(self) -> tuple[int, ...]:
        """Greatest length per dim that any coordinate holds; of lengths left open, that of the values at hand."""
        longest = []
        for dim, length in enumerate(map(hint_of, self.shape)):
            for axis in self.axes_of_dim[dim]:
                length = self.cut(axis).largest(length)
            longest.append(length)
        return tuple(longest)

    @property
    def max_local_numel(self) -> int:
        """Most elements that any coordinate holds, in closed form."""
        return prod(self.max_local_shape)

    def axes_where(self, kind: type[Placement]) -> tuple[int, ...]:
        """Axes whose placement is of class `kind`."""
        return tuple(axis for axis, placement in enumerate(self.placements) if isinstance(placement, kind))

    def with_placements(self, placements: Sequence[Placement]) -> "Layout":
        """Layout of this tensor, mesh and cut order under other placements."""
        return Layout(self.mesh_shape, placements, self.shape, self.order)


def _checked_placements(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """Placements with dims counted from the front; LayoutError where reductions on several axes do not commute."""
    if any(size < 1 for size in mesh_shape) or any(length < 0 for length in shape):
        raise LayoutError(f"a layout needs positive mesh sizes and lengths of 0 or more, got {mesh_shape} and {shape}")
    if len(placements) != len(mesh_shape):
        raise LayoutError(
            f"a mesh of shape {mesh_shape} takes {len(mesh_shape)} placements, one per axis; "
            f"got {len(placements)}: {placements_text(placements)}"
        )
    checked: list[Placement] = []
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard | Replicate | Partial):
            hint = f": tritondt.parse_placements({placement!r}) reads a text" if isinstance(placement, str) else ""
            raise LayoutError(f"axis {axis} got {placement!r}; allowed are Shard, Replicate and Partial{hint}")
        if isinstance(placement, Shard):
            if not -len(shape) <= placement.dim < len(shape):
                dims = f"dims 0..{len(shape) - 1}" if shape else "no dims"
                raise LayoutError(f"axis {axis} shards dim {placement.dim}, but a tensor of shape {shape} has {dims}")
            if placement.dim < 0:
                dim = placement.dim + len(shape)
                placement = placement.on(dim)
        checked.append(placement)
    ops = {placement.reduce_op for placement in checked if isinstance(placement, Partial)}
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise LayoutError(
            f"{placements_text(checked)} reduces by {' and '.join(sorted(ops))} on different axes, and the result "
            "depends on which comes first; allowed is one op on all axes, or sum with avg"
        )
    return tuple(checked)


def _axes_of_dims(
    placements: tuple[Placement, ...], num_dims: int, order: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    """Axes that cut each tensor dim, in cut order."""
    axes = tuple(range(len(placements)))
    if order is not None:
        if sorted(order) != list(axes):
            raise LayoutError(f"order={tuple(order)} must list each of the axes {axes} once")
        axes = tuple(order)
    found: list[list[int]] = [[] for _ in range(num_dims)]
    for axis in axes:
        placement = placements[axis]
        if isinstance(placement, Shard):
            found[placement.dim].append(axis)
    return tuple(map(tuple, found))


def _checked_cuts(
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    axes_of_dim: tuple[tuple[int, ...], ...],
) -> tuple[Cut | None, ...]:
    """Cut of each axis, None where the axis shards nothing; every piece must be whole units of all later cuts."""
    cuts: list[Cut | None] = [None] * len(mesh_shape)
    for dim, axes in enumerate(axes_of_dim):
        earlier: list[tuple[int, Shard]] = []
        for axis in axes:
            shard = placements[axis]
            assert isinstance(shard, Shard), f"axis {axis} is listed under dim {dim} but holds {shard!r}"
            _check_shard(axis, mesh_shape[axis], shard, shape[dim])
            if earlier and shard.sizes is not None:
                raise LayoutError(
                    f"axis {axis} cuts dim {dim} by sizes={shard.sizes} after axis {earlier[-1][0]} has cut it; "
                    f"sizes are allowed only for the first cut of a dim: put axis {axis} first in order=..."
                )
            for earlier_axis, earlier_shard in earlier:
                if earlier_shard.grain % shard.unit:
                    kind = earlier_shard.grain_name
                    raise LayoutError(
                        f"axis {axis} cuts dim {dim} in units of {shard.unit} after axis {earlier_axis} has cut it in "
                        f"{kind}s of {earlier_shard.grain}; a later unit must divide every earlier one: give axis "
                        f"{earlier_axis} {kind}={lcm(shard.unit, earlier_shard.grain)}"
                    )
            cuts[axis] = shard.cut(mesh_shape[axis], shape[dim])
            earlier.append((axis, shard))
    return tuple(cuts)


def _check_shard(axis: int, parts: int, shard: Shard, length: int) -> None:
    misfit = shard.misfit(parts, length)
    if misfit is not None:
        raise LayoutError(f"axis {axis} of size {parts} cuts dim {shard.dim} of length {length} by {shard!r}; {misfit}")
