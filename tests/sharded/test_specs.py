"""Specs and metadata: how a tensor is cut, and what cannot be."""

import pickle
import random
import re
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch.distributed import _remote_device

import tritondt.sharded as sharded
from tests.sharded.cuts import chunks, listed
from tritondt.errors import LayoutError
from tritondt.planning.box_exchange import exchange_boxes
from tritondt.sharded.specs import infer_sharding_spec
from tritondt.sharding.intervals import Box

PROPERTIES = sharded.TensorProperties()


def shards_of(spec, *size):
    return [
        (shard.shard_offsets, shard.shard_sizes, shard.rank)
        for shard in spec.build_metadata(torch.Size(size), PROPERTIES).shards_metadata
    ]


def test_chunks_are_those_of_torch_chunk_and_may_be_empty() -> None:
    assert shards_of(chunks(-1, 1, 0), 2, 5) == [([0, 0], [2, 3], 1), ([0, 3], [2, 2], 0)]
    # Where the length is used up, what follows starts at the end and is empty.
    assert shards_of(chunks(0, 0, 1, 2, 3), 5) == [([0], [2], 0), ([2], [2], 1), ([4], [1], 2), ([5], [0], 3)]


def test_placements_are_names_or_remote_devices_of_torch() -> None:
    spec = sharded.ChunkShardingSpec(0, [_remote_device("rank:1/cpu"), "rank:0/cpu"])
    assert spec == chunks(0, 1, 0)
    assert sharded.DevicePlacementSpec("rank:2/cpu").device == _remote_device("rank:2/cpu")
    assert isinstance(sharded.DevicePlacementSpec("rank:2/cpu"), sharded.PlacementSpec)


