"""How many bytes a redistribution must move, counted element by element on boolean masks."""

from collections.abc import Sequence
from math import prod

import torch

from tests.harness.oracle.arithmetic import Coordinate, coordinates, held_mask
from tritondt import Partial, Placement, Replicate

Placements = Sequence[Placement]
Order = Sequence[int] | None


def lacking_elements(
    mesh_shape: Sequence[int],
    shape: Sequence[int],
    source: Placements,
    target: Placements,
    source_order: Order = None,
    target_order: Order = None,
) -> dict[Coordinate, int]:
    """Elements that each coordinate needs under `target` and does not hold under `source`; neither is Partial."""
    found = {}
    for coordinate in coordinates(mesh_shape):
        wanted = held_mask(mesh_shape, target, shape, coordinate, target_order)
        held = held_mask(mesh_shape, source, shape, coordinate, source_order)
        found[coordinate] = int((wanted & ~held).sum())
    return found


def reduction_limits(
    mesh_shape: Sequence[int], shape: Sequence[int], source: Placements, target: Placements
) -> dict[Coordinate, tuple[int, int]]:
    """Least and most elements that each coordinate may receive where p contributors reduce into a target box T.

    With one holder of T exactly p for every element, one fewer where the holder contributes; with k holders at
    most p * ceil(|T|/k) + |T| * (1 - 1/k), and at least what one term of the box's lacking part needs.
    """
    contributors = prod(size for size, placement in zip(mesh_shape, source, strict=True) if _is(placement, Partial))
    holders = prod(size for size, placement in zip(mesh_shape, target, strict=True) if _is(placement, Replicate))
    found = {}
    for coordinate in coordinates(mesh_shape):
        wanted = held_mask(mesh_shape, target, shape, coordinate)
        contributed = held_mask(mesh_shape, source, shape, coordinate) & wanted
        size = int(wanted.sum())
        if holders == 1:
            exact = contributors * size - int(contributed.sum())
            found[coordinate] = exact, exact
        else:
            most = contributors * -(-size // holders) + size * (holders - 1) // holders
            found[coordinate] = size - int(contributed.sum()), most
    return found


def _is(placement: Placement, kind: type[Placement]) -> bool:
    return isinstance(placement, kind)


def total_bytes(elements: dict[Coordinate, int], dtype: torch.dtype) -> int:
    """Bytes of all coordinates' elements together."""
    return sum(elements.values()) * dtype.itemsize
