"""Local tensors that are distributed are refused; results of functional collectives are waited for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.experimental import local_map

FULL = torch.arange(24.0).view(6, 4)
S0, R = T.Shard(0), T.Replicate()


def _mapped(local: Any, mesh: T.Mesh) -> Any:
    given = T.distribute_tensor(FULL, mesh, [S0])
    return local_map(lambda x: local, out_placements=(S0,), in_placements=((S0,),), device_mesh=mesh)(given)


def _redistributed(local: Any, mesh: T.Mesh) -> Any:
    rows = T.DTensorSpec(mesh, [S0], T.TensorMeta.contiguous(FULL.shape))
    return T.DTensor.from_local(T.redistribute(local, rows, rows.with_placements([R])), mesh, [R])


TAKERS: dict[str, Callable[[Any, T.Mesh], Any]] = {
    "from_local": lambda local, mesh: T.DTensor.from_local(local, mesh, [S0]),
    "run_check": lambda local, mesh: T.DTensor.from_local(local, mesh, [S0], run_check=True),
    "local_map": _mapped,
    "redistribute": _redistributed,
}


@pytest.mark.in_core(len(TAKERS))
@pytest.mark.parametrize("name", TAKERS)
def test_a_distributed_tensor_is_no_local_one(name: str) -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        for x in (T.distribute_tensor(FULL, mesh, [S0]), torch.nn.Parameter(T.distribute_tensor(FULL, mesh, [R]))):
            text = r"got \((S0|R)\) of \(6, 4\) float32, a distributed tensor, for a local one; give it x.to_local\(\)"
            with pytest.raises(T.MixedTensorsError, match=text):
                TAKERS[name](x, mesh)
        pending = T.distribute_tensor(FULL, mesh, [S0]).redistribute(placements=[R], async_op=True)
        with pytest.raises(RuntimeError, match="a distributed tensor, for a local one"):
            TAKERS[name](pending, mesh)
        torch.testing.assert_close(pending.full_tensor(), FULL, rtol=0, atol=0)

    run_ranks(2, body)


@pytest.mark.in_core(len(TAKERS))
@pytest.mark.parametrize("name", TAKERS)
def test_what_still_arrives_is_waited_for(name: str) -> None:
    def body(rank: int) -> None:
        local = FULL.chunk(2)[rank].clone()
        made = TAKERS[name](funcol.AsyncCollectiveTensor(local), T.Mesh((2,)))
        assert type(made._local_tensor) is torch.Tensor
        torch.testing.assert_close(made.full_tensor(), FULL, rtol=0, atol=0)

    run_ranks(2, body)


@pytest.mark.parametrize("name", TAKERS)
def test_no_tensor_is_refused(name: str) -> None:
    def body(rank: int) -> None:
        if name != "local_map":  # which asks for placements of tensors alone
            with pytest.raises(
                RuntimeError, match=r"got a list; allowed is a torch.Tensor: torch.tensor\(...\) makes one"
            ):
                TAKERS[name]([1.0, 2.0], T.Mesh((2,)))

    run_ranks(2, body)


def test_gradients_reach_what_arrived() -> None:
    def body(rank: int) -> None:
        arriving: Any = funcol.AsyncCollectiveTensor(FULL.chunk(2)[rank].clone()).requires_grad_()
        made: Any = T.DTensor.from_local(arriving, T.Mesh((2,)), [S0])
        (made * 3).full_tensor().sum().backward()
        torch.testing.assert_close(torch.as_tensor(arriving.grad), torch.full((3, 4), 3.0), rtol=0, atol=0)

    run_ranks(2, body)


def test_a_whole_tensor_that_still_arrives() -> None:
    def body(rank: int) -> None:
        made = T.distribute_tensor(funcol.AsyncCollectiveTensor(FULL.clone()), T.Mesh((2,)), [S0])
        torch.testing.assert_close(made.full_tensor(), FULL, rtol=0, atol=0)

    run_ranks(2, body)
