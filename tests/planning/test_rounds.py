"""Rounds of messages through slots: pieces of parts, and terms that wait for those of later rounds."""

import random
from collections.abc import Iterable
from itertools import accumulate, product

import pytest

from tritondt.planning.exchange import Message, Part
from tritondt.planning.rounds import Piece, last_rounds, pieces, rounds, staged_terms
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Region


def random_region(rng: random.Random) -> Region:
    """A region of up to 4 dims and up to 3 runs in each."""
    dims = []
    for _ in range(rng.randrange(5)):
        bounds = sorted(rng.sample(range(20), 2 * rng.randint(1, 3)))
        dims.append(regions.merge(zip(bounds[::2], bounds[1::2], strict=True)))
    return tuple(dims)


def positions(bounds: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Positions within bounds in row-major order."""
    return list(product(*(range(start, stop) for start, stop in bounds)))


@pytest.mark.parametrize("seed", range(40))
def test_pieces_make_up_a_part_in_its_order(seed: int) -> None:
    rng = random.Random(seed)
    part, most = Part(random_region(rng)), rng.randint(1, 30)
    found = list(pieces(part, [1], most))
    whole = [(0, regions.total(intervals)) for intervals in part.region]
    assert [index for piece in found for index in positions(piece.bounds)] == positions(whole)
    assert all(piece.numel == len(positions(piece.bounds)) for piece in found)
    assert all(1 <= piece.numel <= most for piece in found)
    assert [piece.start for piece in found] == [0, *accumulate(piece.numel for piece in found)][:-1]
    assert len(found) == 1 or part.numel > most


@pytest.mark.parametrize("seed", range(40))
def test_rounds_hold_all_pieces_in_order_up_to_a_chunk(seed: int) -> None:
    rng = random.Random(seed)
    itemsizes = sorted((rng.choice([1, 2, 4, 8, 16]) for _ in range(3)), reverse=True)
    parts = tuple(Part(random_region(rng), tensor=tensor) for tensor in range(3) for _ in range(rng.randint(0, 2)))
    chunk_bytes = rng.choice([16, 48, 256, 100_000])
    found = rounds(Message(3, parts), itemsizes, chunk_bytes)
    in_rounds = [piece for each in found for piece in each]
    assert in_rounds == [piece for part in parts for piece in pieces(part, itemsizes, chunk_bytes)]
    sizes = [sum(piece.numel * itemsizes[piece.part.tensor] for piece in each) for each in found]
    assert all(0 < size <= chunk_bytes for size in sizes)
    for size, (first, *_) in zip(sizes, found[1:], strict=False):  # no round has room for the next one's first piece
        assert size + first.numel * itemsizes[first.part.tensor] > chunk_bytes


def test_a_part_is_cut_alike_whatever_comes_before_it() -> None:
    large, small = Part((((0, 10),), ((0, 3),))), Part((((0, 5),),), tensor=1)
    alone = rounds(Message(0, (large,)), [4, 4], 48)
    behind = rounds(Message(1, (small, large)), [4, 4], 48)
    assert [piece for each in alone for piece in each] == [
        piece for each in behind for piece in each if piece.part.tensor == 0
    ]
    assert (len(alone), len(behind)) == (3, 4)


def test_terms_wait_for_the_last_of_their_piece() -> None:
    """Peer 0 sends another tensor first, so that its terms come a round later than peer 1's, which wait in memory."""
    region = (((0, 8),),)
    moved, terms = Part((((0, 6),),), tensor=0), [Part(region, contribution, tensor=1) for contribution in (0, 1)]
    receives = [
        (0, rounds(Message(0, (moved, terms[0])), [4, 4], 24)),
        (1, rounds(Message(1, (terms[1],)), [4, 4], 24)),
    ]

    def moves(part: Part) -> bool:
        return part.tensor == 0

    assert last_rounds([each for _, each in receives], moves) == {(1, region, 0): 1, (1, region, 4): 2}
    assert staged_terms(receives, moves) == [
        (0, 1, Piece(Part(region, 1, 1), 0, 4, ((0, 4),))),
        (1, 1, Piece(Part(region, 1, 1), 4, 4, ((4, 8),))),
    ]
    assert staged_terms(receives[1:], moves) == []
