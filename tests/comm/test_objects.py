"""Objects of all ranks, gathered by ranks that have no NumPy."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tritondt as T
from tests.comm.transports.test_shared_memory import set_to
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


@pytest.mark.in_core(4)
@pytest.mark.parametrize("own", ["none", "another secret of rank 1", "short", "no secret at all"])
def test_no_object_is_loaded_that_is_not_signed_by_the_secret(four_ranks: GlooRanks, tmp_path: Path, own: str) -> None:
    """One of rank 1 would leave a mark where it is loaded."""
    mark = tmp_path / "loaded"
    texts = four_ranks.run(gather_signed, own, str(mark), timeout_s=60)
    if own == "no secret at all":
        assert texts == ["4"] * 4
        assert mark.exists()
        return
    assert not mark.exists()
    for rank, text in enumerate(texts):
        if own == "short" and rank == 1:
            assert text.startswith("TRITONDT_SECRET is set to a secret of 5 bytes"), text
            continue
        strange = [1] if rank != 1 else [0, 2, 3]
        assert text.startswith(f"objects of ranks {strange} of a process group are "), text
        assert text.endswith("set TRITONDT_SECRET or TRITONDT_SECRET_FILE to the same on all ranks, or on none"), text


def gather_signed(rank: int, own: str, mark: str) -> str:
    secret = (None if own.startswith("no") else own) if rank == 1 else "the secret of the others"
    with set_to("TRITONDT_SECRET", None if own == "no secret at all" else secret):
        try:
            return str(len(gather_objects(Marking(mark) if rank == 1 else rank)))
        except T.WorldError as error:
            return str(error)


class Marking:
    """An object that makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self._path),)


def test_objects_that_all_ranks_sign_are_loaded(four_ranks: GlooRanks) -> None:
    assert four_ranks.run(gather_with_one_secret) == [[0, 1, 2, 3]] * 4


def gather_with_one_secret(rank: int) -> list[int]:
    with set_to("TRITONDT_SECRET", "a secret of all of them"):
        return gather_objects(rank)


def test_the_content_of_a_tensor() -> None:
    assert bytes_of(torch.arange(6, dtype=torch.int16).reshape(2, 3).t()) == b"".join(
        number.to_bytes(2, sys.byteorder) for number in (0, 3, 1, 4, 2, 5)
    )
    assert bytes_of(torch.empty(0)) == b""
