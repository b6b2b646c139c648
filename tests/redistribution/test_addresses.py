"""Local tensors without memory: told as what they are, on all ranks, and the ranks go on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.parallel import all_gather_matmul
from tritondt.process_group.checks import check_tensors

META = T.TensorMeta.contiguous((4, 2))
R, P, S0 = T.Replicate(), T.Partial(), T.Shard(0)


def freed(shape: tuple[int, ...] = (4, 2)) -> torch.Tensor:
    local = torch.ones(shape)
    local.untyped_storage().resize_(0)
    return local


def spec(mesh: T.Mesh, placement: T.Placement) -> T.DTensorSpec:
    return T.DTensorSpec(mesh, [placement], META)


def as_distributed(mesh: T.Mesh) -> torch.Tensor:
    return T.DTensor(torch.ones(4, 2), spec(mesh, R))


KINDS: dict[str, tuple[Callable[[T.Mesh], torch.Tensor], str]] = {
    "freed": (lambda mesh: freed(), r"whose storage is empty, as after resize_\(0\)"),
    "distributed": (as_distributed, "a DTensor, without memory"),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("is_async", [False, True])
def test_a_redistribution_of_what_has_no_memory(kind: str, is_async: bool) -> None:
    make, what = KINDS[kind]

    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        local: Any = make(mesh) if rank else torch.ones(4, 2)
        message = (
            r"\(P\(sum\)\) of \(4, 2\) float32 takes a local tensor with memory on rank 1; found one of \(4, 2\) "
            rf"torch.float32 at address 0, {what}; allowed is a plain tensor that holds its values"
        )
        with pytest.raises((T.PeerError, T.LocalTensorError)[rank], match=message):
            T.DTensor(local, spec(mesh, P)).redistribute(placements=[R], async_op=is_async).wait()
        found = T.redistribute(torch.ones(4, 2), spec(mesh, P), spec(mesh, R))
        torch.testing.assert_close(found, torch.full((4, 2), 2.0), rtol=0, atol=0)

    run_ranks(2, body)


def test_what_one_rank_sends_to_all_has_no_memory() -> None:
    def body(rank: int) -> None:
        with pytest.raises((T.PeerError, T.LocalTensorError)[rank], match="takes a local tensor with memory on rank 1"):
            T.distribute_tensor(freed() if rank else torch.ones(4, 2), T.Mesh((2,)), [S0], src_data_rank=1)

    run_ranks(2, body)


def test_values_that_replicas_take_have_no_memory() -> None:
    """Where nobody takes them, it is no error: the rank gets the values of the first one."""

    def body(rank: int) -> None:
        mesh = T.Mesh((2, 2))
        local = freed() if rank in (1, 2) else torch.full((4, 2), float(rank))
        with pytest.raises((T.MismatchError, T.LocalTensorError)[rank == 1], match="with memory on rank 1; found one"):
            T.DTensor.from_local(local, mesh, [R, S0], run_check=True)
        mended = torch.ones(4, 2) if rank == 1 else local
        x = T.DTensor.from_local(mended, mesh, [R, S0], run_check=True)
        assert x.to_local().unique().tolist() == [rank % 2]

    run_ranks(4, body)
    run_ranks(4, body, hosts=(0, 0, 1, 1))


def test_a_matmul_of_what_has_no_memory() -> None:
    def body(rank: int) -> None:
        x = freed((2, 2)) if rank else torch.ones(2, 2)
        with pytest.raises((T.PeerError, T.LocalTensorError)[rank], match="was given x at address 0; allowed are tens"):
            all_gather_matmul(x, torch.ones(3, 2), source=spec(T.Mesh((2,)), S0))

    run_ranks(2, body)


def test_a_collective_of_the_backend() -> None:
    message = r"all_reduce was given a tensor of shape \(4, 2\) at address 0; its storage is empty, as after resize_"
    with pytest.raises(T.LocalTensorError, match=message):
        check_tensors("all_reduce", [freed()], torch.device("cpu"))
    check_tensors("all_reduce", [torch.ones(0)], torch.device("cpu"))
