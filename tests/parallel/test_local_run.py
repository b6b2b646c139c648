"""Parallelized modules as parts of programs: copies, exceptions, checkpoints, accumulation, modes, optimizers."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

RANKS = 3
X = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SEQUENCE = T.Shard(1)
PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=SEQUENCE),
    "down": RowwiseParallel(output_layouts=SEQUENCE, use_local_output=False),
}


class Watched(nn.Linear):
    """Keeps the weight that its forward saw, and calls what it is given."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, dtype=dtype)
        self.inside: list[Callable[[], object]] = []
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight.detach()
        for call in self.inside:
            call()
        return super().forward(x)


class MLP(nn.Module):
    """A block as people write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.up = Watched(6, 10, dtype=torch.float64)
        self.down = nn.Linear(10, 6, dtype=torch.float64)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + mixed


def parallel_mlp() -> tuple[MLP, T.Mesh]:
    mesh = T.Mesh((RANKS,))
    model = MLP()
    parallelize_module(model, mesh, PLAN)
    return model, mesh


def backward_of(model: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    """Each output element with a factor of its own."""
    found = model(x)
    factor = torch.linspace(-1, 1, X.numel(), dtype=X.dtype).view(X.shape)
    found.backward(distribute(factor, found._spec.mesh, "R") if isinstance(found, T.DTensor) else factor)


def single_gradients(num_backwards: int = 1) -> dict[str, torch.Tensor]:
    model = MLP()
    for _ in range(num_backwards):
        backward_of(model, X)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_gradients(model: nn.Module, num_backwards: int = 1) -> None:
    expected = single_gradients(num_backwards)
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        assert grad.placements == parameter.placements, name  # type: ignore[attr-defined]
        torch.testing.assert_close(grad.full_tensor(), expected[name])


def test_copies_run_by_themselves():
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        backward_of(model, distribute(X, mesh, "S1"))
        twin = copy.deepcopy(model)
        twin.zero_grad()
        nn.init.zeros_(twin.down.bias)
        backward_of(twin, distribute(X, mesh, "S1"))
        check_gradients(model)
        check_gradients(twin)
        assert twin.up.weight is not model.up.weight
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        twin.load_state_dict(torch.load(buffer, weights_only=False))
        bias: Any = twin.down.bias
        torch.testing.assert_close(bias.full_tensor(), MLP().down.bias, rtol=0, atol=0)

    run_ranks(RANKS, body)


def test_parameters_are_plain_only_while_the_forward_runs():
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        model(distribute(X, mesh, "S1"))
        assert type(model.up.seen) is torch.Tensor
        assert model.up.seen.shape == (4 if rank < 2 else 2, 6)
        assert isinstance(model.up.weight, T.DTensor)
        assert "weight" not in vars(model.up)
        assert set(model.state_dict()) == set(MLP().state_dict())

    run_ranks(RANKS, body)


class BrokenError(RuntimeError):
    """Raised on purpose."""


@pytest.mark.parametrize("where", ["before", "within", "after"])
def test_an_exception_leaves_the_parameters_distributed(where):
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()

        def fail(*_: Any) -> None:
            raise BrokenError

        handles = {
            "before": model.up.register_forward_pre_hook,
            "within": model.up.inside.append,
            "after": model.up.register_forward_hook,
        }
        handle: Any = handles[where](fail)  # type: ignore[operator]
        with pytest.raises(BrokenError):
            model(distribute(X, mesh, "S1"))
        assert isinstance(model.up.weight, T.DTensor)
        assert isinstance(model.up.bias, T.DTensor)
        if handle is None:
            model.up.inside.clear()
        else:
            handle.remove()
        backward_of(model, distribute(X, mesh, "S1"))
        check_gradients(model)

    run_ranks(RANKS, body)


def test_checkpoints_run_the_boundaries_again():
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        backward_of(partial(checkpoint, model, use_reentrant=False), distribute(X, mesh, "S1"))
        check_gradients(model)
        assert isinstance(model.up.weight, T.DTensor)

    run_ranks(RANKS, body)


def test_gradients_accumulate_in_place():
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        x = distribute(X, mesh, "S1")
        backward_of(model, x)
        first: Any = model.norm.weight.grad
        with CommDebugMode() as comm:
            backward_of(model, x)
        assert model.norm.weight.grad is first
        check_gradients(model, num_backwards=2)
        # The norm's two and the bias of `down`, in one exchange, and the way back over the two boundaries.
        assert comm.by_module()["backward"]["(P(sum)) -> (R) in 3 pieces"].steps == 1
        assert comm.get_implicit_counts() == {}
        model.zero_grad(set_to_none=False)
        backward_of(model, x)
        check_gradients(model)

    run_ranks(RANKS, body)


def test_gradients_that_are_asked_for_do_not_accumulate():
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        x = distribute(X, mesh, "S1")
        backward_of(model, x)
        before = [parameter.grad for parameter in model.parameters()]
        found: Any = model(x)
        ones = distribute(torch.ones_like(X), mesh, "R")
        grads: Any = torch.autograd.grad(found, list(model.parameters()), ones)
        assert all(parameter.grad is kept for parameter, kept in zip(model.parameters(), before, strict=True))
        single = MLP()
        expected = torch.autograd.grad(single(X), list(single.parameters()), torch.ones_like(X))
        for grad, whole, parameter in zip(grads, expected, list(model.parameters()), strict=True):
            assert grad.placements == parameter._spec.placements  # type: ignore[attr-defined]
            torch.testing.assert_close(grad.full_tensor(), whole)
        check_gradients(model)

    run_ranks(RANKS, body)


def test_hooks_see_whole_gradients_at_once():
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        expected = single_gradients()
        seen: dict[str, Any] = {}
        model.norm.weight.register_hook(lambda grad: seen.update(weight=grad))
        model.norm.bias.register_post_accumulate_grad_hook(lambda bias: seen.update(bias=bias.grad))
        backward_of(model, distribute(X, mesh, "S1"))
        for name, grad in seen.items():
            assert grad.placements == (T.Replicate(),)
            torch.testing.assert_close(grad.full_tensor(), expected[f"norm.{name}"])
        assert len(seen) == 2
        check_gradients(model)

    run_ranks(RANKS, body)


def test_a_backward_pass_for_some_parameters_leaves_the_others():
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        found: Any = model(distribute(X, mesh, "S1")).sum()
        found.backward(inputs=[model.norm.weight, model.up.weight])
        with_grad = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert with_grad == ["norm.weight", "up.weight"]
        single = MLP()
        single(X).sum().backward()
        grad: Any = model.norm.weight.grad
        assert grad.placements == (T.Replicate(),)
        torch.testing.assert_close(grad.full_tensor(), single.norm.weight.grad)

    run_ranks(RANKS, body)


def test_a_backward_pass_that_fails_does_not_disturb_the_next():
    def body(rank: int) -> None:
        model, mesh = parallel_mlp()

        def fail(_: torch.Tensor) -> None:
            raise BrokenError

        x = distribute(X, mesh, "S1").requires_grad_()
        handle = x.register_hook(fail)
        with pytest.raises(BrokenError):
            backward_of(model, x)
        handle.remove()
        model.zero_grad()
        backward_of(model, x)
        check_gradients(model)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    expected = MLP()(X)

    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        with mode():
            found = model(distribute(X, mesh, "S1"))
            torch.testing.assert_close(found.full_tensor(), expected)
        assert not found.requires_grad
        backward_of(model, distribute(X, mesh, "S1"))
        check_gradients(model)

    run_ranks(RANKS, body)


def test_autocast_runs_in_its_own_dtype():
    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        model = parallelize_module(MLP().float(), mesh, PLAN)
        x = distribute(X.float(), mesh, "S1")
        with torch.autocast("cpu", torch.bfloat16):
            found = model.down(model.up(model.norm(x)))  # type: ignore[operator]
        assert found.dtype is torch.bfloat16
        assert found.placements == (SEQUENCE,)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("given", ["S1", "R"])
def test_gradients_of_gradients(given):
    """Also where two layers share an input, which is the result of an operator."""

    def penalty(model: MLP, x: torch.Tensor) -> torch.Tensor:
        shared = x * 2
        found = model(x) + model.down(model.up(shared) * model.up(shared))
        (grad,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        return grad.square().sum()

    single, x = MLP(), X.clone().requires_grad_()
    expected = penalty(single, x)
    expected.backward()

    def body(rank: int) -> None:
        model, mesh = parallel_mlp()
        mine: Any = distribute(X, mesh, given).requires_grad_()
        found: Any = penalty(model, mine)
        torch.testing.assert_close(found.full_tensor(), expected)
        found.backward()
        torch.testing.assert_close(mine.grad.full_tensor(), x.grad)
        for name, whole in single.named_parameters():
            parameter: Any = model.get_parameter(name)
            torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("plan", [("1", "3"), ("5", "7"), ("1", "3", "5", "7")])
def test_gradients_of_gradients_of_plain_outputs(plan):
    """Later layers make the gradient of a layer's output depend on weights, of which ranks have parts."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        halves = [[nn.LayerNorm(6), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)] for _ in range(2)]
        return nn.Sequential(*[layer for half in halves for layer in half]).double()

    def penalty(model: nn.Module) -> torch.Tensor:
        x = torch.arange(12.0, dtype=torch.float64).view(2, 6).div(12).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    single = made()
    penalty(single).backward()

    def body(rank: int) -> None:
        styles: Any = {name: (ColwiseParallel, RowwiseParallel)[place % 2]() for place, name in enumerate(plan)}
        model = parallelize_module(made(), T.Mesh((RANKS,)), styles, src_data_rank=None)
        penalty(model).backward()
        for name, whole in single.named_parameters():
            gradient: Any = model.get_parameter(name).grad
            found = gradient.full_tensor() if isinstance(gradient, T.DTensor) else gradient
            torch.testing.assert_close(found, whole.grad, rtol=1e-9, atol=1e-12)

    run_ranks(RANKS, body)


def test_an_input_that_is_written_to_between_two_layers():
    """They share no part: the second one's belongs to another history."""

    def total(model: MLP, x: torch.Tensor) -> torch.Tensor:
        model.requires_grad_(False)  # a weight's gradient would need the input as it was
        shared = x * 2
        first = model.up(shared).sum()
        shared.mul_(x)
        return cast(torch.Tensor, first + model.up(shared).square().sum())

    single, x = MLP(), X.clone().requires_grad_()
    total(single, x).backward()

    def body(rank: int) -> None:
        mesh = T.Mesh((RANKS,))
        model = cast(MLP, parallelize_module(MLP(), mesh, {"up": ColwiseParallel(use_local_output=False)}))
        mine: Any = distribute(X, mesh, "R").requires_grad_()
        total(model, mine).backward()
        torch.testing.assert_close(mine.grad.full_tensor(), x.grad)

    run_ranks(RANKS, body)
