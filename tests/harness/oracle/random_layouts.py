"""Random layouts: any mix of placements, units, sizes, repeats, dealt blocks and cut orders that can exist."""

import random
from math import gcd, prod

import torch

import tritondt as T
from tritondt.sharding.placement import OPS_OF_KIND, ReduceOp
from tritondt.sharding.spec import element_kind

MESH_SHAPES = {
    1: ((1,), (1, 1)),
    2: ((2,), (1, 2), (2, 1)),
    3: ((3,), (3, 1)),
    4: ((4,), (2, 2), (1, 4), (2, 1, 2), (2, 2, 1)),
    5: ((5,),),
    6: ((6,), (2, 3), (3, 2), (1, 2, 3)),
    7: ((7,),),
    8: ((8,), (2, 4), (4, 2), (2, 2, 2)),
}


def random_pair(chosen: random.Random, dtype: torch.dtype) -> tuple[T.Layout, T.Layout]:
    """Two random layouts of one tensor on one mesh of up to 8 ranks."""
    mesh_shape = chosen.choice(MESH_SHAPES[max(chosen.randint(1, 8), chosen.randint(1, 8))])
    shape = random_shape(chosen)
    sides = [random_placements(chosen, mesh_shape, shape, dtype) for _ in range(2)]
    source, target = (T.Layout(mesh_shape, placements, shape, order) for placements, order in sides)
    return source, target


def random_shape(chosen: random.Random) -> tuple[int, ...]:
    """A shape of 0 to 4 dims of lengths 0 to 17, at most 4,096 elements: where they go matters, not how many."""
    num_dims = chosen.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)) if chosen.random() < 0.5 else chosen.choice((1, 2, 3))
    while True:
        shape = tuple(chosen.choice((0, 1, *range(2, 18), *range(2, 18))) for _ in range(num_dims))
        if prod(shape) <= 4096:
            return shape


def random_placements(
    chosen: random.Random,
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    is_dealt: bool = True,
) -> tuple[tuple[T.Placement, ...], tuple[int, ...] | None]:
    """Placements and cut order of a random layout, None for the default one; dealt blocks too, where `is_dealt`."""
    axes = list(range(len(mesh_shape)))
    order = chosen.sample(axes, len(axes)) if chosen.random() < 0.5 else None
    op = chosen.choice(OPS_OF_KIND[element_kind(dtype)])
    placements: list[T.Placement] = [T.Replicate()] * len(axes)
    units: dict[int, int] = {}
    for axis in axes if order is None else order:
        kind = chosen.choice("RPSSS")
        if kind == "P":
            placements[axis] = T.Partial(_companion(chosen, op, dtype))
        elif kind == "S" and shape:
            dim = chosen.randrange(len(shape))
            if is_dealt and chosen.random() < 0.2:
                shard = T.Shard(dim, block=chosen.choice((1, 2, 3, 4, 5)))
            else:
                shard = _random_shard(chosen, dim, shape[dim], mesh_shape[axis], units.get(dim))
            units[dim] = gcd(units.get(dim, 0), shard.grain)
            placements[axis] = shard
    return tuple(placements), None if order is None else tuple(order)


def _companion(chosen: random.Random, op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """An op that may stand beside `op` on another axis: itself, or the other one of sum and avg."""
    if op in ("sum", "avg") and "avg" in OPS_OF_KIND[element_kind(dtype)]:
        return chosen.choice(("sum", "avg"))
    return op


def _random_shard(chosen: random.Random, dim: int, length: int, parts: int, unit_before: int | None) -> T.Shard:
    def divisor(number: int) -> int:
        return chosen.choice([value for value in range(1, 18) if number % value == 0])

    repeats = divisor(length) if chosen.random() < 0.3 else 1
    block = length // repeats
    unit = divisor(block if unit_before is None else gcd(block, unit_before)) if chosen.random() < 0.5 else 1
    if unit_before is not None or chosen.random() < 0.7:
        return T.Shard(dim, unit, None, repeats)
    bounds = sorted(chosen.randint(0, block // unit) for _ in range(parts - 1))
    sizes = [(stop - start) * unit for start, stop in zip([0, *bounds], [*bounds, block // unit], strict=True)]
    return T.Shard(dim, unit, tuple(sizes), repeats)
