"""A DTensor of torch where one of ours is meant: refused by its type before anything is sent, with what to write."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tritondt as T
from tritondt.experimental import local_map
from tritondt.fsdp import fully_shard
from tritondt.parallel import (
    ColwiseParallel,
    context_parallel_shard,
    parallelize_module,
    ring_attention,
    token_dispatch,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A world of one rank; nothing is sent in it."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield T.init_device_mesh("cpu", (1,))
    T.close()
    dist.destroy_process_group()


def layer(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(4, 4)
    made.weight = nn.Parameter(weight)
    return made


def _ring_attention(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return ring_attention(x, x, x, mesh, length=4)


Case = Callable[[Any, Any, DeviceMesh], object]
CASES: dict[str, Case] = {
    "aten.add.Tensor": lambda ours, theirs, mesh: ours + theirs,
    "aten.cat.default": lambda ours, theirs, mesh: torch.cat([ours, theirs]),
    "aten.copy_.default": lambda ours, theirs, mesh: ours.copy_(theirs),
    "redistribute_many": lambda ours, theirs, mesh: T.redistribute_many([(theirs, [T.Replicate()])]),
    "redistribute": lambda ours, theirs, mesh: T.redistribute(theirs, ours._spec, ours._spec),
    "prefetch": lambda ours, theirs, mesh: T.prefetch(theirs, [T.Replicate()]),
    "DTensor.from_local": lambda ours, theirs, mesh: T.DTensor.from_local(theirs, mesh, [T.Shard(0)]),
    "distribute_tensor": lambda ours, theirs, mesh: T.distribute_tensor(theirs, mesh, [T.Shard(0)]),
    ".*distribute_tensor": lambda ours, theirs, mesh: parallelize_module(layer(theirs), mesh, ColwiseParallel()),
    "a parallelized Linear": lambda ours, theirs, mesh: parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())(
        theirs
    ),
    "fully_shard of weight": lambda ours, theirs, mesh: fully_shard(layer(theirs), mesh=mesh),
    "token_dispatch": lambda ours, theirs, mesh: token_dispatch(theirs, torch.tensor([4]), mesh),
    "local_map": lambda ours, theirs, mesh: local_map(torch.exp, [T.Shard(0)])(theirs),
    "context_parallel_shard": lambda ours, theirs, mesh: context_parallel_shard(theirs, mesh, 0),
    "ring_attention": lambda ours, theirs, mesh: _ring_attention(theirs.view(1, 1, 4, 4), mesh),
}


@pytest.mark.parametrize("taker", CASES)
def test_a_tensor_of_torch_is_refused_by_its_type(mesh: DeviceMesh, taker: str) -> None:
    whole = torch.ones(4, 4)
    ours = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    theirs = DTensor.from_local(whole, mesh, [Shard(0)])
    text = rf"^{taker} got a DTensor of torch.distributed.tensor; give it tritondt.from_torch\(x\), which shares"
    with pytest.raises(T.MixedTensorsError, match=text):
        CASES[taker](ours, theirs, mesh)


def test_a_gradient_of_torch_is_refused(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)]))
    parameter.grad = parameter.detach()
    with pytest.raises(T.MixedTensorsError, match=r"^clip_grad_norm_ got a DTensor of torch\.distributed"):
        T.clip_grad_norm_([parameter], 1.0)


def test_a_tensor_of_all_ranks_at_once_is_refused(mesh: DeviceMesh) -> None:
    local_tensor = pytest.importorskip("torch.distributed._local_tensor")  # private, not in every torch
    values = local_tensor.LocalTensor({0: torch.ones(2), 1: torch.ones(2)})
    for call in (
        lambda: T.DTensor.from_local(values, mesh, [T.Shard(0)]),
        lambda: T.distribute_tensor(values, mesh, [T.Shard(0)]),
    ):
        with pytest.raises(
            T.MixedTensorsError, match=r"got a LocalTensor, which has .*run_ranks\(n, body\) runs n ranks"
        ):
            call()
