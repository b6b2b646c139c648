"""What every rank of a mesh must hold, by torch.chunk and torch.split on whole tensors.

Shares no code with the engine: it takes placements as values and lists every index, coordinate by coordinate.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

import torch

from tritondt import Layout, Partial, Placement, Shard

Coordinate = tuple[int, ...]


def coordinates(mesh_shape: Sequence[int]) -> Iterator[Coordinate]:
    """All coordinates of a mesh, row-major."""
    return product(*map(range, mesh_shape))


def pieces(held: torch.Tensor, length: int, parts: int, shard: Shard) -> list[torch.Tensor]:
    """What each of `parts` coordinates takes of the held indices of a dim of `length`.

    >>> pieces(torch.arange(6), 6, 2, Shard(0, repeats=2))
    [tensor([0, 1, 3, 4]), tensor([2, 5])]
    >>> pieces(torch.arange(5), 5, 2, Shard(0, block=2))
    [tensor([0, 1, 4]), tensor([2, 3])]
    """
    if length == 0:
        return [held] * parts
    if shard.block is not None:  # dealt in turns, like cards
        dealt = torch.arange(len(held)) // shard.block % parts
        return [held[dealt == part] for part in range(parts)]
    block_of = held // (length // shard.repeats)
    blocks = [held[block_of == block] for block in range(shard.repeats)]
    cut = [_cut_block(block, parts, shard) for block in blocks]
    return [torch.cat([taken[part] for taken in cut]) for part in range(parts)]


def _cut_block(block: torch.Tensor, parts: int, shard: Shard) -> list[torch.Tensor]:
    if shard.sizes is not None:
        return list(block.split(shard.sizes))
    units = block.reshape(len(block) // shard.unit, shard.unit)
    chunks = [chunk.reshape(-1) for chunk in units.chunk(parts)]
    return chunks + [block[:0]] * (parts - len(chunks))


def held_indices(
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    shape: Sequence[int],
    coordinate: Coordinate,
    order: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Per tensor dim, the global indices that a coordinate holds; cuts act in `order`, by default left to right."""
    axes = tuple(range(len(mesh_shape)) if order is None else order)
    return _held_indices(tuple(mesh_shape), tuple(placements), tuple(shape), coordinate, axes)


@lru_cache(maxsize=1024)
def _held_indices(
    mesh_shape: Coordinate,
    placements: tuple[Placement, ...],
    shape: Coordinate,
    coordinate: Coordinate,
    order: Coordinate,
) -> tuple[torch.Tensor, ...]:
    found = [torch.arange(length) for length in shape]
    for axis in order:
        shard = placements[axis]
        if isinstance(shard, Shard):
            cut = pieces(found[shard.dim], shape[shard.dim], mesh_shape[axis], shard)
            found[shard.dim] = cut[coordinate[axis]]
    return tuple(found)


def indices_of(layout: Layout, coordinate: Coordinate) -> tuple[torch.Tensor, ...]:
    """`held_indices` of a layout, of which only what it was made from is read."""
    return held_indices(layout.mesh_shape, layout.placements, layout.shape, coordinate, layout.order)


