"""Bytes counted where messages are handed to the transport, against the least that there can be."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch

import tritondt as T
from tests.harness.oracle.arithmetic import coordinates
from tests.harness.oracle.traffic import Placements, lacking_elements, reduction_limits
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import placements_text

Pair = tuple[Placements, Placements]
Moved = tuple[int, int]

MESHES_AND_SHAPES = [
    ((4,), (8, 4)),
    ((4,), (7, 5)),
    ((3,), (0, 2)),
    ((2, 2), (8, 4)),
    ((2, 3), (7, 5)),
    ((3, 2), (1, 8)),
    ((2, 2, 2), (8, 8)),
    ((2, 2, 2), (5, 7)),
]


def all_pairs(num_axes: int, placements: Sequence[T.Placement]) -> Iterator[Pair]:
    """Every pair of layouts of these placements."""
    layouts = list(product(placements, repeat=num_axes))
    return product(layouts, layouts)


def moved_bytes(mesh_shape: tuple[int, ...], shape: tuple[int, ...], pairs: Sequence[Pair]) -> list[list[Moved]]:
    """Bytes (sent, received) that the transport counted, by rank and pair, of float32."""
    size = torch.Size(mesh_shape).numel()

    def body(rank: int) -> list[Moved]:
        mesh, meta = T.Mesh(mesh_shape), T.TensorMeta.contiguous(shape)
        traffic = world.current().communicator(range(size)).traffic
        found = []
        for placements in pairs:
            source, target = (T.DTensorSpec(mesh, side, meta) for side in placements)
            before = traffic.sent_bytes, traffic.received_bytes
            T.redistribute(torch.zeros(source.local_shape), source, target)
            found.append((traffic.sent_bytes - before[0], traffic.received_bytes - before[1]))
        return found

    return run_ranks(size, body)


@pytest.mark.parametrize(("mesh_shape", "shape"), MESHES_AND_SHAPES)
def test_every_pair_without_partial_moves_the_minimum(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    pairs = list(all_pairs(len(mesh_shape), (T.Replicate(), T.Shard(0), T.Shard(1))))
    if shape[0] == shape[1]:  # transposed pairs move the same
        pairs = [pair for pair in pairs if "S1" not in placements_text([*pair[0], *pair[1]]).partition("S0")[0]]
    of_ranks = moved_bytes(mesh_shape, shape, pairs)
    for (source, target), *moved in zip(pairs, *of_ranks, strict=True):
        least = lacking_elements(mesh_shape, shape, source, target)
        text = f"{placements_text(source)} -> {placements_text(target)} of {shape} on {mesh_shape}"
        received = {coordinate: found[1] for coordinate, found in zip(least, moved, strict=True)}
        assert received == {coordinate: 4 * number for coordinate, number in least.items()}, text
        assert sum(found[0] for found in moved) == sum(received.values()), text


@pytest.mark.parametrize(("mesh_shape", "shape"), [item for item in MESHES_AND_SHAPES if len(item[0]) < 3])
def test_every_reduction_stays_in_its_bounds(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    plain = (T.Replicate(), T.Shard(0), T.Shard(1))
    pairs = [
        (source, target)
        for source in product((*plain, T.Partial()), repeat=len(mesh_shape))
        for target in product(plain, repeat=len(mesh_shape))
        if T.Partial() in source
    ]
    check_reductions(mesh_shape, shape, pairs)


@pytest.mark.extended
def test_reductions_on_three_axes_stay_in_their_bounds() -> None:
    terms = [
        T.parse_placements(text) for text in ("P, P, P", "P, S0, R", "S0, P, S0", "R, P, P", "P, S1, P", "R, R, P")
    ]
    targets = list(product((T.Replicate(), T.Shard(0), T.Shard(1)), repeat=3))
    check_reductions((2, 2, 2), (5, 7), list(product(terms, targets)))


def check_reductions(mesh_shape: tuple[int, ...], shape: tuple[int, ...], pairs: Sequence[Pair]) -> None:
    of_ranks = moved_bytes(mesh_shape, shape, pairs)
    for (source, target), *moved in zip(pairs, *of_ranks, strict=True):
        text = f"{placements_text(source)} -> {placements_text(target)} of {shape} on {mesh_shape}"
        limits = reduction_limits(mesh_shape, shape, source, target)
        for coordinate, found in zip(coordinates(mesh_shape), moved, strict=True):
            least, most = limits[coordinate]
            assert 4 * least <= found[1] <= 4 * most, f"{text}: {found[1]} bytes at {coordinate}, {least=} {most=}"
        assert sum(found[0] for found in moved) == sum(found[1] for found in moved), text
