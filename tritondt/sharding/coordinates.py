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


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text: first and last of those that follow each other, else all.

    >>> ranks_text((2, 3, 4)), ranks_text((4, 0))
    ('2..4', '4, 0')
    """
    if len(ranks) > 1 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return ", ".join(map(str, ranks))
