"""Random numbers for distributed tensors: those of one device, whatever the layout, without communication.

Every random operator draws one number from the default generator of the CPU, which all ranks keep in step by seeding
alike. With that as the key, an element's numbers follow from its place in the whole tensor (`philox.py`), so each rank
makes the numbers of its part. Rewinding the default generator, as activation checkpointing does, brings them back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tritondt.errors import MismatchError
from tritondt.kernels.memory import has_memory
from tritondt.ops.random.philox import random_words
from tritondt.redistribution.agreement import lengths_on_all
from tritondt.redistribution.in_graphs import call_in_graph
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Shard
from tritondt.sharding.spec import DTensorSpec
from tritondt.sharding.spec_values import open_shape, spec_text
from tritondt.sharding.strides import dense_strides

_MASK = (1 << 64) - 1


def words_of(
    spec: DTensorSpec, device: torch.device, generator: torch.Generator | None = None, num_words: int = 1
) -> tuple[torch.Tensor, ...]:
    """64 random bits for each element of this rank's part, `num_words` (1 or 2) times; draws from `generator`.

    Without a generator the CPU's default one is used; its seed is compared among the ranks of the mesh at the first
    call and whenever it was seeded anew, a generator that is given at every call: MismatchError where ranks differ.
    """
    assert spec.coordinate is not None, f"{spec} has no part on this rank"
    key, region = _key(spec.mesh, generator), spec.layout.region(spec.coordinate)
    return tuple(random_words(region, spec.shape, key, lane, device) for lane in range(num_words))


def shared_key(mesh: Mesh, generator: torch.Generator | None = None) -> int:
    """One number drawn from `generator`, alike on every rank of `mesh`, as `words_of` draws it.

    `random_words` takes it as its key, for parts that no spec describes.
    """
    return _key(mesh, generator)


def words_like(
    local: torch.Tensor, spec: DTensorSpec, generator: torch.Generator | None = None, num_words: int = 1
) -> tuple[torch.Tensor, ...]:
    """Random bits by `words_of` for a rank's part `local`, or an operator's result where torch traces a graph."""
    if has_memory(local):
        return words_of(spec, local.device, generator, num_words)
    # The operator is defined where graphs are known (dtensor/graph_ops.py).
    random_words_of = torch.ops.tritondt.random_words
    words = call_in_graph(random_words_of, spec_text(spec), local.device, num_words, open_shape(spec))
    return tuple(words.unbind())


def shard_seed(spec: DTensorSpec) -> int:
    """A seed for this rank's part, for kernels that draw by themselves: shards get different ones, replicas the same.

    Draws one number from the default generator, as `words_of` does.
    """
    return _mixed(_key(spec.mesh, None), shard_index(spec))


def shard_index(spec: DTensorSpec) -> int:
    """The number of this rank's shard: ranks that hold the same part have one number, others differ."""
    assert spec.coordinate is not None, f"{spec} has no part on this rank"
    axes = spec.layout.axes_where(Shard)
    strides = dense_strides([spec.mesh.shape[axis] for axis in axes])
    return sum(spec.coordinate[axis] * stride for axis, stride in zip(axes, strides, strict=True))


def _key(mesh: Mesh, generator: torch.Generator | None) -> int:
    """One number drawn from the generator, alike on every rank of `mesh`."""
    if generator is None:
        drawn, seed = _draw(torch.default_generator), torch.initial_seed()
        if _agreed.get(mesh) != seed:
            _check_agreement(mesh, seed, drawn)
            _agreed[mesh] = seed
    else:
        drawn = _draw(generator)
        _check_agreement(mesh, generator.initial_seed(), drawn)
    return drawn


@contextmanager
def default_generator_seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds the default generator of `device` within, for operators that take no other, and puts it back after."""
    if device.type == "cpu":
        generator = torch.default_generator
    else:
        of_devices: Any = getattr(torch, device.type).default_generators
        generator = of_devices[device.index or 0]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


# The seed of the default generator that the ranks of a mesh were found to share.
_agreed: "WeakKeyDictionary[Mesh, int]" = WeakKeyDictionary()


def _draw(generator: torch.Generator) -> int:
    number = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
    return int(number.item())


def _mixed(seed: int, index: int) -> int:
    """A seed of which every bit depends on every bit of both (the finalizer of SplitMix64).

    The CPU's generator uses the lower 32 bits only, so neighbouring shards must differ in those.
    """
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _check_agreement(mesh: Mesh, seed: int, drawn: int) -> None:
    """Compares seed and state of a generator among the ranks of `mesh`: a collective call of a few bytes."""
    found = lengths_on_all(mesh, [_signed(seed), drawn])
    for rank, (other_seed, other_drawn) in zip(mesh.ranks, found, strict=True):
        if other_seed != found[0][0]:
            what = f"rank {mesh.ranks[0]} has seed {found[0][0] & _MASK}, rank {rank} has seed {other_seed & _MASK}"
        elif other_drawn != found[0][1]:
            what = (
                f"ranks {mesh.ranks[0]} and {rank} have seed {other_seed & _MASK}, but drew differently often from it"
            )
        else:
            continue
        raise MismatchError(
            f"random numbers on {mesh} need generators in step, so that replicas draw the same: {what}; call "
            "torch.manual_seed(...) with one number on all ranks"
        )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
