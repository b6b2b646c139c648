"""Factories of sharded tensors: empty, of one value, or random; nothing is sent, but for a comparison of seeds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritondt.errors.arguments import checked
from tritondt.ops.random.distributions import normal, uniform
from tritondt.ops.random.generator import shared_key
from tritondt.ops.random.philox import random_words
from tritondt.sharded.specs import ShardingSpec
from tritondt.sharded.tensor import ShardedTensor


@checked
def empty(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """A sharded tensor of undefined values. `options` and errors are those of ShardedTensor.

    `dtype` (default: torch's), `layout`, `requires_grad`, `pin_memory`, `memory_format`, `process_group`, `init_rrefs`.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec
    >>> spec = ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"])
    >>> [tuple(x.local_tensor().shape) for x in run_ranks(2, lambda rank: empty(spec, 2, 3))]
    [(2, 1), (2, 2)]
    """
    return ShardedTensor(sharding_spec, *size, **options)


@checked
def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """A sharded tensor of ones; options and errors as in `empty`.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec
    >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> [x.local_tensor().tolist() for x in run_ranks(2, lambda rank: ones(spec, 3))]
    [[1.0, 1.0], [1.0]]
    """
    return fill(ShardedTensor(sharding_spec, *size, **options), 1)


@checked
def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """A sharded tensor of zeros; options and errors as in `empty`.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec
    >>> run_ranks(1, lambda rank: zeros(ChunkShardingSpec(0, ["rank:0/cpu"]), 2).local_tensor().tolist())
    [[0.0, 0.0]]
    """
    return fill(ShardedTensor(sharding_spec, *size, **options), 0)


@checked
def full(
    sharding_spec: ShardingSpec, size: Sequence[int], fill_value: float | int | bool | complex, **options: Any
) -> ShardedTensor:
    """A sharded tensor filled with `fill_value`, of its dtype unless another is given; options and errors as in
    `empty`.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec
    >>> run_ranks(1, lambda rank: full(ChunkShardingSpec(0, ["rank:0/cpu"]), (2,), 7).local_tensor().tolist())
    [[7, 7]]
    """
    if options.get("dtype") is None:
        options["dtype"] = torch.full((), fill_value).dtype
    return fill(ShardedTensor(sharding_spec, *size, **options), fill_value)


@checked
def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """A sharded tensor of numbers from [0, 1), the same whatever the spec; options and errors as in `empty`.

    The first call after seeding compares the ranks' default generators, which is collective, and raises MismatchError
    where they differ (torch.manual_seed).

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec
    >>> def numbers(dim):
    ...     spec = ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"])
    ...     return run_ranks(2, lambda rank: rand(spec, 2, 2).local_tensor())
    >>> torch.cat(numbers(0), 0).equal(torch.cat(numbers(1), 1))
    True
    """
    return fill_at_random(ShardedTensor(sharding_spec, *size, **options), uniform)


@checked
def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """A sharded tensor of numbers from the normal distribution; options and errors as in `rand`.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.sharded import ChunkShardingSpec
    >>> run_ranks(1, lambda rank: randn(ChunkShardingSpec(0, ["rank:0/cpu"]), 2, 3).local_tensor().shape)
    [torch.Size([2, 3])]
    """
    return fill_at_random(ShardedTensor(sharding_spec, *size, **options), normal)


def fill(tensor: ShardedTensor, value: Any) -> ShardedTensor:
    """The tensor, filled with one value."""
    with torch.no_grad():
        for shard in tensor.local_shards():
            shard.tensor.fill_(value)
    return tensor


def fill_at_random(
    tensor: ShardedTensor,
    distribution: Callable[[Sequence[torch.Tensor], torch.dtype], torch.Tensor],
    scale: float = 1.0,
    shift: float = 0.0,
    generator: torch.Generator | None = None,
) -> ShardedTensor:
    """The tensor, filled with `scale` times numbers of a distribution, plus `shift`; each follows from its place."""
    if tensor._mesh.coordinate is None:
        return tensor
    key, dtype = shared_key(tensor._mesh, generator), tensor.dtype
    with torch.no_grad():
        for shard in tensor.local_shards():
            region = tuple((interval,) for interval in shard.metadata.box)
            words = [
                random_words(region, tensor._metadata.size, key, lane, shard.tensor.device)
                for lane in range(1 + dtype.is_complex)
            ]
            found = distribution(words, dtype)
            shard.tensor.copy_(found if (scale, shift) == (1.0, 0.0) else found * scale + shift)
    return tensor
