"""Lists of numbers as an index, which every rank knows."""

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks


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
