"""ReplicateParallel: everything else of a model, its parameters and gradients as on one process."""

from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.fsdp.models import Net, loss_of
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.parallel import ColwiseParallel, ReplicateParallel, RowwiseParallel, parallelize_module


def whole(gradient: Any) -> torch.Tensor:
    found: torch.Tensor = gradient.full_tensor()
    return found


@pytest.mark.parametrize("layout", [T.Shard(1), T.Replicate()], ids=["parts", "whole"])
def test_gradients_are_those_of_one_process(layout: T.Placement) -> None:
    single = Net()
    loss_of(single, 0).backward()

    def body(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        # Five positions on two ranks, 3 and 2: distributed between the layers.
        rows = RowwiseParallel(output_layouts=layout, use_local_output=False)
        norm = ReplicateParallel(input_layouts=layout, use_local_output=False)
        plan = {
            "blocks.*.up": ColwiseParallel(input_layouts=layout),
            "blocks.*.down": rows,
            "embedding": rows,
            "norm": norm,
            "blocks.*.norm": norm,
            "head": ColwiseParallel(input_layouts=layout, output_layouts=T.Replicate()),
        }
        parallelize_module(model, T.Mesh((2,)), plan, src_data_rank=None)
        loss_of(model, 0).backward()
        return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}

    for gradients in run_ranks(2, body):
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_layers_inside_are_replicated_but_for_those_of_the_plan() -> None:
    def body(rank: int) -> Any:
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), nn.Linear(6, 4))
        plan = {"1": ColwiseParallel(), "": ReplicateParallel()}
        parallelize_module(model, T.Mesh((2,)), plan)
        out = model(torch.ones(3, 4))
        return [parameter.placements[0] for parameter in model.parameters()], tuple(out.shape)  # type: ignore[attr-defined]

    replicate, rows = T.Replicate(), T.Shard(0)
    assert run_ranks(2, body) == [([replicate] * 4 + [rows] * 2, (3, 2))] * 2


def test_terms_are_refused_as_inputs() -> None:
    with pytest.raises(ParallelizeError, match="allowed are Shard and Replicate"):
        ReplicateParallel(input_layouts=T.Partial())


class Router(nn.Module):
    """Scores and choices, as routers of transformers give them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(3, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = x @ self.weight.t()
        return scores, scores.argmax(-1)


def test_a_tuple_goes_out_as_it_is():
    def body(rank: int) -> None:
        router: Any = parallelize_module(Router(), T.Mesh((2,)), ReplicateParallel(input_layouts=T.Shard(0)))
        scores, choices = router(torch.full((3 - rank, 2), 1.0 + rank))
        assert choices.tolist() == [2] * (3 - rank)
        scores[:, 0].sum().backward()
        # 3 rows of ones, and 2 of twos.
        torch.testing.assert_close(router.weight.grad.full_tensor()[0], torch.tensor([7.0, 7.0]), rtol=0, atol=0)

    run_ranks(2, body)
