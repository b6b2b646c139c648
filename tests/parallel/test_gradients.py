"""Gradients of replicated parameters: sums in one exchange, complete before anybody's hook sees them."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
REPLICATED = ("first.weight", "first.bias", "down.bias", "last.weight", "last.bias")
SUM = "(P(sum)) -> (R)"


class Scale(nn.Module):
    """A layer that no plan names: its parameter stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(1, 2, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Block(nn.Module):
    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LayerNorm(6, dtype=torch.float64)
        self.up = nn.Linear(6, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 6, dtype=torch.float64)
        self.last = nn.LayerNorm(6, dtype=torch.float64)
        self.scale = Scale() if scaled else nn.Identity()
        self.skips = self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            x = cast(torch.Tensor, checkpoint(self.mixed, x, use_reentrant=False))
        elif not self.skips:
            x = self.mixed(x)
        return cast(torch.Tensor, self.scale(self.last(x)))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down(torch.tanh(self.up(self.first(x)))))


def plan() -> dict[str, ParallelStyle]:
    return {
        "first": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=T.Shard(1)),
        "down": RowwiseParallel(output_layouts=T.Shard(1), use_local_output=False),
        "last": SequenceParallel(),
    }


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, model(x)).pow(3).mean()


def expected_gradients(loss: Callable[[Block, Any], torch.Tensor] = loss_of) -> dict[str, torch.Tensor | None]:
    model = Block()
    loss(model, X).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def on_two_ranks(body: Callable[[nn.Module, Any], object]) -> None:
    def run(rank: int) -> None:
        mesh = T.Mesh((2,))
        model = parallelize_module(copy.deepcopy(Block()), mesh, plan())
        body(model, distribute(X, mesh, "S1"))

    run_ranks(2, run)


def compare(model: nn.Module, expected: dict[str, torch.Tensor | None]) -> None:
    for name, grad in expected.items():
        found: Any = model.get_parameter(name).grad
        if grad is None:
            assert found is None, name
            continue
        assert found.placements == cast(T.DTensor, model.get_parameter(name)).placements, name
        torch.testing.assert_close(found.full_tensor(), grad)


def seen_by_tensor_hook(parameter: torch.Tensor, seen: list[Any]) -> object:
    return parameter.register_hook(seen.append)


def seen_after_accumulation(parameter: torch.Tensor, seen: list[Any]) -> object:
    return parameter.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad))


def seen_at_accumulation(parameter: torch.Tensor, seen: list[Any]) -> object:
    """As data parallelism registers them, in C++ or Python."""
    node = get_gradient_edge(parameter).node
    node.register_hook(lambda *_: seen.append(parameter.grad))
    return node


@pytest.mark.parametrize("watch", [seen_at_accumulation, seen_after_accumulation, seen_by_tensor_hook])
def test_hooks_see_complete_gradients(watch: Callable[[torch.Tensor, list[Any]], object]) -> None:
    expected = expected_gradients()

    def body(model: nn.Module, x: Any) -> None:
        seen: dict[str, list[Any]] = {name: [] for name in REPLICATED}
        kept = [watch(model.get_parameter(name), seen[name]) for name in REPLICATED]
        with CommDebugMode() as comm:
            loss_of(model, x).backward()
        assert len(kept) == len(REPLICATED)
        for name in REPLICATED:
            (grad,) = seen[name]
            torch.testing.assert_close(grad.full_tensor(), expected[name])
        compare(model, expected)
        if watch is not seen_by_tensor_hook:
            assert comm.get_comm_counts()[SUM] == 1

    on_two_ranks(body)


def test_one_exchange_sums_the_gradients_of_all_modules() -> None:
    expected = expected_gradients()

    def body(model: nn.Module, x: Any) -> None:
        for _ in range(2):
            model.zero_grad()
            with CommDebugMode() as comm:
                loss_of(model, x).backward()
            assert comm.get_comm_counts()[SUM] == 1
            compare(model, expected)
        again = copy.deepcopy(model)
        again.zero_grad()
        with CommDebugMode() as comm:
            loss_of(again, x).backward()
        assert comm.get_comm_counts()[SUM] == 1
        compare(again, expected)

    on_two_ranks(body)


