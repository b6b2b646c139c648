"""Layouts whose boxes are divided among the ranks that hold them alike, by flat ranges of the local tensor.

Reducing into a box that k ranks hold is cheapest when each of them reduces one k-th of it. A k-th along a dim
would be uneven whenever the dim is short, so the cut is by position in the local tensor: piece j of n elements
is [j*ceil(n/k), (j+1)*ceil(n/k)), whatever the shape.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Protocol

from tritondt.sharding import intervals as regions
from tritondt.sharding.coordinates import coordinate_at
from tritondt.sharding.cut import chunk_bounds
from tritondt.sharding.intervals import Region
from tritondt.sharding.layout import Coordinate, Layout


@dataclass(frozen=True, slots=True)
class FlatPieces:
    """Boxes of `layout`, each cut into flat pieces among the ranks along `axes`; a rank's pieces lie one after another.

    >>> from tritondt.sharding.placement import Replicate
    >>> pieces = FlatPieces(Layout((2,), (Replicate(),), (3, 3)), (0,))
    >>> pieces.regions((0,))
    ((((0, 1),), ((0, 3),)), (((1, 2),), ((0, 2),)))
    """

    layout: Layout
    axes: tuple[int, ...]

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Shape of the layout's mesh."""
        return self.layout.mesh_shape

    @property
    def parts(self) -> int:
        """Number of ranks that share one box."""
        return prod(self.mesh_shape[axis] for axis in self.axes)

    def part(self, coordinate: Coordinate) -> int:
        """Number of the part that a coordinate takes."""
        sizes, number = self.layout.mesh_shape, 0
        for axis in self.axes:
            number = number * sizes[axis] + coordinate[axis]
        return number

    def coordinate_of_part(self, coordinate: Coordinate, part: int) -> Coordinate:
        """Coordinate that takes `part` of the box that `coordinate` holds."""
        found = list(coordinate)
        indices = coordinate_at(part, [self.mesh_shape[axis] for axis in self.axes])
        for axis, index in zip(self.axes, indices, strict=True):
            found[axis] = index
        return tuple(found)

    def bounds(self, coordinate: Coordinate) -> tuple[int, int]:
        """Flat positions [start, stop) in the layout's local tensor that a coordinate takes."""
        size = prod(self.layout.local_shape(coordinate))
        return chunk_bounds(size, self.parts, self.part(coordinate))

    def regions(self, coordinate: Coordinate) -> tuple[Region, ...]:
        """Regions that a coordinate takes, in the order in which they lie in its flat piece."""
        return flat_regions(self.layout.region(coordinate), *self.bounds(coordinate))

    def holders(self, wanted: Region, pinned: Mapping[int, int]) -> Iterator[tuple[Coordinate, Region]]:
        """Coordinates whose boxes meet `wanted`, before the boxes are cut into pieces."""
        return self.layout.holders(wanted, pinned)

    @property
    def max_local_numel(self) -> int:
        """Most elements that any coordinate takes, in closed form."""
        return -(-self.layout.max_local_numel // self.parts)

    def __str__(self) -> str:
        return f"{self.layout} in {self.parts} pieces"


@lru_cache(maxsize=4096)
def flat_regions(region: Region, start: int, stop: int) -> tuple[Region, ...]:
    """Elements [start, stop) of a region, in row-major order, as regions that each lie in one run of rows.

    >>> flat_regions((((0, 2), (5, 7)), ((0, 3),)), 2, 9)
    ((((0, 1),), ((2, 3),)), (((1, 2), (5, 6)), ((0, 3),)))
    """
    shape = tuple(regions.total(intervals) for intervals in region)
    return tuple(
        tuple(regions.at_positions(intervals, *bounds) for intervals, bounds in zip(region, box, strict=True))
        for box in regions.flat_boxes(shape, start, stop)
    )


Holding = Layout | FlatPieces


class Listed(Protocol):
    """A holding whose regions follow from the plan that it is in, as one dense tensor of one dim at each coordinate."""

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Shape of the mesh."""
        ...

    @property
    def max_local_numel(self) -> int:
        """Most elements that any coordinate holds, in closed form."""
        ...

    def regions(self, coordinate: Coordinate) -> tuple[Region, ...]:
        """Regions that a coordinate holds, in the order in which they lie in its tensor."""
        ...

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Shape of the tensor of a coordinate."""
        ...
