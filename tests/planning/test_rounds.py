"""Rounds of messages through slots: pieces of regions, and terms that wait for those of later rounds."""

import random
from itertools import product

import pytest

from tritondt.planning.exchange import Message, Part
from tritondt.planning.rounds import cut, last_rounds, pieces, rounds, staged_terms
from tritondt.sharding import intervals as regions
from tritondt.sharding.intervals import Region


def random_region(rng: random.Random) -> Region:
    """A region of up to 4 dims and up to 3 runs in each."""
    dims = []
    for _ in range(rng.randrange(5)):
        bounds = sorted(rng.sample(range(20), 2 * rng.randint(1, 3)))
        dims.append(regions.merge(zip(bounds[::2], bounds[1::2], strict=True)))
    return tuple(dims)


def elements(region: Region) -> list[tuple[int, ...]]:
    """Indices of a region in row-major order."""
    return list(
        product(*([index for start, stop in intervals for index in range(start, stop)] for intervals in region))
    )


@pytest.mark.parametrize("seed", range(40))
def test_pieces_make_up_a_region_in_its_order(seed: int) -> None:
    rng = random.Random(seed)
    region, most = random_region(rng), rng.randint(1, 30)
    found = cut(region, most)
    assert [index for piece in found for index in elements(piece)] == elements(region)
    assert all(1 <= regions.numel(piece) <= most for piece in found)
    assert found == [region] or len(found) > 1


@pytest.mark.parametrize("seed", range(40))
def test_rounds_hold_all_pieces_in_order_up_to_a_chunk(seed: int) -> None:
    rng = random.Random(seed)
    itemsizes = sorted((rng.choice([1, 2, 4, 8, 16]) for _ in range(3)), reverse=True)
    parts = tuple(Part(random_region(rng), tensor=tensor) for tensor in range(3) for _ in range(rng.randint(0, 2)))
    chunk_bytes = rng.choice([16, 48, 256, 100_000])
    found = rounds(Message(3, parts), itemsizes, chunk_bytes)
    assert all(message.peer == 3 for message in found)
    in_rounds = [part for message in found for part in message.parts]
    assert in_rounds == [piece for part in parts for piece in pieces(part, itemsizes, chunk_bytes)]
    sizes = [sum(part.numel * itemsizes[part.tensor] for part in message.parts) for message in found]
    assert all(0 < size <= chunk_bytes for size in sizes)
    for size, message in zip(sizes, found[1:], strict=False):  # no round has room for the next one's first piece
        assert size + message.parts[0].numel * itemsizes[message.parts[0].tensor] > chunk_bytes


def test_a_part_is_cut_alike_whatever_comes_before_it() -> None:
    large, small = Part((((0, 10),), ((0, 3),))), Part((((0, 5),),), tensor=1)
    alone = rounds(Message(0, (large,)), [4, 4], 48)
    behind = rounds(Message(1, (small, large)), [4, 4], 48)
    assert [part for message in alone for part in message.parts] == [
        part for message in behind for part in message.parts if part.tensor == 0
    ]
    assert (len(alone), len(behind)) == (3, 4)


def test_terms_wait_for_the_last_of_their_piece() -> None:
    """Peer 0 sends another tensor first, so that its terms come a round later than peer 1's, which wait in memory."""
    region = (((0, 8),),)
    moved, terms = Part((((0, 6),),), tensor=0), [Part(region, contribution, tensor=1) for contribution in (0, 1)]
    receives = [
        rounds(Message(0, (moved, terms[0])), [4, 4], 24),
        rounds(Message(1, (terms[1],)), [4, 4], 24),
    ]

    def moves(part: Part) -> bool:
        return part.tensor == 0

    halves = [(((0, 4),),), (((4, 8),),)]
    assert last_rounds(receives, moves) == {(1, halves[0]): 1, (1, halves[1]): 2}
    assert staged_terms(receives, moves) == [
        (0, 1, Part(halves[0], 1, 1)),
        (1, 1, Part(halves[1], 1, 1)),
    ]
    assert staged_terms(receives[1:], moves) == []
