"""fully_shard over a data axis of layers of experts: experts cut over one axis, their shards over the other."""

from typing import Any, cast

import pytest
import torch

import tritondt as T
from tests.fsdp.models import DataAxes
from tests.parallel.test_experts import WANTED, Experts, IndexedExperts, Mixture, X, train
from tritondt.comm.transports.threads import run_ranks
from tritondt.fsdp import fully_shard
from tritondt.parallel import ExpertParallel, ReplicateParallel, parallelize_module

# Tokens of each of 4 ranks, and of 8; the second rank has none.
TOKENS_OF = {4: (12, 0, 11, 14), 8: (6, 0, 5, 7, 6, 6, 6, 1)}


@pytest.mark.parametrize(
    ("shape", "experts", "sizes", "apart"),
    [
        ((2, 2), Experts, None, True),
        ((4, 2), IndexedExperts, (6, 0), False),  # a rank without experts, and shards of 2, 2, 2 and 0 of 6
        ((2, 4), Experts, None, True),
        ((2, 2, 2), IndexedExperts, (5, 1), True),  # in two replicas; 5 experts are 3 and 2
        ((2, 2), IndexedExperts, (1, 5), False),
    ],
)
def test_experts_on_a_data_axis_train_as_one_process_does(
    shape: tuple[int, ...], experts: Any, sizes: tuple[int, ...] | None, apart: bool
) -> None:
    dtype = torch.float64
    single, x, wanted = Mixture(experts, dtype), X.to(dtype), WANTED.to(dtype)
    losses, norms = train(single, x, wanted)
    num_ranks, num_expert_ranks = shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1), shape[-1]

    def body(rank: int) -> tuple[list[float], T.DTensorSpec]:
        whole = T.Mesh(shape, ("replicate", "dp", "ep")[-len(shape) :])
        first = rank // num_expert_ranks * num_expert_ranks
        mesh = T.Mesh((num_expert_ranks,), ("ep",), ranks=range(first, first + num_expert_ranks))
        plan = {"experts": ExpertParallel(sizes=sizes), "": ReplicateParallel(input_layouts=T.Shard(0))}
        model: Any = parallelize_module(Mixture(experts, dtype), mesh, plan)
        data: dict[str, Any] = {
            "mesh": whole,
            "dp_mesh_dims": DataAxes("dp", "replicate" if len(shape) > 2 else None),
        }
        if apart:
            fully_shard(model.experts, **data)
        fully_shard(model, **data)
        model.set_gradient_divide_factor(1.0)  # losses are terms of a mean over all tokens
        lengths = list(TOKENS_OF[num_ranks])
        found, found_norms = train(model, x.split(lengths)[rank], wanted.split(lengths)[rank])
        torch.testing.assert_close(found_norms, norms)
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter)
        return found, cast(T.DTensor, model.get_parameter("experts.up"))._spec

    results = run_ranks(num_ranks, body)
    torch.testing.assert_close([sum(losses) for losses in zip(*(found for found, _ in results), strict=True)], losses)
    # The data axis cuts the experts that the expert axis has left to each rank.
    assert all(spec.placements[-2] == T.Shard(0) and spec.order[-1] == len(shape) - 2 for _, spec in results)
