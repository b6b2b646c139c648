"""What torch's docstrings say of ones, zeros, empty, full, rand and randn."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.torch_api.behaviours import NUM_RANKS, Behaviour, behaviour, behaviours_of
from tests.torch_api.test_dtensor import ROWS, exactly, line
from tritondt.comm.transports.threads import run_ranks

FACTORIES = {"ones": 1.0, "zeros": 0.0, "empty": None, "full": 7.0, "rand": None, "randn": None}


def make(name: str, *size: Any, **options: Any) -> T.DTensor:
    if name in ("rand", "randn"):
        torch.manual_seed(5)
    if name == "full":
        return T.full(size[0] if len(size) == 1 else size, 7.0, **options)
    found: T.DTensor = getattr(T, name)(*size, **options)
    return found


def _register(name: str) -> None:
    @behaviour(name, "summary", "size", "device_mesh", "placements", "returns")
    def values(rank: int) -> None:
        for size in (((10, 4),), ([10, 4],), (10, 4)):
            found = make(name, *size, device_mesh=line(), placements=[T.Shard(0)])
            assert type(found) is T.DTensor
            assert tuple(found.shape) == (10, 4)
            assert found.device_mesh is line()
            assert found.placements == (T.Shard(0),)
            assert tuple(found.to_local().shape) == tuple(ROWS[rank].shape)
            whole, expected = found.full_tensor(), FACTORIES[name]
            if expected is not None:
                exactly(whole, torch.full((10, 4), expected))
            if name == "rand":
                assert 0 <= whole.min() < whole.max() < 1
            if name == "randn":
                assert whole.unique().numel() == 40
                assert whole.min() < 0
            if name.startswith("rand"):
                exactly(make(name, 10, 4, device_mesh=line()).to_local(), whole)  # whatever the layout

    @behaviour(name, "dtype", "layout", "requires_grad")
    def options(rank: int) -> None:
        found = make(name, 3, device_mesh=line(), dtype=torch.float64, layout=torch.strided, requires_grad=True)
        assert (found.dtype, found.layout, found.requires_grad) == (torch.float64, torch.strided, True)
        default = make(name, 3, device_mesh=line())
        assert (default.dtype, default.layout, default.requires_grad) == (torch.float32, torch.strided, False)


for _name in FACTORIES:
    _register(_name)


@behaviour("full", "fill_value")
def _(rank: int) -> None:
    for value in (2.5, -1, True):
        exactly(T.full((3,), value, dtype=torch.float32, device_mesh=line()).to_local(), torch.full((3,), float(value)))


@pytest.mark.parametrize("found", behaviours_of(__name__), ids=str)
def test_behaviour(found: Behaviour) -> None:
    run_ranks(NUM_RANKS, found.run)
