"""Gathers and reductions of fully_shard on several hosts: gradients are those of ranks that share one."""

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.fsdp import fully_shard


@pytest.mark.parametrize("hosts", [(0, 0, 0, 1, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)], ids=["FSDP", "HSDP"])
def test_gradients(mesh_shape: tuple[int, ...], hosts: tuple[int, ...]) -> None:
    def body(rank: int) -> list[object]:
        module = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 7))
        common = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=common))
        fully_shard(module, mesh=T.Mesh(mesh_shape))
        own = torch.Generator().manual_seed(rank)
        module(torch.randint(-2, 3, (4, 16), generator=own).float()).sum().backward()
        return [parameter.grad.full_tensor().tolist() for parameter in module.parameters()]  # type: ignore[union-attr]

    assert run_ranks(8, body, hosts=hosts) == run_ranks(8, body)
