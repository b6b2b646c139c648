"""torch.amp.GradScaler on distributed parameters: scaled steps, and steps that all ranks skip."""

from typing import Any

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks


@pytest.mark.parametrize("bad_rank", [None, 1])
def test_a_scaler_steps_or_skips_on_all_ranks_alike(bad_rank: int | None) -> None:
    def body(rank: int) -> tuple[float, torch.Tensor]:
        mesh = T.Mesh((3,))
        weight: Any = torch.nn.Parameter(T.distribute_tensor(torch.ones(5, 2), mesh, [T.Shard(0)]))
        bias: Any = torch.nn.Parameter(T.distribute_tensor(torch.ones(4), mesh, [T.Replicate()]))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD([weight, bias], lr=0.5)
        scaler.scale((weight * 2).sum() + bias.sum()).backward()
        if rank == bad_rank:
            weight.grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(bias.full_tensor().detach(), torch.full((4,), 1.0 if bad_rank else 0.5))
        return scaler.get_scale(), weight.full_tensor().detach()

    for scale, weight in run_ranks(3, body):
        assert scale == (8.0 if bad_rank is None else 4.0)
        torch.testing.assert_close(weight, torch.full((5, 2), 0.0 if bad_rank is None else 1.0), rtol=0, atol=0)


def test_a_gradient_of_terms_is_refused() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        terms = T.distribute_tensor(torch.ones(4), mesh, [T.Partial()])
        with pytest.raises(T.PropagationError, match="which holds terms; redistribute it to Replicate or Shard first"):
            torch._amp_foreach_non_finite_check_and_unscale_([terms], torch.zeros(()), torch.ones(()))

    run_ranks(2, body)
