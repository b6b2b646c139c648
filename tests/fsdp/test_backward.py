"""Backward passes that read parameters without the hooks of their module: as on one process, or refused by autograd."""

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call, jvp
from torch.func import grad as gradient_function

import tritondt as T
from tritondt import identity
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import FullyShardError
from tritondt.fsdp import fully_shard

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def net(wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = ((6, 7), (7, 7), (7, 3))
    blocks = [wrap(nn.Sequential(nn.Linear(a, 9), nn.Tanh(), nn.Linear(9, b))) for a, b in sizes]
    return nn.Sequential(*blocks).double()


def batch() -> torch.Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def part(rank: int) -> torch.Tensor:
    return batch().chunk(2)[rank].clone()


def sharded(model: nn.Sequential, *, are_units: bool = True, **options: Any) -> nn.Sequential:
    for block in model if are_units else ():
        fully_shard(block, mesh=T.Mesh((2,)), **options)
    return fully_shard(model, mesh=T.Mesh((2,)), **options)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [None if gradient is None else gradient.full_tensor() for gradient in gradients]


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    for gradient, wanted in zip(found, expected, strict=True):
        assert (gradient is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


def of_inputs(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return found, x


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    return of_inputs(model, x)[0].square().mean()


def penalty_beside_another_batch(model: Any, x: torch.Tensor) -> torch.Tensor:
    other: torch.Tensor = model(x.detach() * 2).square().mean()
    return penalty(model, x) + other


def penalty_twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = penalty(model, x)
    found.backward(retain_graph=True)
    return found * 2


def third_derivatives(model: Any, x: torch.Tensor) -> torch.Tensor:
    found, x = of_inputs(model, x)
    (second,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    return second.square().mean()


def of_hidden(model: Any, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    total = model(x).square().sum()
    hook.remove()
    (found,) = torch.autograd.grad(total, seen[0], create_graph=True)
    return found.square().mean()


def hooks_that_read_weights(model: Any, x: torch.Tensor) -> torch.Tensor:
    layer = model[1].get_submodule(
        "_checkpoint_wrapped_module" if hasattr(model[1], "_checkpoint_wrapped_module") else ""
    )

    def scale(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: grad * module.weight.detach().square().sum())

    for number in (0, 2):
        layer[number].register_forward_hook(scale)
    return cast(torch.Tensor, model(x).square().mean())


LOSSES: list[Loss] = [
    penalty, penalty_beside_another_batch, penalty_twice, third_derivatives, of_hidden, hooks_that_read_weights,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_gradients_are_those_of_one_process(loss: Loss, is_recomputed: bool) -> None:
    make = partial(net, checkpoint_wrapper) if is_recomputed else net
    single = make()
    loss(single, batch()).backward()
    # Means over a rank's part, of squares of gradients of sums: alike on one process and in the mean over ranks.
    expected = [parameter.grad for parameter in single.parameters()]

    def body(rank: int, options: dict[str, Any]) -> list[torch.Tensor | None]:
        model = sharded(make(), **options)
        loss(model, part(rank)).backward()
        return gradients_of(model)

    for options in ({"reshard_after_forward": True}, {"are_units": False}):
        for found in run_ranks(2, partial(body, options=options)):
            assert_same(found, expected)


class Force(nn.Module):
    """An energy and its gradient by the inputs, which forward takes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        torch.manual_seed(3)
        self.head = nn.Linear(3, 1, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        energy = self.head(self.net(x))
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        found: torch.Tensor = (
            energy.square().mean() + force.square().mean() + self.head(self.net(x * 2)).square().mean()
        )
        return found


def test_a_backward_within_forward_leaves_parameters_in_place() -> None:
    single = Force()
    single(batch()).backward()

    def body(rank: int) -> list[torch.Tensor | None]:
        model = Force()
        sharded(model.net, reshard_after_forward=True)
        fully_shard(model, mesh=T.Mesh((2,)), reshard_after_forward=True)
        model(part(rank)).backward()
        return gradients_of(model)

    for found in run_ranks(2, body):
        assert_same(found, [each.grad for each in single.parameters()])


class Recursive(nn.Module):
    """A module that calls itself between two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.before(x).tanh()
        found: torch.Tensor = self.after(self(x, depth - 1) if depth else x).tanh()
        return found


@pytest.mark.extended
def test_a_module_that_calls_itself() -> None:
    single = Recursive()
    single(batch()).square().mean().backward()

    def body(rank: int) -> list[torch.Tensor | None]:
        model = fully_shard(Recursive(), mesh=T.Mesh((2,)), reshard_after_forward=True)
        model(part(rank).requires_grad_()).square().mean().backward()
        return gradients_of(model)

    for found in run_ranks(2, body):
        assert_same(found, [each.grad for each in single.parameters()])


def test_another_thread_reads_parameters_while_a_backward_runs() -> None:
    single = net()
    single(batch()).square().mean().backward()

    def body(rank: int) -> list[torch.Tensor | None]:
        model, who = sharded(net()), identity.current()

        def read() -> None:
            with identity.assumed(who):
                assert len([*model.parameters()]) == len(model.state_dict())

        def read_elsewhere(gradient: torch.Tensor) -> None:
            reader = Thread(target=read)
            reader.start()
            reader.join()

        for block in model:
            block.register_forward_hook(lambda block, args, output: output.register_hook(read_elsewhere) and None)
        model(part(rank)).square().mean().backward()
        return gradients_of(model)

    for found in run_ranks(2, body):
        assert_same(found, [each.grad for each in single.parameters()])


def test_autograd_refuses_what_is_freed_or_written_to() -> None:
    """Where one process would read values that are there, a backward from inside a module whose parameters are freed
    ends in autograd's error, not in memory that is not there.
    """

    def body(rank: int) -> float:
        model = sharded(net(), reshard_after_forward=True)
        seen: list[torch.Tensor] = []
        # A product whose backward reads the weight itself, in a kernel that does not look whether it is there.
        cast(Any, model[1])[2].register_forward_hook(
            lambda module, args, output: seen.append(output.sum(0)[:, None] * module.weight)
        )
        output = model(part(rank))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            seen[0].square().sum().backward()
        output = model(part(rank))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
        model(part(rank)).square().mean().backward()
        return float(cast(Any, model[0])[0].weight.grad.full_tensor().abs().sum())

    single = net()
    with torch.no_grad():
        for parameter in single.parameters():
            parameter.mul_(2)
    single(batch()).square().mean().backward()
    expected = float(cast(Any, single[0])[0].weight.grad.abs().sum())
    torch.testing.assert_close(run_ranks(2, body), [expected] * 2, rtol=1e-9, atol=0)


def test_functional_call_leaves_the_module_as_it_was() -> None:
    single = net()
    doubled = {name: value.detach() * 2 for name, value in single.named_parameters()}
    expected = functional_call(single, doubled, batch()).detach()

    def body(rank: int) -> torch.Tensor:
        model = sharded(net())
        own: dict[str, Any] = dict(model.named_parameters())
        with torch.no_grad():
            found: torch.Tensor = functional_call(model, {name: value * 2 for name, value in own.items()}, part(rank))
            torch.testing.assert_close(model(part(rank)), single(part(rank)), rtol=1e-12, atol=0)
        for name, value in single.named_parameters():
            torch.testing.assert_close(own[name].full_tensor(), value.detach(), rtol=0, atol=0)
        # What was computed with other parameters has no backward here: nothing holds them any more.
        total = functional_call(model, {name: value * 2 for name, value in own.items()}, part(rank)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
        with pytest.raises(FullyShardError, match="functional_call takes distributed tensors, too"):
            functional_call(model, {name: value.full_tensor() for name, value in own.items()}, part(rank))
        return found

    torch.testing.assert_close(torch.cat(run_ranks(2, body)), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, of jvp
def test_transforms_of_inputs() -> None:
    single = net()

    def body(rank: int) -> None:
        model, x = sharded(net()), part(rank)
        found = gradient_function(lambda x: model(x).square().sum())(x)
        wanted = gradient_function(lambda x: single(x).square().sum())(x)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(jvp(model, (x,), (x,)), jvp(single, (x,), (x,)), rtol=1e-9, atol=1e-12)

    run_ranks(2, body)


def test_hooks_of_parameters_see_and_change_gradients() -> None:
    """Registered before fully_shard and after it, once for each reduction."""

    def clamped(grad: torch.Tensor) -> torch.Tensor:
        return grad.clamp(-1e-3, 1e-3)

    def train(model: nn.Sequential, x: torch.Tensor, late: Callable[[nn.Sequential], nn.Sequential]) -> Any:
        counts: list[int] = []
        first: Any = cast(Any, model[0])[0].weight
        first.register_hook(clamped)
        first.register_post_accumulate_grad_hook(lambda parameter: counts.append(parameter.grad.numel()))
        removed = first.register_hook(lambda grad: grad * 0)
        model = late(model)
        removed.remove()
        cast(Any, model[1])[0].weight.register_hook(clamped)
        model(x).square().mean().backward()
        return counts, [parameter.grad for parameter in model.parameters()]

    counts, expected = train(net(), batch(), lambda model: model)

    def body(rank: int) -> None:
        found_counts, found = train(net(), part(rank), sharded)
        assert found_counts == counts
        torch.testing.assert_close([each.full_tensor() for each in found], expected, rtol=1e-9, atol=1e-12)

    run_ranks(2, body)
