"""Other libraries take no distributed tensor through DLPack: it has no memory of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import dlpack

import tritondt as T
from tritondt.comm.transports.threads import run_ranks

EXPORTS: dict[str, Callable[[Any], Any]] = {
    "torch.utils.dlpack.to_dlpack": lambda x: dlpack.to_dlpack(x),
    "torch.to_dlpack": lambda x: torch.to_dlpack(x),
    "torch.from_dlpack": torch.from_dlpack,
    "__dlpack__": lambda x: x.__dlpack__(),
    "__dlpack__ of a version": lambda x: x.__dlpack__(stream=None, max_version=(1, 0)),
    "__dlpack_device__": lambda x: x.__dlpack_device__(),
}


@pytest.mark.in_core(6)
@pytest.mark.parametrize("name", EXPORTS)
def test_no_capsule_of_a_distributed_tensor(name: str) -> None:
    def ask(rank: int) -> None:
        x = T.distribute_tensor(torch.arange(12.0).view(4, 3), T.Mesh((2,)), [T.Shard(0)])
        for given in (x, x[1:], x.view(12)):
            with pytest.raises(T.PropagationError, match=r"DLPack's export of a distributed tensor .*x\.to_local\(\)"):
                EXPORTS[name](given)
        part = EXPORTS[name](x.to_local())
        if name.startswith("torch.from"):
            assert part.data_ptr() == x.to_local().data_ptr()
        elif "to_dlpack" in name:
            assert torch.equal(torch.from_dlpack(part), x.to_local())

    run_ranks(2, ask)
