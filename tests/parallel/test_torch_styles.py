"""Plans that were written for torch: its styles and placements are ours, or refused by name."""

import copy
from typing import Any, cast

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn

import tritondt as T
import tritondt.parallel as P
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.experimental import local_map

_X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6), nn.Identity())


def _plan(kinds: Any, of: Any) -> dict[str, Any]:
    """The plan with styles of one library and placements of one."""
    return {
        "0": kinds.SequenceParallel(use_local_output=False),
        "1": kinds.ColwiseParallel(input_layouts=of.Shard(1)),
        "3": kinds.RowwiseParallel(output_layouts=of.Shard(1), use_local_output=False),
        "4": kinds.PrepareModuleOutput(output_layouts=of.Shard(1), desired_output_layouts=of.Replicate()),
    }


@pytest.mark.parametrize(("kinds", "of"), [(torch_parallel, torch_tensor), (P, torch_tensor)])
def test_a_plan_of_torch_gives_what_ours_gives(kinds: Any, of: Any) -> None:
    single = _model()
    expected = single(_X)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in single.parameters()]

    def body(rank: int) -> Any:
        mesh = T.Mesh((2,))
        found = []
        for plan in (_plan(kinds, of), _plan(P, T)):
            model = P.parallelize_module(copy.deepcopy(_model()), mesh, plan)
            out = model(_X.chunk(2, 1)[rank])  # each rank has other positions
            out.square().sum().backward()
            found.append((out.detach(), [cast(Any, parameter.grad) for parameter in model.parameters()]))
        (out, of_torch), (same, of_ours) = found
        torch.testing.assert_close(out, same, rtol=0, atol=0)
        for one, other in zip(of_torch, of_ours, strict=True):
            assert one.placements == other.placements
            torch.testing.assert_close(one.to_local(), other.to_local(), rtol=0, atol=0)
        return out, [one.full_tensor() for one in of_torch]

    for out, found in run_ranks(2, body):
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(found, gradients)


def test_inputs_of_torchs_preparing_styles_are_taken_over() -> None:
    layouts: dict[str, Any] = {
        "input_layouts": (torch_tensor.Shard(0), None),
        "desired_input_layouts": (torch_tensor.Replicate(), None),
        "input_kwarg_layouts": {"other": torch_tensor.Shard(0)},
        "desired_input_kwarg_layouts": {"other": torch_tensor.Replicate()},
    }
    outputs: dict[str, Any] = {
        "output_layouts": torch_tensor.Replicate(),
        "desired_output_layouts": torch_tensor.Shard(0),
    }

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, factor: int, other: torch.Tensor) -> torch.Tensor:
            return x * factor + other

    def body(rank: int) -> Any:
        mesh, x = T.Mesh((2,)), torch.tensor([float(rank)])
        both = torch_parallel.PrepareModuleInputOutput(**layouts, use_local_input=True, **outputs)
        alone = torch_parallel.PrepareModuleInput(**layouts, use_local_output=True)
        styles: Any = (both, alone)
        return [P.parallelize_module(Sum(), mesh, style)(x, 3, other=x + 10).tolist() for style in styles]

    assert run_ranks(2, body) == [[[10.0], [10.0, 14.0]], [[14.0], [10.0, 14.0]]]


def test_what_has_no_form_of_ours_is_refused_by_name() -> None:
    class Own(torch_parallel.ColwiseParallel):
        pass

    strided = torch_tensor.placement_types._StridedShard(0, split_factor=2)

    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        plan: Any = {"1": Own()}
        with pytest.raises(ParallelizeError, match=r"for '1'; .*: Own is of torch\.distributed\.tensor\.parallel, and"):
            P.parallelize_module(_model(), mesh, plan)
        layout: Any = strided
        with pytest.raises(
            ParallelizeError, match=r"input_layouts: .* is torch's _StridedShard.*write tritondt's Shard"
        ):
            P.ColwiseParallel(input_layouts=layout)
        numbered: Any = {1: P.ColwiseParallel()}
        with pytest.raises(ParallelizeError, match="names a module by 1; allowed is its dotted name, a str"):
            P.parallelize_module(_model(), mesh, numbered)

    run_ranks(2, body)


def test_placements_of_torch_are_taken_wherever_ours_are() -> None:
    shard: Any = [torch_tensor.Shard(0)]
    whole: Any = [torch_tensor.Replicate()]

    def body(rank: int) -> Any:
        mesh, x = T.Mesh((2,)), torch.arange(6.0)
        made: list[Any] = [
            T.distribute_tensor(x, mesh, shard),
            T.DTensor.from_local(x.chunk(2)[rank], mesh, shard),
            T.zeros(6, device_mesh=mesh, placements=shard),
            T.distribute_tensor(x, mesh, [T.Replicate()]).redistribute(placements=shard),
            T.redistribute_many([(T.distribute_tensor(x, mesh, [T.Replicate()]), shard)])[0],
        ]
        assert [one.placements for one in made] == [(T.Shard(0),)] * len(made)
        partial: Any = [torch_tensor.Partial("max")]
        terms: Any = T.DTensor.from_local(torch.tensor([float(rank)]), mesh, partial)
        assert terms.placements == (T.Partial("max"),)
        leaf = made[0].detach().requires_grad_()
        leaf.to_local(grad_placements=shard).sum().backward()
        assert isinstance(leaf.grad, T.DTensor)
        assert leaf.grad.placements == (T.Shard(0),)
        mapped = local_map(lambda a: a * 2, tuple(shard), (shard,))
        return mapped(made[0]).full_tensor().tolist(), terms.redistribute(placements=whole).to_local().tolist()

    assert run_ranks(2, body) == [([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [1.0])] * 2
