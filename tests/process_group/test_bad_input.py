"""What the backend refuses, on all ranks alike and before anything is sent: the next operation runs as ever."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, _make_nccl_premul_sum

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.process_group.collectives import own

RanksOf = Callable[[str, int], GlooRanks]
Refusals = dict[str, tuple[Callable[[Any], object], type[Exception], str]]


def refusals() -> Refusals:
    """What is asked of a group of two, the error, and how it begins or what it says."""
    x, ops = torch.ones(2, 3), dist.ReduceOp
    return {
        "transposed output": (
            lambda group: group._allgather_base(torch.empty(3, 4).T, x),
            T.LocalTensorError,
            "all_gather_into_tensor of 6 float32 was given a tensor of shape (4, 3) with strides (1, 4), which is not "
            "contiguous; pass .contiguous() to be sent, and a contiguous tensor to be written",
        ),
        "gaps": (
            lambda group: group.allreduce([torch.ones(4, 4)[:, :2]]),
            T.LocalTensorError,
            "all_reduce (sum) of 8 float32 was given a tensor of shape (4, 2) with strides (4, 1), which is not",
        ),
        "conjugate view": (
            lambda group: group.allreduce([torch.ones(2, dtype=torch.complex64).conj()]),
            T.LocalTensorError,
            "of 2 complex64 was given a view that only says conjugated or negated; pass .clone() of it",
        ),
        "sparse": (
            lambda group: group.broadcast([x.to_sparse()]),
            T.TransportError,
            "was given a tensor of the layout torch.sparse_coo; collectives carry torch.strided only",
        ),
        "wrong size": (
            lambda group: group._allgather_base(torch.empty(11), x),
            T.LocalTensorError,
            "all_gather_into_tensor of 6 float32 was given an output of 11 elements; 6 on each of 2 ranks makes 12",
        ),
        "wrong part": (
            lambda group: group._reduce_scatter_base(torch.empty(4), x),
            T.LocalTensorError,
            "reduce_scatter_tensor (sum) of 4 float32 was given an input of 6 elements; 4 on each of 2 ranks makes 8",
        ),
        "wrong dtype": (
            lambda group: group._allgather_base(torch.empty(12, dtype=torch.int32), x),
            T.TransportError,
            "all_gather_into_tensor of 6 float32 was given tensors of float32 and int32; all must be of one dtype",
        ),
        "too few outputs": (
            lambda group: group.allgather([[torch.empty(2, 3)]], [x]),
            T.LocalTensorError,
            "all_gather of 6 float32 was given 1 outputs; there must be 2",
        ),
        "own output of another size": (
            lambda group: group.allgather([[torch.empty(5), torch.empty(5)]], [x]),
            T.LocalTensorError,
            "all_gather of 5 + 5 float32 was given an input of 6 elements; this rank's output makes 5",
        ),
        "too few inputs": (
            lambda group: group.alltoall([torch.empty(6)] * 2, [x]),
            T.LocalTensorError,
            "all_to_all of float32 was given 1 inputs; there must be 2",
        ),
        "split sizes": (
            lambda group: group.alltoall_base(torch.empty(2, 3), x, [1, 1], [1, 2]),
            T.LocalTensorError,
            "was given input split sizes [1, 2]; they must be 2 sizes that make the 2 rows",
        ),
        "rows that do not divide": (
            lambda group: group.alltoall_base(torch.empty(3, 3), torch.ones(3, 3), [], []),
            T.LocalTensorError,
            "all_to_all_single of float32 was given an input of 3 rows without split sizes; 2 ranks must divide them",
        ),
        "no tensors": (lambda group: group.allreduce([]), T.WorldError, "all_reduce (sum) was given no tensors"),
        "no such root": (
            lambda group: group.broadcast([x], _rooted(2)),
            T.WorldError,
            "broadcast of 6 float32, root 2 names rank 2 of the process group; it has ranks 0 to 1",
        ),
        "bitwise": (
            lambda group: group.allreduce([x.int()], _by(ops.BAND)),
            T.TransportError,
            "the op band on int32 was asked for; allowed is sum, product, min and max",
        ),
        "product of complex": (
            lambda group: group.allreduce([x.to(torch.complex64)], _by(ops.PRODUCT)),
            T.TransportError,
            "the op product on complex64 was asked for; allowed is sum, avg and premul_sum",
        ),
        "average of bool": (
            lambda group: group.allreduce([x > 0], _by(ops.AVG)),
            T.TransportError,
            "the op avg on bool was asked for; allowed is sum, product, min and max",
        ),
        "average of integers": (
            lambda group: group.allreduce([x.int()], _by(ops.AVG)),
            T.TransportError,
            "the op avg on int32 was asked for; allowed is sum, product, min",
        ),
        "sum of int16": (
            lambda group: group.allreduce([x.to(torch.int16)]),
            T.TransportError,
            "a reduction of int16 was asked for; NCCL reduces int8, uint8, int32",
        ),
        "factor of another dtype": (
            lambda group: group.allreduce([x], _by(_make_nccl_premul_sum(torch.ones(1).double()))),
            T.TransportError,
            "was given a factor of 1 torch.float64 on cpu; it must be a number or one torch.float32 on cpu",
        ),
        "from any rank": (
            lambda group: group.recv_anysource([x], 0),
            T.TransportError,
            "a receive from any rank was asked for; NCCL receives from a rank that is named",
        ),
        "another device": (
            lambda group: group.allreduce([torch.empty(2, device="meta")]),
            T.TransportError,
            "all_reduce (sum) of 2 float32 was given a tensor on meta; process group 0 was made for cpu and cuda",
        ),
        "input on another device": (
            lambda group: group._reduce_scatter_base(torch.empty(3), torch.ones(6, device="meta")),
            T.TransportError,
            "was given a tensor on meta; all tensors of one call are to be on the same device, which is cpu here",
        ),
        "a rank's outputs too few": (
            lambda group: group.allgather_coalesced([[x, x], [x]], [x, x]),
            T.LocalTensorError,
            "was given 1 outputs of one rank; there must be 2",
        ),
        "two devices": (
            lambda group: group._allgather_base(torch.empty(12, device="meta"), x),
            T.TransportError,
            "was given a tensor on meta; all tensors of one call are to be on the same device, which is cpu here",
        ),
    }  # fmt: skip


def _by(op: Any) -> Any:
    made = AllreduceOptions()
    made.reduceOp = op
    return made


def _rooted(root: int) -> Any:
    made = BroadcastOptions()
    made.rootRank = root
    return made


def refuse(rank: int, name: str) -> str:
    ask, kind, _ = refusals()[name]
    with pytest.raises(kind) as told:
        ask(dist.group.WORLD)
    x = own(rank)
    dist.all_reduce(x)
    torch.testing.assert_close(x, own(0) + own(1), rtol=0, atol=0)
    return str(told.value)


@pytest.mark.parametrize("name", refusals())
def test_refused(ranks_of: RanksOf, name: str) -> None:
    for text in ranks_of("nccl", 2).run(refuse, name):
        assert refusals()[name][2] in text


# NCCL's alone: the CPU copies what has gaps, and has more ops.
OF_NCCL = {
    *("transposed output", "gaps", "conjugate view", "bitwise", "product of complex", "average of bool"),
    *("sum of int16", "from any rank"),
}


@pytest.mark.in_core(4)
@pytest.mark.parametrize("over", ["sockets", "shared-memory", "gloo"])
@pytest.mark.parametrize("name", sorted(refusals().keys() - OF_NCCL))
def test_refused_alike_on_the_cpu(ranks_of: RanksOf, over: str, name: str) -> None:
    for text in ranks_of(over, 2).run(refuse, name):
        assert refusals()[name][2] in text


def refuse_on_the_cpu(rank: int) -> list[str]:
    group: Any = dist.group.WORLD
    told = []
    with pytest.raises(T.TransportError) as error:
        group.allreduce([torch.empty(2, device="meta")])
    told.append(str(error.value))
    with pytest.raises(T.TransportError) as error:
        group._start_coalescing(torch.device("cpu"))
    told.append(str(error.value))
    cuda_only: Any = dist.new_group(backend="cuda:tritondt")
    with pytest.raises(T.TransportError) as error:
        cuda_only.allreduce([torch.empty(2)])
    told.append(str(error.value))
    return told


def test_refused_on_the_cpu(ranks_of: RanksOf) -> None:
    for meta, coalescing, cuda_only in ranks_of("sockets", 2).run(refuse_on_the_cpu):
        assert meta.endswith("was given a tensor on meta; process group 0 was made for cpu and cuda")
        assert coalescing == "coalescing was asked for on cpu; there operations run one by one"
        assert cuda_only.startswith("all_reduce (sum) of 2 float32 was given a tensor on cpu; process group ")
        assert cuda_only.endswith(" was made for cuda")
