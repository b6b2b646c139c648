"""Memory of distributed tensors: the outer tensor has none, whichever part of its memory the local tensor takes."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks

FULL = torch.arange(24.0).reshape(6, 4)


def _from_a_view(mesh: T.Mesh) -> Any:
    assert mesh.coordinate is not None
    start = 3 * mesh.coordinate[0]
    return T.DTensor.from_local(FULL[start : start + 3], mesh, [T.Shard(0)])


def _with_other_data(mesh: T.Mesh) -> Any:
    made = distribute(FULL, mesh, "S0")
    made.data = distribute(FULL, mesh, "S1")[2:4]
    return made


def _moved(mesh: T.Mesh) -> Any:
    return distribute(FULL, mesh, "S0")[1]


PARTS: dict[str, Callable[[T.Mesh], Any]] = {
    "columns of rows": lambda mesh: distribute(FULL, mesh, "S0")[:, 1:3],
    "rows of columns": lambda mesh: distribute(FULL, mesh, "S1")[2:4],
    "rows of replicas": lambda mesh: distribute(FULL, mesh, "R")[2:],
    "a row that moved": _moved,
    "from a view": _from_a_view,
    "pieces": lambda mesh: distribute(FULL, mesh, "S0").split([1, 3], 1)[1],
    "foreach": lambda mesh: torch._foreach_neg([distribute(FULL, mesh, "S1")])[0],
    "with other data": _with_other_data,
    "a parameter": lambda mesh: nn.Parameter(distribute(FULL, mesh, "S1")[1:]),
    "in inference mode": lambda mesh: _inferred(distribute(FULL, mesh, "S1")),
}


def _inferred(x: Any) -> Any:
    with torch.inference_mode():
        return x[3:]


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": _saved,
    "to": lambda x: x.to("cpu", copy=True),
    "share_memory_": lambda x: x.clone().share_memory_(),
}


@pytest.mark.parametrize("part", PARTS)
def test_an_outer_tensor_has_no_memory(part):
    def body(rank):
        x = PARTS[part](T.Mesh((2,)))
        assert (x.data_ptr(), x.storage_offset()) == (0, 0)
        with pytest.raises(RuntimeError, match="invalid python storage"):
            x.untyped_storage().data_ptr()
        assert not x.is_pinned()
        for name, made in COPIES.items():
            found = made(x.detach())
            assert (found.data_ptr(), found.storage_offset()) == (0, 0), name
            torch.testing.assert_close(found.full_tensor(), x.detach().full_tensor(), rtol=0, atol=0, msg=name)

    run_ranks(2, body)


def test_writes_by_places_of_a_view_begin_where_its_part_begins():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "R")
        x[2:].fill_diagonal_(-1)
        expected = FULL.clone()
        expected[2:].fill_diagonal_(-1)
        torch.testing.assert_close(x.to_local(), expected, rtol=0, atol=0)
        own: Any = x[2:].as_strided((2, 2), (4, 1))
        torch.testing.assert_close(own.to_local(), expected[2:4, :2], rtol=0, atol=0)
        anywhere: Any = x.as_strided((2, 2), (4, 1), 5)
        torch.testing.assert_close(anywhere.to_local(), expected.as_strided((2, 2), (4, 1), 5), rtol=0, atol=0)
        moved: Any = distribute(FULL, T.Mesh((2,)), "S0")[1:3]
        with pytest.raises(T.PropagationError, match=r"as_strided.*index it, or ask for x\.(clone|full_tensor)\(\)"):
            moved.as_strided((2, 2), (4, 1), 9)

    run_ranks(2, body)
