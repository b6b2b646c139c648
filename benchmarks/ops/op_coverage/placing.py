"""How a sample's tensors are laid over the ranks: at random, or so that an operator has a chance to send nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch

import tritondt as T

# Chances of a tensor to be whole, or terms of a sum; it is sharded otherwise.
_REPLICATED, _PARTIAL = 0.25, 0.15
# Chance of a sharded dim to be cut by explicit sizes, at random, in place of equal pieces.
_BY_SIZES = 0.2


def random_placement(tensor: torch.Tensor, num_ranks: int, random: Random, *, is_written: bool) -> T.Placement:
    """Any placement that the tensor can have; a tensor that the operator writes to is given no terms."""
    chance = random.random()
    if chance < _PARTIAL and _has_terms(tensor) and not is_written:
        return T.Partial()
    if chance < _PARTIAL + _REPLICATED or not tensor.ndim:
        return T.Replicate()
    dim = random.randrange(tensor.ndim)
    if random.random() >= _BY_SIZES:
        return T.Shard(dim)
    bounds = sorted(random.randint(0, tensor.shape[dim]) for _ in range(num_ranks - 1))
    ends = [*bounds, tensor.shape[dim]]
    return T.Shard(dim, sizes=tuple(end - start for start, end in zip([0, *bounds], ends, strict=True)))


def _has_terms(tensor: torch.Tensor) -> bool:
    """Whether the terms that `terms_of` makes add up to the tensor exactly."""
    if tensor.dtype is torch.bool:
        return False
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def local_part(full: torch.Tensor, placement: T.Placement, num_ranks: int, rank: int) -> torch.Tensor:
    """A rank's part of a whole tensor on a mesh of one axis."""
    local = full.detach()
    if isinstance(placement, T.Shard):
        layout = T.Layout((num_ranks,), [placement], full.shape)
        ((start, stop),) = layout.intervals(placement.dim % full.ndim, (rank,)) or ((0, 0),)
        local = local.narrow(placement.dim, start, stop - start)
    elif isinstance(placement, T.Partial):
        local = local * _factors(num_ranks)[rank]
    return local.clone(memory_format=torch.contiguous_format)


def _factors(num_ranks: int) -> list[int]:
    """Factors from the whole to its terms: small whole numbers that sum to 1, so that terms are exact and differ.

    >>> _factors(2), _factors(3)
    ([2, -1], [2, -2, 1])
    """
    found = [2, -1] if num_ranks % 2 == 0 else [2, -2, 1]
    return found + [0] * (num_ranks - len(found))


def promising(tensors: Sequence[torch.Tensor], num_ranks: int) -> Iterator[list[T.Placement]]:
    """Placements of which one dim is sharded, under which operators that can send nothing do so.

    A dim of all tensors that have it in common, counted from the front and from the end; then a dim of one tensor.
    Only dims of which two ranks hold something count.
    """
    seen: set[tuple[T.Placement, ...]] = set()
    for candidate in _candidates(tensors):
        sharded = [
            tensor.shape[placement.dim]
            for tensor, placement in zip(tensors, candidate, strict=True)
            if isinstance(placement, T.Shard)
        ]
        if sharded and min(sharded) >= num_ranks and tuple(candidate) not in seen:
            seen.add(tuple(candidate))
            yield candidate


def _candidates(tensors: Sequence[torch.Tensor]) -> Iterator[list[T.Placement]]:
    most = max(tensor.ndim for tensor in tensors)
    for dim in range(most):
        for length in dict.fromkeys(tensor.shape[dim] for tensor in tensors if tensor.ndim > dim):
            yield [_shard_if(tensor, dim, length) for tensor in tensors]
    for from_end in range(1, most + 1):
        for length in dict.fromkeys(tensor.shape[-from_end] for tensor in tensors if tensor.ndim >= from_end):
            yield [_shard_if(tensor, tensor.ndim - from_end, length) for tensor in tensors]
    for place, tensor in enumerate(tensors):
        for dim in range(tensor.ndim):
            whole: list[T.Placement] = [T.Replicate()] * len(tensors)
            yield [*whole[:place], T.Shard(dim), *whole[place + 1 :]]


def _shard_if(tensor: torch.Tensor, dim: int, length: int) -> T.Placement:
    return T.Shard(dim) if 0 <= dim < tensor.ndim and tensor.shape[dim] == length else T.Replicate()
