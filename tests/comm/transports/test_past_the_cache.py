"""Results of arenas that are written past the cache: the same, whichever way, and only where they are large."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.packing import arena_transfer
from tritondt.planning import slots

# Rows and columns that begin and end within lines of the cache, and lengths that do not divide.
SHAPES = ((257, 301), (64, 1037), (5, 7))
MOVES = (("S0", "R"), ("S1", "R"), ("S0", "S1"), ("S1", "S0"), ("P(sum)", "S0"), ("P(sum)", "R"), ("R", "S1"))


def moved(rank: int, bound_bytes: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each redistribution gave, one by one and in a list, and what was to come."""
    mesh, found = T.Mesh((4,)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "_PAST_CACHE_BYTES", bound_bytes)
        moves, expected = [], []
        for rows, columns in SHAPES:
            # A shape of its own for each bound and dtype: plans are kept.
            shape = (rows + 4 * dtype.itemsize + (bound_bytes > 0), columns)
            whole = torch.arange(shape[0] * shape[1]).remainder(251).view(shape).to(dtype)
            for source, target in MOVES:
                placements = T.parse_placements(source)
                x = (
                    T.DTensor.from_local(whole * (rank + 1), mesh, placements)
                    if source == "P(sum)"
                    else T.distribute_tensor(whole, mesh, placements)
                )
                wanted = T.parse_placements(target)
                moves.append((x, wanted))
                expected.append(T.distribute_tensor(whole * (10 if source == "P(sum)" else 1), mesh, wanted).to_local())
        found += [x.redistribute(placements=wanted).to_local() for x, wanted in moves]
        found += [x.to_local() for x in T.redistribute_many(moves)]
    return list(zip(found, expected * 2, strict=True))


@pytest.mark.parametrize("bound_bytes", [0, 1 << 40], ids=["past the cache", "through the cache"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16], ids=str)
def test_results_are_the_same(four_shared_memory_ranks: GlooRanks, dtype: torch.dtype, bound_bytes: int) -> None:
    for pairs in four_shared_memory_ranks.run(moved, bound_bytes, dtype):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def tables(rank: int, side: int, count: int) -> list[Any]:
    """Which programs were told to write results past the cache."""
    told: list[Any] = []

    def noted(**given: Any) -> Any:
        told.append(given["is_past_cache"])
        return made(**given)

    mesh, made = T.Mesh((4,)), vars(arena_transfer)["BoxMoves"]
    x = T.distribute_tensor(torch.zeros(side, side), mesh, [T.Shard(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "_PAST_CACHE_BYTES", 1 << 20)
        patch.setattr(arena_transfer, "BoxMoves", noted)
        moves = [(x, [T.Replicate()])] * count
        T.redistribute_many(moves, bucket_bytes=1) if count > 1 else x.redistribute(placements=[T.Replicate()])
    return told


def test_small_results_stay_in_the_cache(four_shared_memory_ranks: GlooRanks) -> None:
    """From 1 MB of results on for each core: those of 516 x 516 take more, of one rank alone."""
    assert four_shared_memory_ranks.run(tables, 200, 1) == [[False]] * 4
    assert four_shared_memory_ranks.run(tables, 516, 1) == [[True]] * 4


def test_results_of_a_list_are_large_together(four_shared_memory_ranks: GlooRanks) -> None:
    """8 tensors of 160 kB, in a bucket each."""
    assert four_shared_memory_ranks.run(tables, 204, 8) == [[True] * 8] * 4
