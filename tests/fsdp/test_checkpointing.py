"""Activation checkpointing inside and around sharded modules: what is recomputed in backward reads whole parameters."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import tritondt as T
from tests.fsdp.models import Net, layout, loss_of
from tritondt.comm.transports.threads import run_ranks
from tritondt.fsdp import fully_shard

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ORDERS = ["wrapped, then sharded", "sharded, then wrapped", "root alone", "nested", "lists", "wrapped twice"]


class Recomputing(nn.Module):
    """A block that is called within torch.utils.checkpoint."""

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, checkpoint(self.block, x, **self.options))


def every_other_product() -> Any:
    """Contexts that save one product of two, as torchtitan's policy does."""
    counts = [0]

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[0] += op in PRODUCTS
        saves = op in PRODUCTS and counts[0] % 2
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": checkpoint_wrapper,
    "reentrant wrapper": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "selective": partial(checkpoint_wrapper, context_fn=partial(create_selective_checkpoint_contexts, save_products)),
    "inside": partial(Recomputing, use_reentrant=False),
    "reentrant inside": partial(Recomputing, use_reentrant=True),
    "every other": partial(Recomputing, use_reentrant=False, context_fn=every_other_product),
}
RESHARDS = [None, True, False]


def shard_blocks(model: nn.Module, order: str, wrap: Callable[[nn.Module], nn.Module], **options: Any) -> None:
    """Shards the model, and recomputes its blocks, in one of the orders in which programs do that."""
    blocks = model.get_submodule("blocks")
    for name, block in list(blocks.named_children()):
        if order == "sharded, then wrapped":
            found = wrap(fully_shard(block, **options))
        elif order == "root alone":
            found = wrap(block)
        else:
            if order == "nested":
                fully_shard(block.get_submodule("up"), **options)
            if order == "lists":
                fully_shard([block.get_submodule("up"), block.get_submodule("down")], **options)
            found = wrap(wrap(block)) if order == "wrapped twice" else wrap(block)
            if order != "lists":
                fully_shard(found, **options)
        blocks._modules[name] = found
    fully_shard(model, **options)


def gradients_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        yield name.replace("_checkpoint_wrapped_module.", "").replace("block.", ""), gradient.full_tensor()


def assert_same(found: list[dict[str, torch.Tensor]], single: nn.Module) -> None:
    for gradients in found:
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp+tp"])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_those_of_one_process(kind: str, order: str) -> None:
    single = Net()
    loss_of(single, 0).backward()
    number = ORDERS.index(order)

    def body(rank: int, wrapper: str, reshard: bool | None) -> dict[str, torch.Tensor]:
        model, arguments, num_parts, part = layout(kind, rank)
        shard_blocks(model, order, WRAPPERS[wrapper], reshard_after_forward=reshard, **arguments)
        loss_of(model, 0, num_parts, part).backward()
        return dict(gradients_of(model))

    for place, wrapper in enumerate(WRAPPERS):
        if place % 2 == number % 2 or kind == "fsdp":
            reshard = RESHARDS[(place + number) % 3]
            assert_same(run_ranks(4, partial(body, wrapper=wrapper, reshard=reshard)), single)


@pytest.mark.extended
@pytest.mark.parametrize("order", ORDERS[:3])
def test_gradients_are_added_up_without_exchanges(order: str) -> None:
    single = Net()
    for step in range(3):
        loss_of(single, step).backward()

    def body(rank: int) -> dict[str, torch.Tensor]:
        model, arguments, num_parts, part = layout("fsdp", rank)
        shard_blocks(model, order, checkpoint_wrapper, **arguments)
        for step in range(3):
            cast(Any, model).set_requires_gradient_sync(step == 2)
            loss_of(model, step, num_parts, part).backward()
        return dict(gradients_of(model))

    assert_same(run_ranks(4, body), single)


@pytest.mark.extended
@pytest.mark.parametrize("order", ORDERS[:3])
def test_mixed_precision_recomputes_in_the_dtype_of_forward(order: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def body(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, torch.Tensor]:
        model, arguments, num_parts, part = layout("fsdp", rank)
        shard_blocks(model, order, wrap, mp_policy=policy, **arguments)
        loss_of(model, 0, num_parts, part).backward()
        return dict(gradients_of(model))

    expected = run_ranks(4, partial(body, wrap=lambda block: block))
    for found, wanted in zip(run_ranks(4, partial(body, wrap=checkpoint_wrapper)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Stack(nn.Sequential):
    """Blocks that run by checkpoint_sequential."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, checkpoint_sequential(list(self), 2, x, use_reentrant=self.reentrant))


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)])


@pytest.mark.parametrize("reentrant", [False, True])
def test_segments_of_a_sequence(reentrant: bool) -> None:
    torch.manual_seed(1)
    batch = torch.randn(4, 5)
    single = stack()
    single(batch).square().mean().backward()

    def body(rank: int, are_units: bool) -> dict[str, torch.Tensor]:
        model = stack()
        model.reentrant = reentrant
        for block in model if are_units else ():
            fully_shard(block, mesh=T.Mesh((2,)))
        fully_shard(model, mesh=T.Mesh((2,)))
        model(batch.chunk(2)[rank].requires_grad_()).square().mean().backward()
        return dict(gradients_of(model))

    for are_units in (False, True):
        assert_same(run_ranks(2, partial(body, are_units=are_units)), single)


@pytest.mark.parametrize("is_unit", [False, True])
def test_a_backward_that_begins_inside_a_module(is_unit: bool) -> None:
    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        model[0].register_forward_hook(lambda module, args, output: seen.append(output))
        model(batch)
        return seen[0].square().mean()

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), nn.Linear(3, 3))

    batch = torch.arange(12.0).view(4, 3) / 12
    single = made()
    loss(single, batch).backward()

    def body(rank: int) -> list[torch.Tensor]:
        model = made()
        if is_unit:
            fully_shard(cast(Any, model[0])._checkpoint_wrapped_module, mesh=T.Mesh((2,)))
        fully_shard(model, mesh=T.Mesh((2,)), reshard_after_forward=True)
        loss(model, batch.chunk(2)[rank]).backward()
        return [cast(Any, parameter.grad).full_tensor() for parameter in model[0].parameters()]

    for gradients in run_ranks(2, body):
        for gradient, parameter in zip(gradients, single[0].parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.extended
@pytest.mark.parametrize("order", ["checkpointing, then sharded", "sharded, then checkpointing", "root alone"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_transformers(order: str, reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")

    def made() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        return transformers.LlamaForCausalLM(config).train()

    def recompute(model: Any) -> None:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # renamed in 5
        enable({"use_reentrant": reentrant})

    torch.manual_seed(1)
    tokens = torch.randint(0, 32, (4, 6))
    single = made()
    single(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    def body(rank: int) -> dict[str, torch.Tensor]:
        model = made()
        if order != "sharded, then checkpointing":
            recompute(model)
        for layer in () if order == "root alone" else model.model.layers:
            fully_shard(layer, mesh=T.Mesh((2,)))
        fully_shard(model, mesh=T.Mesh((2,)))
        if order == "sharded, then checkpointing":
            recompute(model)
        part = tokens.chunk(2)[rank]
        model(input_ids=part, labels=part, use_cache=False).loss.backward()
        return dict(gradients_of(model))

    assert_same(run_ranks(2, body), single)
