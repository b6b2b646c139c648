"""Plain tensors beside distributed ones: gradients of the right kind and value, whichever way autograd brings them."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.parallel import ColwiseParallel, parallelize_module

FULL = torch.arange(1.0, 15.0, dtype=torch.float64).reshape(7, 2)

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def scaled(x: Any, plain: torch.Tensor) -> torch.Tensor:
    """The gradient of `plain` is a sum over all elements of `x`, of which each rank has some."""
    return cast(torch.Tensor, (x * plain.sum()).sum())


def added(x: Any, plain: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, x.square().sum() + (plain * plain).sum())


def stacked(x: Any, plain: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.sum(), plain.sum(), (plain * 3).sum()]).square().sum()


def used_twice(x: Any, plain: torch.Tensor) -> torch.Tensor:
    number = plain.sum() * 1
    number.mul_(2)
    return cast(torch.Tensor, (x * number).sum() + number * number + (x * number).mean())


def summed_up_in_a_plain_one(x: Any, plain: torch.Tensor) -> torch.Tensor:
    total = plain.sum() * 1
    total += (x * x).sum()
    total += x[0, 0] * 3
    return total


@pytest.mark.parametrize("text", ["S0", "R", "P", "S1(sizes=0/2)"])
@pytest.mark.parametrize("loss", [scaled, added, stacked, used_twice, summed_up_in_a_plain_one])
def test_gradients_are_of_their_tensors_kind(loss: Loss, text: str) -> None:
    start, whole = torch.tensor([0.5, 2.0], dtype=torch.float64), FULL.clone().requires_grad_()
    alone = start.clone().requires_grad_()
    loss(whole, alone).backward()

    def body(rank: int) -> None:
        x: Any = distribute(FULL, T.Mesh((2,)), text).requires_grad_()
        plain = start.clone().requires_grad_()
        seen: list[Any] = []
        plain.register_hook(seen.append)
        for _ in range(2):  # the second time the operators are compiled
            x.grad = plain.grad = None
            loss(x, plain).backward()
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
            torch.testing.assert_close(plain.grad, alone.grad)
        assert {type(grad) for grad in (*seen, plain.grad)} == {torch.Tensor}
        assert len(plain._backward_hooks or ()) <= 2

    run_ranks(2, body)


def test_what_cat_leaves_out_has_a_distributed_gradient() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        for text in ("R", "S0"):
            empty = distribute(torch.ones(0), mesh, text).requires_grad_()
            x = distribute(torch.ones(3, 2), mesh, "R")
            for _ in range(2):  # decided, then kept
                torch.cat([x, empty], 0).sum().backward()
            assert isinstance(empty.grad, T.DTensor)
            assert empty.grad.full_tensor().shape == (0,)
            (found,) = torch.autograd.grad(torch.cat([empty, x], 1).sum(), [empty])
            assert isinstance(found, T.DTensor)

    run_ranks(2, body)


def test_hooks_of_others_see_plain_gradients() -> None:
    def body(rank: int) -> None:
        x = distribute(FULL, T.Mesh((2,)), "S0")
        factor, seen = torch.tensor(2.0, dtype=torch.float64, requires_grad=True), list[Any]()
        factor.register_hook(seen.append)
        factor.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad))
        (x * factor).sum().backward()
        (once,) = torch.autograd.grad((x * factor).sum(), factor)
        for grad in (*seen, once):
            assert type(grad) is torch.Tensor
            assert grad.item() == FULL.sum().item()
        assert len(seen) == 3

    run_ranks(2, body)


def test_second_derivatives_of_a_plain_number() -> None:
    def body(rank: int) -> None:
        x = distribute(FULL, T.Mesh((2,)), "S0")
        factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad((x * factor**3).sum(), factor, create_graph=True)
        (second,) = torch.autograd.grad(first, factor)
        assert type(second) is torch.Tensor
        torch.testing.assert_close(second, 12 * FULL.sum())

    run_ranks(2, body)


def test_parameters_that_count_as_replicated_have_plain_gradients() -> None:
    """As in a loss of a module that is parallelized in part."""
    weight = torch.tensor([1.0, -1.0], dtype=torch.float64)
    alone = weight.clone().requires_grad_()
    ((FULL * alone).square().sum() + (alone * 3).sum()).backward()

    def body(rank: int) -> None:
        x = distribute(FULL, T.Mesh((2,)), "S0")
        parameter = nn.Parameter(weight.clone())
        with T.implicit_replication():
            ((parameter * 3).sum() + (x * parameter).square().sum()).backward()
            assert type(parameter.grad) is torch.Tensor
            torch.testing.assert_close(parameter.grad, alone.grad)
            torch.optim.SGD([parameter], lr=1.0).step()
        torch.testing.assert_close(parameter.detach(), weight - cast(torch.Tensor, alone.grad))

    run_ranks(2, body)


def test_an_input_of_a_parallel_module_beside_a_loss_of_its_own() -> None:
    torch.manual_seed(0)
    linear, start = nn.Linear(2, 3, dtype=torch.float64), FULL.clone()
    alone = start.clone().requires_grad_()
    (linear(alone).sum() + (alone * alone).sum()).backward()

    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        net = nn.Linear(2, 3, dtype=torch.float64)
        net.load_state_dict(linear.state_dict())
        parallelize_module(net, mesh, ColwiseParallel(use_local_output=False))
        x = start.clone().requires_grad_()
        (net(x).sum() + (x * x).sum()).backward()
        assert type(x.grad) is torch.Tensor
        torch.testing.assert_close(x.grad, alone.grad)
        # What is made of it is a plain tensor again, which exchanges take.
        T.DTensor.from_local(x.grad, mesh, [T.Shard(0)]).full_tensor()

    run_ranks(2, body)


def test_a_rank_outside_the_mesh_gets_zeros() -> None:
    def body(rank: int) -> float:
        x = T.distribute_tensor(torch.ones(4), T.Mesh((2,), ranks=(0, 1)), [T.Shard(0)])
        factor = torch.tensor(2.0, requires_grad=True)
        (x * factor).sum().backward()
        return cast(torch.Tensor, factor.grad).item()

    assert run_ranks(3, body) == [4.0, 4.0, 0.0]
