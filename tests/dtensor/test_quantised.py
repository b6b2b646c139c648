"""Quantised tensors, whose scale and zero point no message has, are refused by name wherever they come in."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharded import TensorProperties, shard_tensor
from tritondt.sharded.specs import ChunkShardingSpec

DTYPES = (torch.quint8, torch.qint8, torch.qint32)


def quantised(dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will have none of them some day
        return torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, dtype)


def spec(placement: Any, dtype: torch.dtype) -> T.DTensorSpec:
    return T.DTensorSpec(T.Mesh((2,)), (placement,), T.TensorMeta.contiguous((8, 3), dtype))


def told(call: Callable[[torch.Tensor], Any], given: torch.Tensor) -> str:
    with pytest.raises(T.TritondtError) as error:
        call(given)
    return str(error.value)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "distribute_tensor": lambda x: T.distribute_tensor(x, T.Mesh((2,)), [T.Shard(0)]),
    "distribute_tensor, own values": lambda x: T.distribute_tensor(x, T.Mesh((2,)), [T.Shard(1)], src_data_rank=None),
    "from_local": lambda x: T.DTensor.from_local(x, T.Mesh((2,)), [T.Shard(0)]),
    "from_local, checked": lambda x: T.DTensor.from_local(x, T.Mesh((2,)), [T.Replicate()], run_check=True),
    "redistribute": lambda x: T.redistribute(x, spec(T.Shard(0), x.dtype), spec(T.Replicate(), x.dtype)),
    "shard_tensor": lambda x: shard_tensor(x, ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])),
}


@pytest.mark.in_core(6)
@pytest.mark.parametrize("name", CALLS)
def test_quantised_tensors_are_refused_on_all_ranks(name: str) -> None:
    for dtype in DTYPES:
        given = quantised(dtype)

        def ask(rank: int, given: torch.Tensor = given) -> str:
            text = told(CALLS[name], given)
            T.ones(2, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)]).full_tensor()  # the world goes on
            return text

        for text in run_ranks(2, ask):
            assert (
                f"tensor was asked for with elements of {str(dtype).removeprefix('torch.')}; those of a quant" in text
            )
            assert "give x.dequantize(), or x.int_repr() and keep x.q_scale() and x.q_zero_point() beside it" in text


def test_one_rank_alone_with_a_quantised_tensor() -> None:
    def ask(rank: int) -> str:
        given = quantised() if rank == 1 else torch.ones(4, 3)
        return told(CALLS["distribute_tensor"], given)

    first, second = run_ranks(2, ask)
    assert "quint8" in first
    assert "quint8" in second


def test_properties_of_quantised_shards() -> None:
    with pytest.raises(T.LocalTensorError, match="a sharded tensor was asked for with elements of qint8"):
        TensorProperties(torch.qint8)


QUANTISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantize_per_tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "quantize_per_tensor_dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, False),
    "quantize_per_channel": lambda x: torch.quantize_per_channel(x, x[:, 0], x[:, 0].long(), 0, torch.quint8),
}


@pytest.mark.parametrize("placement", [T.Replicate(), T.Shard(0)])
@pytest.mark.parametrize("name", QUANTISERS)
def test_operators_that_quantise(name: str, placement: T.Placement) -> None:
    def ask(rank: int) -> str:
        x = T.DTensor.from_local(torch.ones(4, 3), T.Mesh((2,)), [placement])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = told(QUANTISERS[name], x)
        x.full_tensor()  # the world goes on
        return text

    for text in run_ranks(2, ask):
        assert text.startswith(f"aten.{name}.default of a distributed tensor was asked for with elements of quint8; ")