def twice(model: Any, x: Any) -> torch.Tensor:
    return loss_of(model, x) + loss_of(model, x * 2)


def by_parts(model: Any, x: Any) -> torch.Tensor:
    """Modules called by themselves, outside of their tree's forward."""
    return cast(torch.Tensor, model.last(model.first(x))).pow(3).mean()


def checkpointed(model: Any, x: Any) -> torch.Tensor:
    return cast(torch.Tensor, checkpoint(model, x, use_reentrant=False)).pow(3).mean()


def checkpointed_within(model: Any, x: Any) -> torch.Tensor:
    model.checkpoints = True
    return loss_of(model, x)


def skipping(model: Any, x: Any) -> torch.Tensor:
    model.skips = True
    return loss_of(model, x)


def frozen_in_part(model: Any, x: Any) -> torch.Tensor:
    model.first.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return loss_of(model, x)


def after_a_failure(model: Any, x: Any) -> torch.Tensor:
    with pytest.raises(Exception, match=r"shape|size"):
        model(x[..., :2])
    return loss_of(model, x)


@pytest.mark.parametrize(
    "loss", [twice, by_parts, checkpointed, checkpointed_within, skipping, frozen_in_part, after_a_failure]
)
def test_ways_to_run_a_model(loss: Callable[[Any, Any], torch.Tensor]) -> None:
    expected = expected_gradients(loss)

    def body(model: nn.Module, x: Any) -> None:
        loss(model, x).backward()
        compare(model, expected)

    on_two_ranks(body)


def test_a_hook_of_a_parameter_that_a_pass_does_not_use() -> None:
    def body(model: nn.Module, x: Any) -> None:
        seen: list[Any] = []
        model.first.weight.register_hook(seen.append)  # type: ignore[union-attr,operator]
        skipping(model, x).backward()
        assert seen == []

    on_two_ranks(body)


def test_gradients_that_are_asked_for_and_those_of_gradients() -> None:
    single = Block()
    names, values = zip(*single.named_parameters(), strict=True)
    firsts = torch.autograd.grad(loss_of(single, X), values, create_graph=True)
    seconds = torch.autograd.grad(sum(grad.square().sum() for grad in firsts), values)  # type: ignore[arg-type]

    def body(model: nn.Module, x: Any) -> None:
        mine = [model.get_parameter(name) for name in names]
        found = torch.autograd.grad(loss_of(model, x), mine, create_graph=True)
        again = torch.autograd.grad(sum(grad.square().sum() for grad in found), mine)  # type: ignore[arg-type]
        for grads, expected in ((found, firsts), (again, seconds)):
            for name, grad, of in zip(names, grads, expected, strict=True):
                torch.testing.assert_close(cast(Any, grad).full_tensor(), of, msg=name)

    on_two_ranks(body)


def train_replicas(rank: int, options: dict[str, Any]) -> None:
    """DistributedDataParallel over one axis of a model that is parallelized over the other."""
    grid = T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    replica, part = grid.get_coordinate()  # type: ignore[misc]
    single, group = Block(scaled=True), grid.get_group("replicas")
    model = parallelize_module(Block(scaled=True), grid["parts"], plan())
    x = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own = x.chunk(2)[replica].chunk(2, 1)[part]
    with T.implicit_replication():
        parallel = DistributedDataParallel(model, process_group=group, **options)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (single, model)]
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected, loss = loss_of(single, x), loss_of(parallel, own)
            expected.backward()
            loss.backward()
            found = cast(T.DTensor, loss.detach()).full_tensor()
            dist.all_reduce(found, group=group)
            torch.testing.assert_close(found / 2, expected.detach())
            for name, parameter in single.named_parameters():
                grad: Any = model.get_parameter(name).grad
                grad = grad.full_tensor() if isinstance(grad, T.DTensor) else grad
                torch.testing.assert_close(grad, parameter.grad, msg=name)
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.extended
def test_replicas_of_parallelized_modules_train_as_one_process() -> None:
    with GlooRanks(4) as ranks:
        for options in ({}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}):
            ranks.run(train_replicas, options, timeout_s=100)
