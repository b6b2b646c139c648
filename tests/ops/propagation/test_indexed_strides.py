"""Where what is read, filled and picked by indices lies in memory: strides as on one device, whatever has moved."""

import pytest
import torch

import tritondt as T
from tests.ops.sharded import compare, distribute
from tritondt.comm.transports.threads import run_ranks


def test_a_filled_copy_of_a_diagonal_lies_in_memory_as_on_one_device():
    full, index = torch.arange(24.0).reshape(2, 3, 4), torch.tensor([1])
    expected = full.diagonal(1, 0, 1).index_fill(-1, index, 7.0)

    def body(rank):
        mesh = T.Mesh((2,))
        for text in ("R", "S2"):
            found = distribute(full, mesh, text).diagonal(1, 0, 1).index_fill(-1, distribute(index, mesh, "R"), 7.0)
            assert found.stride() == expected.stride()
            compare(found, expected, exact=True)

    run_ranks(2, body)


@pytest.mark.parametrize("text", ["S0", "S2", "R", "P"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.mT,
        lambda x: x.permute(2, 0, 1),
        lambda x: x.permute(1, 2, 0)[:, ::2],
        lambda x: x.transpose(0, 1)[:, :1],
        lambda x: x[None].permute(3, 0, 1, 2)[0].expand(1, 2, 3),
    ],
    ids=["swapped", "turned", "with gaps", "with a dim of length 1", "expanded"],
)
def test_what_a_mask_picks_lies_in_memory_as_on_one_device(view, text):
    full = torch.arange(24.0).reshape(2, 3, 4)
    viewed = view(full)
    masks = [torch.tensor([True, False, True, True])[: viewed.shape[0]], viewed[0] % 3 == 0]

    def body(rank):
        mesh = T.Mesh((2,))
        for along, mask in enumerate(masks):
            before = (slice(None),) * along
            index, distributed_index = (*before, mask), (*before, distribute(mask, mesh, "R"))
            expected, found = viewed[index], view(distribute(full, mesh, text))[distributed_index]
            compare(found, expected, exact=True)
            assert found.stride() == found.to_local().stride() == expected.stride()

    run_ranks(2, body)


@pytest.mark.parametrize("text", ["S0", "R", "P"])
def test_rows_without_repeats_lie_in_memory_as_on_one_device(text):
    full = torch.tensor([[1.0, 2.0, 1.0], [0.0, 3.0, 0.0]])
    expected = torch.unique(full.mT, dim=0)

    def body(rank):
        found = torch.unique(distribute(full, T.Mesh((2,)), text).mT, dim=0)
        compare(found, expected, exact=True)
        assert found.stride() == expected.stride()

    run_ranks(2, body)
