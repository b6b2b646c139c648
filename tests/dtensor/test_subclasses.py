"""Tensors of a class with operators of its own as local parts: these operators run, and their values do not travel."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import tritondt as T
from tritondt.comm import read_guard
from tritondt.comm.transports.threads import run_ranks
from tritondt.fsdp import fully_shard

aten = torch.ops.aten


class Halves(torch.Tensor):
    """Whole numbers of 8 bits times a half, as quantised weights are made of: a tensor without memory of its own."""

    whole: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["Halves"], whole: torch.Tensor) -> "Halves":
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)
        made.whole = whole
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if op in (aten.detach.default, aten.clone.default, aten.view.default):
            return cls(op(args[0].whole, *args[1:]))
        if op is aten.copy_.default and isinstance(args[0], Halves):
            args[0].whole.copy_(_plain(args[1]) * 2)
            return args[0]
        return op(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


class Told(Halves):
    """Halves that tell where they keep their values, as torchao's classes do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, shape: Any, stride: Any) -> "Told":
        return Told(inner["whole"])


def _plain(value: Any) -> Any:
    return value.whole * 0.5 if isinstance(value, Halves) else value


def mesh() -> T.Mesh:
    return T.Mesh((2,))


def part(rank: int) -> Halves:
    return Halves(torch.arange(12, dtype=torch.int8).reshape(4, 3) + 12 * rank)


def values() -> torch.Tensor:
    return torch.arange(24.0).reshape(8, 3) * 0.5


def distributed(rank: int, placement: T.Placement) -> T.DTensor:
    return T.DTensor.from_local(part(rank), mesh(), [placement])


def test_operators_are_those_of_the_class() -> None:
    def run(rank: int) -> None:
        x: Any = distributed(rank, T.Shard(0))
        whole = values()
        ones: Any = T.distribute_tensor(torch.ones(8, 3), mesh(), [T.Shard(0)])
        for found, expected in [
            (x + 1, whole + 1),
            (x.t() * 2, whole.t() * 2),
            (x.sum(0), whole.sum(0)),
            (ones.lerp(x, 0.5), torch.ones(8, 3).lerp(whole, 0.5)),
            (torch.cat([x, ones], 1), torch.cat([whole, torch.ones(8, 3)], 1)),
            (x.to(torch.bfloat16), whole.bfloat16()),
            (x @ T.distribute_tensor(torch.ones(3, 2), mesh(), [T.Replicate()]), whole @ torch.ones(3, 2)),
        ]:
            torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0)
        x.copy_(ones)
        assert isinstance(x.to_local(), Halves)
        torch.testing.assert_close((x * 1).full_tensor(), torch.ones(8, 3), rtol=0, atol=0)

    run_ranks(2, run)


@pytest.mark.in_core(3)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (T.Shard(0), T.Replicate()),
        (T.Replicate(), T.Shard(0)),
        (T.Shard(0), T.Shard(1)),
        (T.Partial(), T.Replicate()),
        (T.Replicate(), T.Partial()),
    ],
)
def test_values_without_memory_do_not_travel(before: T.Placement, after: T.Placement) -> None:
    def refused(rank: int) -> list[str]:
        told = []
        for is_async in (False, True):
            with pytest.raises(T.LocalTensorError) as error:
                distributed(rank, before).redistribute(placements=[after], async_op=is_async).to_local()
            told.append(str(error.value))
        return told

    for rank, texts in enumerate(run_ranks(2, refused)):
        for text in texts:
            assert f"takes a local tensor with memory on rank {rank}; found one of (4, 3) torch.float32" in text
            assert "a Halves, without memory; allowed is a plain tensor that holds its values" in text


def test_parameters_of_such_a_class_are_refused_by_fully_shard() -> None:
    def refused(rank: int) -> None:
        module = nn.Linear(3, 4)
        module.weight = nn.Parameter(part(rank), requires_grad=False)
        with pytest.raises(T.errors.FullyShardError) as told:
            fully_shard(module, mesh=mesh())
        assert str(told.value) == (
            "weight is a Halves, whose class says what its operators do, and shards are cut from plain memory; "
            "allowed are plain tensors (x.dequantize()), or put it in ignored_params"
        )
        assert type(module.weight) is nn.Parameter or isinstance(module.weight, Halves)

    run_ranks(2, refused)


def test_a_write_waits_for_messages_that_read_the_values_it_changes() -> None:
    def body(rank: int) -> tuple[list[str], torch.Tensor]:
        waits, values = list[str](), torch.zeros(4, 3, dtype=torch.int8)

        def note() -> None:
            waits[-1] += "waited"

        for local in (part(rank), Told(values)):
            waits.append("")
            addresses = read_guard.begin([values], note)
            written = T.DTensor.from_local(local, mesh(), [T.Shard(0)])
            written.copy_(T.DTensor.from_local(torch.full((4, 3), 0.5 * (rank + 1)), mesh(), [T.Shard(0)]))
            read_guard.end(addresses, note)
        return waits, values

    for rank, (waits, values) in enumerate(run_ranks(2, body)):
        assert waits == ["", "waited"]
        torch.testing.assert_close(values, torch.full((4, 3), rank + 1, dtype=torch.int8), rtol=0, atol=0)


def test_a_graph_writes_while_messages_are_under_way() -> None:
    """Tensors that stand for others while a graph is traced have no memory that a message could read."""

    def nothing() -> None:
        """Message that is awaited at once."""

    def body(rank: int) -> torch.Tensor:
        addresses = read_guard.begin([torch.ones(3)], nothing)
        x = T.ones(4, 3, device_mesh=mesh(), placements=[T.Shard(0)])
        torch.compile(lambda x: x.add_(1), backend="aot_eager", fullgraph=True)(x)
        read_guard.end(addresses, nothing)
        return x.to_local()

    torch._dynamo.reset()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, torch.full((2, 3), 2.0), rtol=0, atol=0)
