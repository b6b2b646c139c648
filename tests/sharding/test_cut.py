"""One axis cutting one dim, against torch.chunk and torch.split."""

from collections.abc import Iterator

import pytest
import torch

from tests.harness.oracle.arithmetic import pieces
from tritondt.sharding.cut import BlockCyclicCut, ChunkCut, Cut
from tritondt.sharding.intervals import Intervals, total
from tritondt.sharding.placement import Shard


def indices_of(intervals: Intervals) -> list[int]:
    return [index for start, stop in intervals for index in range(start, stop)]


def as_intervals(indices: list[int]) -> Intervals:
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return tuple(found)


def some_cuts(length: int, parts: int) -> Iterator[Shard]:
    """Every unit and repeats that divide, and sizes that leave the first, the last or the middle one empty."""
    for repeats in (value for value in range(1, max(length, 1) + 1) if length % value == 0):
        block = length // repeats
        for unit in (value for value in range(1, max(block, 2) + 1) if block % value == 0):
            yield Shard(0, unit=unit, repeats=repeats)
        rest = block // 2
        yield Shard(
            0, sizes=(rest, *[0] * (parts - 2), block - rest)[:parts] if parts > 1 else (block,), repeats=repeats
        )
        yield Shard(0, sizes=(*[0] * (parts - 1), block), repeats=repeats)
    for block in (1, 2, 3, 5, length + 1):
        yield Shard(0, block=block)


def cut_of(shard: Shard, length: int, parts: int) -> Cut:
    return shard.cut(parts, length)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("length", range(13))
def test_pieces_are_those_of_torch(length: int, parts: int) -> None:
    whole = as_intervals(list(range(length)))
    for shard in some_cuts(length, parts):
        cut = cut_of(shard, length, parts)
        expected = [piece.tolist() for piece in pieces(torch.arange(length), length, parts, shard)]
        assert [indices_of(cut.piece(whole, index)) for index in range(parts)] == expected, shard
        assert cut.largest(length) == max(map(len, expected)), shard


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 6, 8, 12])
def test_the_second_cut_takes_what_the_first_left(length: int, parts: int) -> None:
    whole = torch.arange(length)
    for first in some_cuts(length, 3):
        for held in pieces(whole, length, 3, first):
            for repeats in (value for value in (1, 2, 3) if length % value == 0):
                if (length // repeats) % first.unit == 0:
                    check_nested(held, length, parts, Shard(0, unit=1, repeats=repeats))
            for block in (1, 2, 3):
                check_nested(held, length, parts, Shard(0, block=block))


def check_nested(held: torch.Tensor, length: int, parts: int, shard: Shard) -> None:
    cut, intervals = cut_of(shard, length, parts), as_intervals(held.tolist())
    expected = [piece.tolist() for piece in pieces(held, length, parts, shard)]
    assert [indices_of(cut.piece(intervals, index)) for index in range(parts)] == expected
    most = cut.largest(len(held))
    assert max(map(len, expected)) <= most
    if shard.repeats > 1:  # an even share, and of each block a part of a unit
        assert most * parts <= len(held) + shard.repeats * shard.unit * (parts - 1)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 5, 8, 12])
def test_pieces_that_meet_are_found_without_listing_them(length: int, parts: int) -> None:
    whole = as_intervals(list(range(length)))
    for shard in some_cuts(length, parts):
        cut = cut_of(shard, length, parts)
        held = [set(indices_of(cut.piece(whole, index))) for index in range(parts)]
        for start in range(length):
            for stop in range(start + 1, length + 1):
                expected = [index for index in range(parts) if held[index] & set(range(start, stop))]
                assert cut.pieces_meeting(whole, ((start, stop),)) == expected, (shard, start, stop)


def test_pieces_are_found_by_arithmetic_where_there_are_many() -> None:
    """A billion indices in a million pieces: listing any of them would take minutes."""
    cut = ChunkCut(1 << 20, 1 << 30)
    assert cut.piece(((0, 1 << 30),), 12345) == ((12345 << 10, 12346 << 10),)
    assert cut.pieces_meeting(((0, 1 << 30),), ((5 << 10, (7 << 10) + 1),)) == [5, 6, 7]
    far = 1_000_000 << 10
    assert cut.pieces_meeting(((0, 1 << 30),), ((5 << 10, (5 << 10) + 1), (far, far + 1))) == [5, 1_000_000]


def test_dealt_blocks_are_found_by_arithmetic_where_there_are_many() -> None:
    cut = BlockCyclicCut(1 << 20, 1 << 30, 1 << 8)
    period = 1 << 28
    assert cut.piece(((0, 1 << 30),), 5) == tuple((turn * period + 1280, turn * period + 1536) for turn in range(4))
    assert cut.pieces_meeting(((0, 1 << 30),), ((250, 300), (period + 1, period + 2))) == [0, 1]
    assert cut.largest(1 << 30) == 1 << 10


def test_units_stay_whole() -> None:
    """10 heads of 128 over 4 ranks are 3, 3, 3 and 1 heads."""
    cut = ChunkCut(4, 1280, unit=128)
    assert [total(cut.piece(((0, 1280),), index)) // 128 for index in range(4)] == [3, 3, 3, 1]


def test_what_an_earlier_cut_has_left_is_bounded_in_units() -> None:
    assert ChunkCut(2, 16, unit=4).largest(8) == 4


def test_only_blocks_that_are_held_in_part_are_visited() -> None:
    assert list(ChunkCut(2, 12, repeats=3)._blocks(((0, 3), (4, 5)))) == [((0, 3),), ((4, 5),)]
