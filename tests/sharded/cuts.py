"""Cuts of tensors into shards, drawn at random or listed: what tests of sharded tensors share."""

import random
from collections.abc import Sequence
from typing import Any

import torch

import tritondt.sharded as sharded

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Elements are their own numbers, so that a wrong place shows."""
    return torch.arange(torch.Size(shape).numel()).reshape(tuple(shape)).to(dtype)


def chunks(dim: int, *ranks: int) -> sharded.ChunkShardingSpec:
    return sharded.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def listed(*shards: tuple[list[int], list[int], int]) -> sharded.EnumerableShardingSpec:
    return sharded.EnumerableShardingSpec(
        [sharded.ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in shards]
    )


def drawn_boxes(random_numbers: random.Random, shape: Sequence[int], count: int) -> list[Box]:
    """A partition of a shape by guillotine cuts, some of them at an end, which leaves an empty box."""
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    while len(boxes) < count and shape:
        box = boxes.pop(random_numbers.randrange(len(boxes)))
        dim = random_numbers.randrange(len(shape))
        at = random_numbers.randint(*box[dim])
        boxes.append((*box[:dim], (box[dim][0], at), *box[dim + 1 :]))
        boxes.append((*box[:dim], (at, box[dim][1]), *box[dim + 1 :]))
    return boxes


def drawn_spec(random_numbers: random.Random, shape: Sequence[int], num_ranks: int) -> sharded.ShardingSpec:
    """Chunks over some ranks, in any order, or boxes on any of them: several to a rank, none, or empty ones."""
    if shape and random_numbers.random() < 0.3:
        ranks = random_numbers.sample(range(num_ranks), random_numbers.randint(1, num_ranks))
        return chunks(random_numbers.randrange(-len(shape), len(shape)), *ranks)
    boxes = drawn_boxes(random_numbers, shape, random_numbers.randint(1, 2 * num_ranks))
    return listed(
        *(
            (
                [start for start, _ in box],
                [stop - start for start, stop in box],
                random_numbers.randrange(num_ranks),
            )
            for box in boxes
        )
    )


def expect_shards(tensor: Any, expected: torch.Tensor) -> None:
    """Compares this rank's shards with the places of the whole tensor that the metadata say."""
    for shard in tensor.local_shards():
        place = tuple(slice(start, stop) for start, stop in shard.metadata.box)
        assert shard.tensor.is_contiguous()
        torch.testing.assert_close(shard.tensor.detach(), expected[place], rtol=0, atol=0)
