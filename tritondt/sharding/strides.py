"""Strides of dense tensors: row-major, or in the order in which another tensor's dims lie in memory."""

from collections.abc import Sequence


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def strides_in_order_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims lie in memory in the order given by `strides`.

    >>> strides_in_order_of((6, 4), (1, 3))
    (1, 6)
    """
    if not strides:  # a rank outside the mesh has a part of shape (0,) of a tensor without dims
        return (1,) * len(shape)
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
    found, step = [0] * len(shape), 1
    for dim in reversed(order):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def strides_without_gaps(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor, in the order of given ones, of which equal ones stay equal.

    Kernels order the dims of a result by comparing strides, those of dims of length 1 too.

    >>> strides_without_gaps((6, 4, 1), (2, 24, 24))
    (1, 6, 6)
    """
    found, step = {}, 1
    for stride in sorted(set(strides)):
        found[stride] = step
        for length, own in zip(shape, strides, strict=True):
            step *= max(length, 1) if own == stride else 1
    return tuple(found[stride] for stride in strides)