def take(full: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """The part of a whole tensor at the given indices of every dim."""
    for dim, kept in enumerate(indices):
        full = full.index_select(dim, kept)
    return full.clone()


def mask(shape: Sequence[int], indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """True where an element lies at the given indices of every dim."""
    found = torch.ones(tuple(shape), dtype=torch.bool)
    for dim, kept in enumerate(indices):
        along = torch.zeros(shape[dim], dtype=torch.bool)
        along[kept] = True
        found &= along.view([-1 if other == dim else 1 for other in range(len(shape))])
    return found


def held_mask(
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    shape: Sequence[int],
    coordinate: Coordinate,
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    """True where a coordinate holds the element."""
    return mask(shape, held_indices(mesh_shape, placements, shape, coordinate, order))


def ops_of(placements: Sequence[Placement]) -> list[str | None]:
    """The reduce op of every axis, None where it has none."""
    return [placement.reduce_op if isinstance(placement, Partial) else None for placement in placements]


def mean_size(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> int:
    """How many terms every mean of a layout has."""
    return prod(size for size, op in zip(mesh_shape, ops_of(placements), strict=True) if op == "avg")


def local_tensors(
    full: torch.Tensor,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> dict[Coordinate, torch.Tensor]:
    """What each coordinate holds of `full`; terms of a Partial are random, and reduce to `full` exactly.

    Where `full` is expanded, so is every term.
    """
    ops = ops_of(placements)
    sizes = [size if op else 1 for size, op in zip(mesh_shape, ops, strict=True)]
    drawn = full[tuple(slice(0, 1) if step == 0 else slice(None) for step in full.stride())]
    terms = _terms(drawn, sizes, {op for op in ops if op}, mean_size(mesh_shape, placements), generator)
    found = {}
    for coordinate in coordinates(mesh_shape):
        of_term = tuple(index if op else 0 for index, op in zip(coordinate, ops, strict=True))
        indices = held_indices(mesh_shape, placements, full.shape, coordinate, order)
        found[coordinate] = take(terms[of_term].expand(full.shape), indices)
    return found


def _terms(
    full: torch.Tensor, sizes: Sequence[int], ops: set[str], terms_of_mean: int, generator: torch.Generator | None
) -> dict[Coordinate, torch.Tensor]:
    """Small whole numbers per coordinate, so that any order and any half type reduces them to the same bits."""
    where = list(coordinates(sizes))
    if not ops:
        return dict.fromkeys(where, full)
    if ops <= {"sum", "avg"}:
        others = [_numbers(full, -2, 3, generator) for _ in where[1:]]
        last = full.clone()
        for term in others:
            last -= term
        return {at: term * terms_of_mean for at, term in zip(where, [*others, last], strict=True)}
    (op,) = ops
    whole = int(torch.randint(len(where), (), generator=generator))  # this coordinate completes the reduction
    others = [_weaker(full, op, generator) for _ in where[1:]]
    last = full.clone()
    if op == "product":
        for term in others:
            last = last * term.conj()  # the inverse of a unit
    return dict(zip(where, [*others[:whole], last, *others[whole:]], strict=True))


def _weaker(full: torch.Tensor, op: str, generator: torch.Generator | None) -> torch.Tensor:
    """A term that does not decide the result: not above a maximum, not below a minimum, a unit of a product."""
    if op == "product":
        units = [1, -1, 1j, -1j] if full.dtype.is_complex else [1] if full.dtype is torch.uint8 else [1, -1]
        return torch.tensor(units).to(full.dtype)[torch.randint(len(units), full.shape, generator=generator)]
    if full.dtype is torch.bool:
        random = torch.randint(2, full.shape, generator=generator).bool()
        return full & random if op == "max" else full | random
    distance = _numbers(full, 0, 3, generator)
    return full - distance if op == "max" else full + distance


def _numbers(like: torch.Tensor, low: int, high: int, generator: torch.Generator | None) -> torch.Tensor:
    """Random whole numbers [low, high) in the dtype and shape of `like`."""
    if like.dtype.is_complex:
        parts = torch.randint(low, high, (*like.shape, 2), generator=generator).to(like.dtype.to_real())
        return torch.view_as_complex(parts)
    return torch.randint(low, high, like.shape, generator=generator).to(like.dtype)


def whole_tensor(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """A random whole tensor of numbers small enough to add, average and multiply exactly in every dtype."""
    like = torch.empty(tuple(shape), dtype=dtype)
    if dtype is torch.bool:
        return torch.randint(2, like.shape, generator=generator).bool()
    if dtype is torch.uint8:  # an unsigned term needs room below
        return _numbers(like, 4, 9, generator)
    return _numbers(like, -4, 5, generator)


def reduced(terms: Sequence[torch.Tensor], ops: set[str], terms_of_mean: int) -> torch.Tensor:
    """What the terms of a Partial stand for, in the widest arithmetic of their kind."""
    dtype = terms[0].dtype
    if not ops:
        return terms[0]
    if dtype is torch.bool:
        stacked = torch.stack(list(terms))
        return stacked.any(0) if ops == {"max"} else stacked.all(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([term.to(wide) for term in terms])
    if ops <= {"sum", "avg"}:
        total = stacked.sum(0)
        return (total if terms_of_mean == 1 else total / terms_of_mean).to(dtype)
    if ops == {"product"}:
        return stacked.prod(0).to(dtype)
    return (stacked.amax(0) if ops == {"max"} else stacked.amin(0)).to(dtype)


def assert_holds(
    found: dict[Coordinate, torch.Tensor],
    full: torch.Tensor,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
) -> None:
    """Checks that the local tensors are `full` under the placements, exactly, terms of a Partial by their reduction."""
    ops = ops_of(placements)
    groups: dict[Coordinate, list[torch.Tensor]] = {}
    for coordinate in coordinates(mesh_shape):
        local = found[coordinate]
        assert local.dtype is full.dtype, f"{coordinate} holds {local.dtype}, expected {full.dtype}"
        key = tuple(0 if op else index for index, op in zip(coordinate, ops, strict=True))
        groups.setdefault(key, []).append(local)
    used = {op for op in ops if op}
    for coordinate, terms in groups.items():
        expected = take(full, held_indices(mesh_shape, placements, full.shape, coordinate, order))
        for term in terms:
            assert term.shape == expected.shape, f"{coordinate} holds {tuple(term.shape)}, expected {expected.shape}"
        value = reduced(terms, used, mean_size(mesh_shape, placements))
        if torch.equal(value, expected):  # 0.1 ms less than what says where they differ
            continue
        try:
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
        except AssertionError as error:
            raise AssertionError(f"at {coordinate}: {error}") from error
        raise AssertionError(f"at {coordinate}: {value} is not {expected}")
