"""Nested and sparse tensors, and operators that would give sparse ones, are refused in a sentence of the library's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.fsdp import fully_shard

# Torch says once that some layouts are to change.
pytestmark = pytest.mark.filterwarnings("ignore:(The PyTorch API of nested|Sparse)")

NESTED = "torch.nested.to_padded_tensor(x, 0.0), or x.values() and keep the lengths beside it"
DENSE = "call to_dense() first"


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


GIVEN: dict[str, tuple[Callable[[], torch.Tensor], str, str]] = {
    "jagged": (lambda: nested(torch.jagged), "a nested one of 2 tensors (torch.jagged)", NESTED),
    "nested": (lambda: nested(torch.strided), "a nested one of 2 tensors (torch.strided)", NESTED),
    "coo": (lambda: torch.ones(4, 3).to_sparse(), "torch.sparse_coo", DENSE),
    "csr": (lambda: torch.ones(4, 3).to_sparse_csr(), "torch.sparse_csr", DENSE),
}


def mesh() -> T.Mesh:
    return T.Mesh((2,))


def spec(placement: Any) -> T.DTensorSpec:
    return T.DTensorSpec(mesh(), (placement,), T.TensorMeta.contiguous((8, 3), torch.float32))


def holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_parameter("held", nn.Parameter(tensor))
    return module


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "distribute_tensor": (lambda x: T.distribute_tensor(x, mesh(), [T.Shard(0)]), "distribute_tensor"),
    "own values": (lambda x: T.distribute_tensor(x, mesh(), [T.Shard(0)], src_data_rank=None), "distribute_tensor"),
    "from_local": (lambda x: T.DTensor.from_local(x, mesh(), [T.Shard(0)]), "DTensor.from_local"),
    "checked": (lambda x: T.DTensor.from_local(x, mesh(), [T.Shard(0)], run_check=True), "DTensor.from_local"),
    "redistribute": (lambda x: T.redistribute(x, spec(T.Shard(0)), spec(T.Replicate())), "redistribute"),
    "distribute_module": (lambda x: T.distribute_module(holding(x), mesh()), "distribute_tensor"),
    "fully_shard": (lambda x: fully_shard(holding(x), mesh=mesh()), "fully_shard of held"),
}


def check_world() -> None:
    part = T.DTensor.from_local(torch.arange(2) + 2 * mesh().identity.rank, mesh(), [T.Shard(0)])
    torch.testing.assert_close(part.full_tensor(), torch.arange(4), rtol=0, atol=0)


@pytest.mark.in_core(12)
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("call", CALLS)
def test_tensors_without_strides_are_refused_on_all_ranks(call: str, kind: str) -> None:
    make, found, advice = GIVEN[kind]
    ask, taker = CALLS[call]

    def refused(rank: int) -> str:
        with pytest.raises(T.TransportError) as told:
            ask(make())
        check_world()
        return str(told.value)

    for text in run_ranks(2, refused):
        assert text.startswith(f"{taker} takes a strided tensor, got {found}")
        assert text.endswith(advice)


@pytest.mark.in_core(4)
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("call", ["distribute_tensor", "checked", "redistribute"])
def test_one_rank_alone_with_a_tensor_without_strides(call: str, kind: str) -> None:
    make, found, _ = GIVEN[kind]

    def refused(rank: int) -> str:
        with pytest.raises(T.TritondtError) as told:
            CALLS[call][0](torch.ones(4, 3) if rank == 0 else make())
        check_world()
        return str(told.value)

    for text in run_ranks(2, refused):
        assert f"takes a strided tensor, got {found}" in text


def lookup_of_sharded(**options: Any) -> None:
    weight = T.DTensor.from_local(torch.ones(4, 3), mesh(), [T.Replicate()]).requires_grad_()
    rows = T.DTensor.from_local(torch.tensor([1, 3]), mesh(), options["placements"])
    nn.functional.embedding(rows, weight, sparse=True).sum().backward()


def within_module() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    T.distribute_module(
        table, mesh(), input_fn=lambda _, given, on: T.DTensor.from_local(given[0], on, [T.Replicate()])
    )
    table(torch.tensor([1, 3])).sum().backward()


def plain(placement: T.Placement) -> T.DTensor:
    return T.DTensor.from_local(torch.ones(4, 4), mesh(), [placement])


SPARSE_RESULTS: dict[str, Callable[[], Any]] = {
    "gradient, whole rows": lambda: lookup_of_sharded(placements=[T.Replicate()]),
    "gradient, sharded rows": lambda: lookup_of_sharded(placements=[T.Shard(0)]),
    "gradient of a module": within_module,
    "to_sparse": lambda: plain(T.Replicate()).to_sparse(),
    "to_sparse of a shard": lambda: plain(T.Shard(0)).to_sparse(),
    "to_sparse of a dim": lambda: plain(T.Replicate()).to_sparse(1),
    "csr": lambda: plain(T.Replicate()).to_sparse_csr(),
    "csc": lambda: plain(T.Shard(1)).to_sparse_csc(),
    "bsr": lambda: plain(T.Replicate()).to_sparse_bsr((2, 2)),
    "bsc": lambda: plain(T.Shard(0)).to_sparse_bsc((2, 2)),
    "mkldnn": lambda: plain(T.Replicate()).to_mkldnn(),
}


@pytest.mark.in_core(4)
@pytest.mark.parametrize("name", SPARSE_RESULTS)
def test_operators_that_give_tensors_without_strides(name: str) -> None:
    def refused(rank: int) -> str:
        with pytest.raises(T.PropagationError) as told:
            SPARSE_RESULTS[name]()
        check_world()
        return str(told.value)

    for text in run_ranks(2, refused):
        assert "and distributed tensors are strided; take x.full_tensor() or x.to_local() where a sparse " in text
        assert text.endswith("and sparse=False in nn.Embedding for a dense gradient")


def test_a_sparse_operand_beside_distributed_ones() -> None:
    def refused(rank: int) -> str:
        with T.implicit_replication(), pytest.raises(T.MixedTensorsError) as told:
            torch.ones(4, 4).to_sparse_csr() @ plain(T.Replicate())
        return str(told.value)

    for text in run_ranks(2, refused):
        assert text.startswith(
            "an operator got a distributed tensor and a plain one of torch.sparse_csr; allowed beside"
        )


def test_sparse_gradients_within_fully_shard() -> None:
    def refused(rank: int) -> str:
        model = fully_shard(nn.Sequential(nn.Embedding(4, 3, sparse=True)), mesh=mesh())
        with pytest.raises(T.errors.FullyShardError) as told:
            model(torch.tensor([1, 3])).sum().backward()
        return str(told.value)

    for text in run_ranks(2, refused):
        assert text == (
            "0.weight has a gradient of torch.sparse_coo, and gradients of shards are strided; write sparse=False in "
            "the nn.Embedding or functional.embedding that uses it"
        )