ROWS: Any = "rows"
HALF: Any = 1.5
REFUSED = {
    "a name for a dim": (
        lambda: sharded.ChunkShardingSpec(ROWS, ["rank:0"]),
        NotImplementedError,
        "dim by its number",
    ),
    "no dim": (lambda: sharded.ChunkShardingSpec(HALF, ["rank:0"]), LayoutError, "takes a dim as an int, got 1.5"),
    "no placements": (lambda: sharded.ChunkShardingSpec(0, []), LayoutError, "a placement for every chunk, got none"),
    "a dim too many": (lambda: shards_of(chunks(2, 0), 3, 3), LayoutError, "cuts dim 2 of a tensor of size (3, 3)"),
    "no rank": (lambda: sharded.ChunkShardingSpec(0, ["cpu"]), LayoutError, "names no rank; a shard is placed as"),
    "a worker": (lambda: sharded.ShardMetadata([0], [1], "trainer0/cpu"), LayoutError, "names no rank"),
    "nonsense": (lambda: sharded.ShardMetadata([0], [1], "rank:x/cpu"), LayoutError, "is no placement of a shard"),
    "lengths": (lambda: sharded.ShardMetadata([0, 0], [1]), LayoutError, "an offset and a size for every dim"),
    "negative": (lambda: sharded.ShardMetadata([-1], [1]), LayoutError, "are 0 or more, got offsets [-1]"),
    "no shards": (lambda: listed(), LayoutError, "one shard or more, got an empty list"),
    "dims": (lambda: listed(([0], [1], 0), ([0, 0], [1, 1], 1)), LayoutError, "equally many dims, got 1"),
    "overlap": (
        lambda: listed(([0], [3], 0), ([2], [2], 1)),
        LayoutError,
        "overlap; an element lies in one shard only",
    ),
    "overlap of equal ones": (lambda: listed(([], [], 0), ([], [], 1)), LayoutError, "overlap"),
    "a gap": (
        lambda: shards_of(listed(([0], [2], 0), ([3], [1], 1)), 4),
        LayoutError,
        "the shards have 3 elements in all, the tensor of size (4,) 4",
    ),
    "beyond": (lambda: shards_of(listed(([0], [5], 0)), 4), LayoutError, "reaches beyond the tensor of size (4,)"),
    "other dims": (
        lambda: shards_of(listed(([0], [4], 0)), 4, 1),
        LayoutError,
        "has 1 dims, the tensor of size (4, 1) 2",
    ),
    "a shard's size": (
        lambda: sharded.Shard(torch.ones(2), sharded.ShardMetadata([0], [3], "rank:0/cpu")),
        LayoutError,
        "has the size that its metadata says, [3]; found [2]",
    ),
    "a shard's device": (
        lambda: sharded.Shard(torch.ones(2), sharded.ShardMetadata([0], [2], "rank:0/cuda:0")),
        LayoutError,
        "is on the device that its metadata says, cuda:0; found cpu",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    make, kind, text = REFUSED[case]
    with pytest.raises(kind, match=re.escape(text)):
        make()


def test_refusals_that_every_core_run_must_see() -> None:
    for make, kind, text in REFUSED.values():
        with pytest.raises(kind, match=re.escape(text)):
            make()


def test_metadata_are_values() -> None:
    shard = sharded.Shard.from_tensor_and_offsets(torch.ones(2, 3), [4, 0], 1)
    assert shard.metadata == sharded.ShardMetadata([4, 0], [2, 3], "rank:1/cpu")
    assert hash(shard.metadata) == hash(sharded.ShardMetadata([4, 0], [2, 3], "rank:1/cpu"))
    properties = sharded.TensorProperties(torch.float16, requires_grad=True, memory_format=torch.channels_last)
    assert pickle.loads(pickle.dumps(properties)) == properties
    metadata = sharded.ShardedTensorMetadata([shard.metadata], torch.Size([2, 3]), properties)
    assert metadata.copy() == metadata
    assert metadata.copy().shards_metadata[0] is not shard.metadata


def test_chunks_are_recognised_and_other_cuts_are_listed() -> None:
    for spec, size in ((chunks(1, 2, 0, 1), (3, 7)), (chunks(0, 0, 1, 2, 3), (5,)), (chunks(0, 0, 1), (6, 2))):
        assert infer_sharding_spec(spec.build_metadata(torch.Size(size), PROPERTIES)) == spec
    uneven = listed(([0], [1], 0), ([1], [4], 1))
    assert infer_sharding_spec(uneven.build_metadata(torch.Size([5]), PROPERTIES)) == uneven


def test_a_rank_receives_what_it_lacks_and_no_more() -> None:
    source = ((((0, 3), (0, 4)),), (((3, 5), (0, 4)),))
    target = ((((0, 5), (0, 2)),), (((0, 2), (2, 4)), ((2, 5), (2, 4))))
    found = [exchange_boxes(source, target, position) for position in (0, 1)]
    assert [sum(message.numel for message in each.exchange.receives) for each in found] == [4, 6]
    assert [[part.region for part in each.exchange.receives[0].parts] for each in found] == [
        [part.region for part in each.exchange.sends[0].parts] for each in reversed(found)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_elements_whose_host_changes_cross_once_and_no_others(seed: int) -> None:
    """Every element has one place before and after, so that a single exchange is the fewest bytes between hosts."""
    chosen, size, rows, columns = random.Random(seed), 6, 9, 8
    hosts = [chosen.randrange(3) for _ in range(size)]
    sides: list[list[list[Box]]] = []
    owners: list[dict[tuple[int, int], int]] = []
    for along, length in enumerate((rows, columns)):
        edges = sorted({0, length, *(chosen.randrange(length) for _ in range(4))})
        boxes: list[list[Box]] = [[] for _ in range(size)]
        owner = dict[tuple[int, int], int]()
        for part in pairwise(edges):
            rank = chosen.randrange(size)
            box = (part, (0, columns)) if along == 0 else ((0, rows), part)
            boxes[rank].append(box)
            owner |= dict.fromkeys(product(range(*box[0]), range(*box[1])), rank)
        sides.append(boxes)
        owners.append(owner)
    source, target = (tuple(map(tuple, side)) for side in sides)
    crossing = sum(
        message.numel
        for rank in range(size)
        for message in exchange_boxes(source, target, rank).exchange.receives
        if hosts[message.peer] != hosts[rank]
    )
    assert crossing == sum(hosts[owners[0][at]] != hosts[owners[1][at]] for at in owners[0])
