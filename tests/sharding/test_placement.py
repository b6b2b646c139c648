"""Placements as values and as text."""

import pickle
from itertools import product

import pytest
import torch.distributed.tensor
from hypothesis import given
from hypothesis import strategies as st

import tritondt as T
from tritondt.sharding.placement import REDUCE_OPS, placements_text

shards = st.builds(
    T.Shard,
    st.integers(-3, 5),
    unit=st.integers(1, 200),
    sizes=st.none() | st.lists(st.integers(0, 50), min_size=1, max_size=5).map(tuple),
    repeats=st.integers(1, 9),
)
placements = st.one_of(shards, st.just(T.Replicate()), st.builds(T.Partial, st.sampled_from(REDUCE_OPS)))


@given(st.lists(placements, min_size=1, max_size=4).map(tuple))
def test_text_reads_back(some: tuple[T.Placement, ...]) -> None:
    assert T.parse_placements(placements_text(some)) == some


@given(placements)
def test_values_are_equal_hashable_and_pickled(placement: T.Placement) -> None:
    copied = pickle.loads(pickle.dumps(placement))
    assert copied == placement
    assert hash(copied) == hash(placement)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S0, R", (T.Shard(0), T.Replicate())),
        ("(S-1)", (T.Shard(-1),)),
        ("P", (T.Partial("sum"),)),
        ("P(max),S1(unit=128)", (T.Partial("max"), T.Shard(1, unit=128))),
        (" ( S0( unit=2 , sizes=4/0/2 ) , R ) ", (T.Shard(0, unit=2, sizes=(4, 0, 2)), T.Replicate())),
        ("S0(repeats=3), S0", (T.Shard(0, repeats=3), T.Shard(0))),
        ("S0(sizes=5)", (T.Shard(0, sizes=(5,)),)),
        ("()", ()),
    ],
)
def test_text_that_people_write_is_read(text: str, expected: tuple[T.Placement, ...]) -> None:
    assert T.parse_placements(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "X",
        "S",
        "S0(",
        "S0(unit)",
        "S0(units=3)",
        "S0(unit=a)",
        "S0(sizes=1/a)",
        "R0",
        "P(",
        "S0 R",
        "P(sum)(max)",
        "S0()x",
    ],
)
def test_text_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(T.LayoutError, match=r"allowed (are|is)"):
        T.parse_placements(text)


def test_reprs_are_short() -> None:
    assert repr((T.Shard(1), T.Replicate(), T.Partial("avg"))) == "(S1, R, P(avg))"
    assert repr(T.Shard(0, unit=4, sizes=(8, 0), repeats=2)) == "S0(unit=4, sizes=8/0, repeats=2)"


def test_questions_about_kind() -> None:
    shard, replicate, partial = T.Shard(1), T.Replicate(), T.Partial("max")
    assert (shard.is_shard(), shard.is_shard(1), shard.is_shard(0)) == (True, True, False)
    assert (replicate.is_shard(), replicate.is_replicate(), replicate.is_partial()) == (False, True, False)
    assert (partial.is_partial(), partial.is_partial("max"), partial.is_partial("sum")) == (True, True, False)


def test_sizes_may_be_any_sequence() -> None:
    assert T.Shard(0, sizes=[1, 2]) == T.Shard(0, sizes=(1, 2))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("0",), r"Shard takes a tensor dim as an int, got '0'"),
        ((True,), r"Shard takes a tensor dim as an int, got True"),
        ((0, 0), r"Shard\(0\) got unit=0; allowed is an int of 1 or more"),
        ((0, 1.5), r"Shard\(0\) got unit=1\.5; allowed is an int of 1 or more"),
        ((0, 1, None, 0), r"Shard\(0\) got repeats=0; allowed is an int of 1 or more"),
        ((0, 1, (3, -1)), r"Shard\(0\) got sizes=\(3, -1\); allowed are ints of 0 or more"),
    ],
)
def test_shards_that_cannot_be_are_refused(arguments: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(T.LayoutError, match=sentence):
        T.Shard(*arguments)  # type: ignore[arg-type]


def test_unknown_reductions_are_refused() -> None:
    with pytest.raises(T.LayoutError, match=r"reduce_op='mean'; allowed are sum, avg, max, min, product"):
        T.Partial("mean")  # type: ignore[arg-type]


def test_pieces_of_a_plain_cut_are_those_of_torch() -> None:
    for size, pieces in product((0, 1, 5, 6, 9), (1, 2, 4)):
        for rank in range(pieces):
            expected = torch.distributed.tensor.Shard.local_shard_size_and_offset(size, pieces, rank)
            assert T.Shard.local_shard_size_and_offset(size, pieces, rank) == expected
            assert T.Shard(1).local_shard_size_and_offset(size, pieces, rank) == expected


def test_pieces_of_other_cuts() -> None:
    assert [T.Shard(0, unit=3).local_shard_size_and_offset(9, 2, rank) for rank in (0, 1)] == [(6, 0), (3, 6)]
    assert T.Shard(0, sizes=(2, 0, 5)).local_shard_size_and_offset(7, 3, 2) == (5, 2)
    with pytest.raises(T.LayoutError, match=r"S0\(repeats=2\) gives piece 1 of 8 indices 2 blocks, at no one offset"):
        T.Shard(0, repeats=2).local_shard_size_and_offset(8, 2, 1)
