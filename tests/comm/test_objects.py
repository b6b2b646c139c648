"""Objects of all ranks, gathered by ranks that have no NumPy."""

import sys
import warnings
from typing import Any

import pytest
import torch

from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.objects import bytes_of, gather_objects


def gather_without_numpy(rank: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")  # users did not ask torch for it
        patch.setattr(torch.Tensor, "numpy", None)  # what torch's own collectives of objects call
        return gather_objects({"rank": rank, "text": "x" * (1000 * rank)})


@pytest.mark.extended
def test_objects_of_any_size_come_to_all_ranks() -> None:
    with GlooRanks(3) as ranks:
        found = ranks.run(gather_without_numpy)
    assert found == [[{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(3)]] * 3


def test_the_content_of_a_tensor() -> None:
    assert bytes_of(torch.arange(6, dtype=torch.int16).reshape(2, 3).t()) == b"".join(
        number.to_bytes(2, sys.byteorder) for number in (0, 3, 1, 4, 2, 5)
    )
    assert bytes_of(torch.empty(0)) == b""
