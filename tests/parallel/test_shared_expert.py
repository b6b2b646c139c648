"""Tokens and gradients travel while the shared expert computes; losses of routers are those of all ranks' tokens."""

import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tests.harness.delayed_transport import Delay, slow_down
from tests.harness.gloo_ranks import GlooRanks
from tests.parallel.test_experts import EXPERTS, WANTED, WIDTH, Experts, IndexedExperts, Mixture, X, train
from tritondt import events, identity
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import LocalTensorError, ParallelizeError
from tritondt.parallel import (
    ExpertParallel,
    ReplicateParallel,
    SharedExpertOverlap,
    load_balancing_loss,
    parallelize_module,
    router_z_loss,
    token_combine,
    token_dispatch,
)

LENGTHS = (12, 0, 11, 14)


class Shared(Mixture):
    """A mixture with a shared expert, which is run after the others, or before."""

    def __init__(self, experts: Any, dtype: torch.dtype, *, is_first: bool = False) -> None:
        super().__init__(experts, dtype)
        self.shared = nn.Sequential(nn.Linear(WIDTH, 12, dtype=dtype), nn.GELU(), nn.Linear(12, WIDTH, dtype=dtype))
        self.is_first = is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            found: torch.Tensor = self.shared(x) + super().forward(x)
            return found
        flat = x.flatten(0, -2)
        return cast(torch.Tensor, super().forward(flat).view_as(x) + self.shared(flat).view_as(x))


def plan() -> dict[str, Any]:
    return {
        "experts": ExpertParallel(),
        "": ReplicateParallel(input_layouts=T.Shard(0)),
    }


def overlapped(model: nn.Module, mesh: T.Mesh) -> nn.Module:
    parallelize_module(model, mesh, plan())
    return SharedExpertOverlap("experts", "shared")._apply(model, mesh)


@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("experts", [Experts, IndexedExperts])
def test_three_steps_are_those_of_one_process(experts, is_first):
    single = Shared(experts, torch.float64, is_first=is_first)
    x, wanted = X.double(), WANTED.double()
    losses, norms = train(single, x, wanted)

    def body(rank: int) -> list[float]:
        model = overlapped(Shared(experts, torch.float64, is_first=is_first), T.Mesh((4,)))
        found, found_norms = train(model, x.split(LENGTHS)[rank], wanted.split(LENGTHS)[rank])
        torch.testing.assert_close(found_norms, norms)
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(cast(Any, model.get_parameter(name)).full_tensor(), parameter)
        return found

    results = run_ranks(4, body)
    torch.testing.assert_close([sum(each) for each in zip(*results, strict=True)], losses)


def test_halves_of_the_shared_expert_come_between_the_messages_both_ways():
    def body(rank: int) -> tuple[list[str], list[str]]:
        seen: list[str] = []

        def note(event: events.StepRan) -> None:
            if event.kind == "rows" and identity.current().rank == rank:
                seen.append("rows")

        model: Any = overlapped(Shared(Experts, torch.float64), T.Mesh((2,)))
        model.shared.register_forward_hook(lambda *_: seen.append("shared"))
        model.shared[1].register_full_backward_hook(lambda *_: seen.append("shared"))
        unsubscribe = events.subscribe(note)
        out = model(X.double().view(1, 37, WIDTH).requires_grad_())
        forward, seen = seen[:], []
        out.sum().backward()
        unsubscribe()
        assert "shared" not in model.__dict__
        return forward, seen

    for forward, backward in run_ranks(2, body):
        assert forward == ["rows", "shared", "rows", "shared"]
        assert backward == ["rows", "shared", "rows", "shared"]


def test_gradients_of_gradients_and_several_under_way():
    def body(rank: int) -> None:
        mesh, rows = T.Mesh((2,)), torch.arange(6.0).view(3, 2).double().requires_grad_()
        first = token_dispatch(rows, torch.tensor([1, 2]), mesh, async_op=True)
        second = token_dispatch(rows * 2, torch.tensor([1, 2]), mesh, async_op=True)
        later, found = second.wait(), first.wait()
        assert second.wait() is later
        torch.testing.assert_close(later.tokens, found.tokens * 2, rtol=0, atol=0)
        back = token_combine(found.tokens**3, found, async_op=True).wait()
        (grad,) = torch.autograd.grad(back.sum(), rows, create_graph=True)
        torch.testing.assert_close(grad, 3 * rows**2, rtol=0, atol=0)
        (grad,) = torch.autograd.grad(grad.sum(), rows)
        torch.testing.assert_close(grad, 6 * rows, rtol=0, atol=0)

    run_ranks(2, body)


