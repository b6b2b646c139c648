"""Exchanges taken apart: by distance one peer each way, and all parts together the exchange again."""

import random
from collections import Counter

import pytest
import torch

import tritondt as T
from tests.harness.oracle.delivery import assert_both_sides_agree, indices
from tests.harness.oracle.random_layouts import random_pair
from tritondt.planning.chunks import by_distance, in_pieces
from tritondt.planning.exchange import Exchange, Part, exchange
from tritondt.sharding.intervals import Region
from tritondt.sharding.layout import Layout


def exchanges_of(source: Layout, target: Layout) -> dict[int, Exchange]:
    return {source.position(coordinate): exchange(source, target, coordinate) for coordinate in source.coordinates()}


def sides(found: Exchange) -> list[tuple[str, int, Part]]:
    """Every part with where it goes or comes from."""
    return [
        *(("send", message.peer, part) for message in found.sends for part in message.parts),
        *(("receive", message.peer, part) for message in found.receives for part in message.parts),
        *(("keep", -1, part) for part in found.keeps),
    ]


def elements(found: Exchange) -> Counter[tuple[str, int, int, tuple[int, ...]]]:
    """How often every element goes each way."""
    counted: Counter[tuple[str, int, int, tuple[int, ...]]] = Counter()
    for side, peer, part in sides(found):
        for index in torch.stack([found.flatten() for found in indices(part.region)], 1).tolist():
            counted[side, peer, part.contribution, tuple(index)] += 1
    return counted


def sharded(num_ranks: int, seed: int) -> tuple[Layout, Layout, int]:
    """A gather or a reduce-scatter over uneven shards, empty ones among them, and the dim that is cut."""
    chosen = random.Random(seed)
    dim, sizes = chosen.randrange(3), [chosen.choice((0, 0, 1, 2, 5, 7)) for _ in range(num_ranks)]
    shape = [chosen.randint(1, 3) for _ in range(3)]
    shape[dim] = sum(sizes)
    cut = Layout((num_ranks,), (T.Shard(dim, sizes=tuple(sizes)),), tuple(shape))
    if seed % 2:
        return cut, cut.with_placements([T.Replicate()]), dim
    return cut.with_placements([T.Partial()]), cut, dim


@pytest.mark.in_ci(13)
@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("shares", [(1,), (1, 1), (1, 1, 1), (4, 2, 1, 1), (1, 3)], ids=str)
def test_chunks_together_are_the_exchange_and_both_sides_agree(num_ranks, shares):
    for seed in range(12):
        source, target, dim = sharded(num_ranks, seed)
        whole = exchanges_of(source, target)
        distances = {own: by_distance(found, own, num_ranks) for own, found in whole.items()}
        for distance in range(num_ranks):
            of_ranks = {own: in_pieces(found[distance], dim, shares) for own, found in distances.items()}
            for number in range(len(shares)):
                chunk = {own: pieces[number] for own, pieces in of_ranks.items()}
                assert_both_sides_agree(chunk)
                for own, found in chunk.items():
                    assert {message.peer for message in found.sends} <= {(own + distance) % num_ranks}
                    assert {message.peer for message in found.receives} <= {(own - distance) % num_ranks}
                    assert all(part.numel for _, _, part in sides(found))
        for own, found in whole.items():
            pieces = [piece for chunk in distances[own] for piece in in_pieces(chunk, dim, shares)]
            together: Counter[tuple[str, int, int, tuple[int, ...]]] = Counter()
            for piece in pieces:
                assert piece.contributions == found.contributions
                together += elements(piece)
            assert together == elements(found), (source, target, own)


def test_any_exchange_by_distance():
    for seed in range(100):
        source, target = random_pair(random.Random(seed), torch.int64)
        for own, found in exchanges_of(source, target).items():
            distances = by_distance(found, own, source.num_ranks)
            assert (distances[0].sends, distances[0].receives) == ((), ())
            parts = [side for chunk in distances for side in sides(chunk)]
            assert sorted(parts, key=repr) == sorted(sides(found), key=repr)


def test_pieces_are_in_proportion_and_in_order():
    region: Region = (((0, 2),), ((3, 5), (7, 12)))
    pieces = in_pieces(Exchange((), (), (Part(region, contribution=4),)), 1, (1, 1, 1))
    assert [piece.keeps[0].region[1] for piece in pieces] == [((3, 5),), ((7, 9),), ((9, 12),)]
    assert {piece.keeps[0].contribution for piece in pieces} == {4}
    halves = in_pieces(Exchange((), (), (Part(region),)), 1, (4, 2, 1))
    assert [piece.keeps[0].region[1] for piece in halves] == [((3, 5), (7, 9)), ((9, 11),), ((11, 12),)]
    short = in_pieces(Exchange((), (), (Part((((5, 6),),)),)), 0, (1, 1, 1))
    assert [len(piece.keeps) for piece in short] == [0, 0, 1]
