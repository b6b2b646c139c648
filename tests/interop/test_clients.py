"""Packages that ask for torch's DTensor, as they are found in the wild, on tensors of ours."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor as TorchDTensor

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ArgumentError

_EARLY = """
from torch.distributed.tensor import DTensor

def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x

def part(x):
    return x._local_tensor if isinstance(x, (int, DTensor)) and hasattr(x, "_local_tensor") else None

def doubled(x):
    local = x.to_local() if isinstance(x, DTensor) else x
    made = local * 2
    if isinstance(x, DTensor):
        made = DTensor.from_local(
            local_tensor=made, device_mesh=x.device_mesh, placements=x.placements, run_check=False, shape=x.shape,
            stride=x.stride(),
        )
    return made
"""
_LATE = """
def whole(x):
    from torch.distributed.tensor import DTensor
    return x.full_tensor() if isinstance(x, DTensor | int) else x
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of two modules, of which the second has not been imported yet."""
    folder = tmp_path / "asking_client"
    folder.mkdir()
    for name, text in (("__init__", ""), ("early", _EARLY), ("late", _LATE)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("asking_client.early")
    for name in [name for name in sys.modules if name.partition(".")[0] == "asking_client"]:
        del sys.modules[name]


def _uneven() -> T.DTensor:
    return T.distribute_tensor(torch.arange(5.0), T.Mesh((2,)), [T.Shard(0)])


def test_a_package_that_is_answered_finds_our_tensors_to_be_torchs(client: ModuleType) -> None:
    assert run_ranks(2, lambda rank: isinstance(client.whole(_uneven()), T.DTensor)) == [True, True]
    with T.answer_clients("asking_client"):
        late = importlib.import_module("asking_client.late")

        def body(rank: int) -> list[list[float]]:
            x = _uneven()
            assert not isinstance(x, TorchDTensor)  # this module is of another package
            doubled = client.doubled(x)
            assert type(doubled) is T.DTensor
            assert doubled.placements == x.placements
            found = [client.whole(x), late.whole(x), client.part(x), doubled.full_tensor()]
            assert all(type(one) is torch.Tensor for one in found)
            return [one.tolist() for one in found]

        whole = [0.0, 1.0, 2.0, 3.0, 4.0]
        twice = [0.0, 2.0, 4.0, 6.0, 8.0]
        assert run_ranks(2, body) == [[whole, whole, whole[:3], twice], [whole, whole, whole[3:], twice]]
        assert client.whole(torch.ones(2)).tolist() == [1.0, 1.0]  # a plain tensor is none
    for function in (client.whole, late.whole):
        ask: Callable[[Any], Any] = function
        assert run_ranks(2, lambda rank: isinstance(ask(_uneven()), T.DTensor)) == [True, True]  # noqa: B023


def test_two_who_ask_for_a_package_each_end_their_own(client: ModuleType) -> None:
    first, second = T.answer_clients("asking_client"), T.answer_clients("asking_client", "another_client")
    first.undo()
    first.undo()
    assert run_ranks(2, lambda rank: type(client.whole(_uneven()))) == [torch.Tensor] * 2
    second.undo()
    assert run_ranks(2, lambda rank: type(client.whole(_uneven()))) == [T.DTensor] * 2
    assert not any(type(finder).__module__ == "tritondt.interop.clients" for finder in sys.meta_path)


@pytest.mark.parametrize("package", ["torch", "tritondt", "asking_client.early", "", 3])
def test_torch_itself_is_never_answered(package: str) -> None:
    with pytest.raises(ArgumentError, match=r"answer_clients (was given|got)"):
        T.answer_clients(package)