class Other(Shared):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Mixture.forward(self, x) + self.shared(x + 1)
        return found


def test_what_cannot_overlap_is_refused():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        with pytest.raises(
            ParallelizeError, match="names 'expert', and Shared has norm, router, experts, shared; allo"
        ):
            parallelize_module(Shared(Experts, torch.float64), mesh, SharedExpertOverlap("expert", "shared"))
        model = parallelize_module(Shared(Experts, torch.float64), mesh, SharedExpertOverlap("experts", "shared"))
        with pytest.raises(ParallelizeError, match="names 'experts', a Experts without ExpertParallel; give it that"):
            model(X.double())
        with pytest.raises(
            ParallelizeError, match=r"takes a plain tensor \(tokens, ..., features\) first, got Tensor\(8,\)"
        ):
            overlapped(Shared(Experts, torch.float64), mesh)(torch.ones(8))
        model = overlapped(Other(Experts, torch.float64), mesh)
        with pytest.raises(
            ParallelizeError, match=r"shared was called with a tensor \(37, 8\) that is not the first ar"
        ):
            model(X.double())
        assert "shared" not in model.__dict__

    run_ranks(2, body)


def single_losses(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    share = F.one_hot(indices, EXPERTS).sum((0, 1)) / indices.numel()
    return EXPERTS * (share * logits.softmax(-1).mean(0)).sum() + logits.logsumexp(-1).square().mean() / 8


def test_losses_of_routers_are_those_of_all_tokens():
    weight = torch.randn(EXPERTS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected_weight = weight.clone().requires_grad_()
    logits = X.double() @ expected_weight.T
    expected = single_losses(logits, logits.topk(2).indices)
    expected.backward()

    def body(rank: int) -> torch.Tensor:
        mesh, own = T.Mesh((4,)), weight.clone().requires_grad_()
        logits = X.double().split(LENGTHS)[rank] @ own.T
        loss = load_balancing_loss(logits, logits.topk(2).indices, mesh) + router_z_loss(logits, mesh) / 8
        torch.testing.assert_close(loss, expected)
        loss.backward()
        assert own.grad is not None
        return own.grad

    torch.testing.assert_close(torch.stack(run_ranks(4, body)).sum(0), expected_weight.grad)


def test_losses_of_no_tokens_and_of_what_is_no_list():
    def body(rank: int) -> None:
        mesh, empty = T.Mesh((2,)), torch.zeros(0, 3)
        assert load_balancing_loss(empty, torch.zeros(0, 1, dtype=torch.int64), mesh).item() == 0
        assert router_z_loss(empty, mesh).item() == 0
        with pytest.raises(LocalTensorError, match=r"got logits \(2, 3\) of torch.int64; allowed are floating point"):
            router_z_loss(torch.ones(2, 3, dtype=torch.int64), mesh)
        with pytest.raises(LocalTensorError, match=r"got indices \(1, 1\) of torch.int64 for logits \(2, 3\); allowed"):
            load_balancing_loss(torch.ones(2, 3), torch.ones(1, 1, dtype=torch.int64), mesh)

    run_ranks(2, body)


class Sleeping(nn.Module):
    """A shared expert that takes half of `SECONDS` for a half of the tokens, forward and backward."""

    class _Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(SECONDS)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.sleep(SECONDS)
            return grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._Run.apply(x)
        return found


SECONDS, ROWS = 0.2, 64


def seconds_of_a_pass(rank: int) -> float:
    """Forward and backward of a mixture whose messages and whose halves take SECONDS each: 4 of both, and 4 hidden."""
    torch.set_num_threads(1)
    # A rank gives half of its rows away, each to two experts.
    slow_down(Delay(1e-4, ROWS * WIDTH * 8 / SECONDS))
    torch.manual_seed(0)
    model: Any = Shared(Experts, torch.float64)
    model.shared = Sleeping()
    overlapped(model, T.Mesh((2,)))
    indices = torch.tensor([[0, 3]] * ROWS)
    model.router.register_forward_hook(lambda *_: F.one_hot(indices, EXPERTS).sum(1).double() * 9)
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    model(x)
    dist.barrier()
    started = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - started


@pytest.mark.extended
@pytest.mark.usefixtures("alone")
def test_messages_are_hidden_behind_the_shared_expert():
    """4 messages and 4 halves of equal length are 8 one after the other, 4 where all are hidden; others may compute."""
    for _ in range(3):
        with GlooRanks(2) as ranks:
            found = max(ranks.run(seconds_of_a_pass)) / SECONDS
        if found < 6:
            break
    assert found < 6
