"""Lists of numbers as an index, which every rank knows."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.sharded import whole as all_of
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode


@pytest.mark.parametrize(
    ("index", "beyond"),
    [
        (([3],), 0),
        ((0, [-6]), 1),
        ((..., 0, [1, 9]), 1),
        ((None, [[0, 3]]), 0),
        (([True, False, True], [5]), 1),
        ([4], 0),
    ],
)
def test_numbers_beyond_a_dim_raise_outside_the_mesh_too(index, beyond):
    whole = torch.arange(15.0).view(3, 5)
    with pytest.raises(IndexError, match="out of bounds"):
        whole[index]

    def body(rank):
        x = T.distribute_tensor(whole, T.Mesh((2,), ranks=(0, 1)), [T.Shard(0)])
        sentence = rf"^index -?\d is out of bounds for dimension {beyond} with size {(3, 5)[beyond]}$"
        with pytest.raises(IndexError, match=sentence):
            x[index]
        with pytest.raises(IndexError, match=sentence):
            x[index] = 1
        assert x[[-3, 2], [0, -5]].shape == (2,)

    run_ranks(3, body)


# Shapes with an index of each: numbers that torch does not look at, since no element is left, and those that it does.
EMPTY: dict[tuple[int, ...], list[tuple[Any, ...]]] = {
    (1, 1, 1): [
        (..., slice(0), [1, 3]),
        (slice(0), [5], [0]),
        ([5], []),
        ([False], [9]),
        (False, [7]),
        ([4], slice(1, 1)),
    ],
    (0, 2): [(slice(None), [5]), ([0], []), ([], [9]), (0, [1]), ([0],), ([0], [5]), (..., None, [2])],
    (2, 0): [(slice(None), [5]), ([9],), ([5], slice(None)), (..., [0]), ([[3]], None)],
    (0, 2, 0): [(slice(None), [5]), (slice(None), [5], [1]), (slice(0), [5], [[]])],
    (3, 4): [
        (slice(2, 1), [4]),
        (slice(0, 9), [4]),
        (slice(None, None, 2), [4]),
        ([True, False, True], [4]),
        (None, [5]),
    ],
}


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_numbers_of_which_nothing_is_picked_are_as_on_one_device(shape):
    whole = torch.ones(shape)

    def read(x, index):
        try:
            return tuple(x[index].shape)
        except IndexError:
            return "IndexError"

    def written(x, index):
        try:
            x[index] = 2
        except IndexError:
            return "IndexError"
        except RuntimeError as error:
            if "setStorage" not in str(error):  # what torch 2.15 says of a plain tensor
                raise
            return "IndexError"
        return x.sum().item()

    def body(rank):
        for dim in range(len(shape)):
            for index in EMPTY[shape]:
                x = T.distribute_tensor(whole.clone(), T.Mesh((2,), ranks=(0, 1)), [T.Shard(dim)])
                assert read(x, index) == read(whole, index), (dim, index)
                found = written(x, index)
                assert rank == 2 or found == written(whole.clone(), index), (dim, index)

    run_ranks(3, body)


def test_a_mask_that_is_a_list_keeps_the_cuts_of_other_dims_and_sends_nothing():
    """Every rank knows the places that it picks, which of a tensor only its values tell."""
    whole = torch.arange(24.0).view(4, 3, 2)
    masks: list[Any] = [
        (slice(None), [True, False, True]),
        (slice(None), [[True, False], [False, False], [True, True]]),
        (..., [False, False]),
        (None, slice(None), [False, True, True], [1]),
    ]

    def body(rank):
        x = T.distribute_tensor(whole, T.Mesh((2,)), [T.Shard(0)])
        for mask in masks:
            with CommDebugMode() as comm:
                found, written = x[mask], x.clone()
                written[mask] = -1.0
            assert comm.get_total_counts() == 0
            expected = whole.clone()
            expected[mask] = -1.0
            torch.testing.assert_close(all_of(found), whole[mask], rtol=0, atol=0)
            torch.testing.assert_close(all_of(written), expected, rtol=0, atol=0)
        picked = x[[[True, False, True], [False, True, False], [False] * 3, [False] * 3]]
        torch.testing.assert_close(all_of(picked), whole[[0, 0, 1], [0, 2, 1]], rtol=0, atol=0)
        with pytest.raises(IndexError, match="mask"):
            x[:, [True, False]]

    run_ranks(2, body)
