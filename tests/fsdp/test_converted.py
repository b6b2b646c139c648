"""Sharded modules that are made on meta, or converted: as one process has them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.fsdp.models import Net, layout, loss_of, train
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.errors import FullyShardError
from tritondt.fsdp import fully_shard, register_fsdp_forward_method


def on_meta(kind: str, rank: int) -> tuple[Any, int, int]:
    """A model without values, laid out over tensor axes and sharded."""
    with torch.device("meta"):
        model, arguments, num_parts, part = layout(kind, rank)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **arguments)
    return fully_shard(model, **arguments), num_parts, part


def laid_out(values: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """The values as distributed tensors of the layouts that a model has."""
    return {
        name: T.distribute_tensor(
            values[name], held._spec.mesh, held.placements, order=held._spec.order, src_data_rank=None
        )
        for name, held in model.state_dict().items()
    }


def by_hand(model: Any, values: dict[str, torch.Tensor]) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(laid_out(values, model)[name])


def by_loading(model: Any, values: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(laid_out(values, model), assign=True)


def check_training(kind: str, give: Callable[[Any, dict[str, torch.Tensor]], None]) -> None:
    single = Net()
    values = {name: value.clone() for name, value in single.state_dict().items()}
    expected = train(single)

    def body(rank: int) -> Any:
        model, num_parts, part = on_meta(kind, rank)
        assert all(parameter.to_local().is_meta for parameter in model.parameters())
        give(model, values)
        losses = train(model, num_parts, part)
        return losses, {name: value.full_tensor() for name, value in model.state_dict().items()}

    found = run_ranks(4, body)
    means = [sum(losses) / 4 for losses in zip(*[losses for losses, _ in found], strict=True)]
    torch.testing.assert_close(means, expected, rtol=0, atol=1e-5)
    for _, state in found:
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=1e-4, atol=1e-4)


def test_parameters_on_meta_are_sharded_and_given_values() -> None:
    check_training("fsdp+tp", by_hand)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "give"), [("fsdp", by_hand), ("hsdp", by_loading), ("hsdp+tp", by_loading)])
def test_parameters_on_meta_of_other_layouts(kind: str, give: Callable[..., None]) -> None:
    check_training(kind, give)


def test_values_that_are_missing_are_asked_for() -> None:
    def body(rank: int) -> list[str]:
        model: Any = fully_shard(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)).to("meta"), mesh=T.Mesh((2,)))
        found = []
        for convert in (lambda: None, lambda: model[0].to_empty(device="cpu")):
            convert()
            with pytest.raises(FullyShardError) as raised:
                model(torch.ones(1, 2))
            found.append(str(raised.value))
        return found

    advice = "is on meta, and the mesh on cpu; before forward move the module there by model.to(device), or from meta "
    for none, half in run_ranks(2, body):
        assert none.startswith(f"0.weight {advice}by model.to_empty(device=...) with values set after it"), none
        assert half.startswith(f"1.weight {advice}"), half


def test_values_that_one_rank_lacks_are_heard_of_by_all() -> None:
    def body(rank: int) -> str:
        model: Any = fully_shard(nn.Linear(3, 4, device="meta"), mesh=T.Mesh((4,)))
        if rank != 2:
            model.to_empty(device="cpu")
        with pytest.raises(T.RefusalError if rank != 2 else FullyShardError) as found:
            model(torch.ones(1, 3))
        return str(found.value)

    for text in run_ranks(4, body):
        assert "weight is on meta, and the mesh on cpu" in text


def test_a_module_is_converted_between_steps() -> None:
    """Of another dtype after a step, to meta and back, with the optimizer that it had."""

    def run(model: Any, part: slice, fill: Callable[[Any], None]) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, losses = torch.linspace(-1, 1, 24).view(8, 3)[part], []
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.to(dtype)
            loss = model(inputs.to(dtype)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.to("meta").to_empty(device="cpu")
        fill(model)
        losses.append(model(inputs).square().mean().item())
        return losses

    def fill(model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    expected = run(made(), slice(0, 8), fill)

    def body(rank: int) -> list[Any]:
        model: Any = made()
        fully_shard(model[0], mesh=T.Mesh((4,)))
        fully_shard(model, mesh=T.Mesh((4,)))
        return run(model, slice(2 * rank, 2 * rank + 2), fill)

    found = run_ranks(4, body)
    torch.testing.assert_close([sum(losses) / 4 for losses in zip(*found, strict=True)], expected, rtol=1e-5, atol=0)


class Sampled(nn.Module):
    """A layer that a method other than forward uses, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found

    def sample(self, x: torch.Tensor, *, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self(x).tanh() + nn.functional.linear(x, self.layer.weight)
        return x


def test_methods_that_gather_as_forward_does() -> None:
    single, inputs = Sampled(), torch.linspace(-1, 1, 12).view(4, 3)
    single.sample(inputs, times=2).square().mean().backward()

    def body(rank: int) -> Any:
        model: Any = Sampled()
        register_fsdp_forward_method(model, "sample")  # of a module that is not sharded: nothing
        fully_shard(model, mesh=T.Mesh((4,)))
        register_fsdp_forward_method(model, "sample")
        with pytest.raises(TypeError, match="times"):
            model.sample(inputs[rank : rank + 1])
        model.sample(inputs[rank : rank + 1], times=2).square().mean().backward()
        return model.layer.weight.to_local().shape[0], model.layer.weight.grad.full_tensor()

    for rank, (num_rows, gradient) in enumerate(run_ranks(4, body)):
        assert num_rows == (1, 1, 1, 0)[rank]
        torch.testing.assert_close(gradient, single.layer.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("waits", [True, False])
def test_gradients_of_several_passes_are_reduced_when_they_are_asked_for(waits: bool) -> None:
    single = Net()
    for step in range(3):
        loss_of(single, step).backward()

    def body(rank: int) -> Any:
        model, arguments, num_parts, part = layout("hsdp", rank)
        sharded: Any = fully_shard(model, **arguments)
        sharded.set_force_sum_reduction_for_comms(True)
        missing = []
        for step in range(3):
            if waits:
                sharded.set_requires_all_reduce(step == 2)
            else:
                sharded.set_is_last_backward(step == 2)
            with CommDebugMode() as comm:
                loss_of(sharded, step, num_parts, part).backward()
            missing.append((all(found.grad is None for found in sharded.parameters()), comm.get_total_counts()))
        return missing, {name: found.grad.full_tensor() for name, found in sharded.named_parameters()}

    for missing, gradients in run_ranks(4, body):
        assert [is_missing for is_missing, _ in missing] == [True, True, False]
        assert [count for _, count in missing] == ([1, 1, 3] if waits else [3, 3, 3])
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
