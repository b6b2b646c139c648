"""Coordinates in a grid and their row-major positions."""

from collections.abc import Sequence


def position_of(coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major position of a coordinate in a grid of `sizes`.

    >>> position_of((1, 2), (2, 4))
    6
    """
    position = 0
    for size, index in zip(sizes, coordinate, strict=True):
        position = position * size + index
    return position


def coordinate_at(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Coordinate at a row-major position of a grid of `sizes`.

    >>> coordinate_at(6, (2, 4))
    (1, 2)
    """
    coordinate = []
    for size in reversed(sizes):
        position, index = divmod(position, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))
