"""Modules whose weight is (input, output) features, as Conv1D of transformers, under the styles of linear layers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.parallel.test_styles import X, compare_on_ranks
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Conv1D(nn.Module):
    """A multiplication that reshapes by the number of features of the whole."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.num_outputs = num_outputs
        self.weight = nn.Parameter(torch.randn(num_inputs, num_outputs, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(num_outputs, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.num_outputs)


@pytest.mark.parametrize("given", [T.Replicate(), T.Shard(1), T.Shard(2), None], ids=repr)
@pytest.mark.parametrize("output", [T.Shard(-1), T.Replicate(), T.Shard(1), T.Partial()], ids=repr)
@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
def test_in_and_out_of_every_layout(kind, output, given):
    input_layouts = T.Replicate() if given is None else None
    style = kind(input_layouts=input_layouts, output_layouts=output, use_local_output=False, transposed=True)
    compare_on_ranks(lambda: Conv1D(10, 8), style, X, given)


def test_three_blocks_are_each_cut_by_whole_units():
    # Two heads of two features in each of three blocks; the third rank has none.
    def body(rank: int) -> tuple[Any, torch.Tensor]:
        module = copy.deepcopy(Conv1D(10, 12))
        parallelize_module(module, T.Mesh((3,)), ColwiseParallel(unit=2, balanced=True, repeats=3, transposed=True))
        weight: Any = module.weight
        return weight.placements, module(X)

    whole = Conv1D(10, 12)(X)
    for rank, (placements, found) in enumerate(run_ranks(3, body)):
        assert placements == (T.Shard(1, unit=2, sizes=(2, 2, 0), repeats=3),)
        kept = [block * 4 + 2 * rank + feature for block in range(3) for feature in range(2)] if rank < 2 else []
        torch.testing.assert_close(found, whole[..., kept])


@pytest.mark.parametrize("kind", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize(("module", "found"), [(nn.Linear(4, 3), r"one of \(3, 4\)"), (nn.Module(), "none")])
def test_a_module_whose_weight_is_laid_out_otherwise_is_refused(kind, module, found):
    name = type(module).__name__

    def body(rank: int) -> None:
        with pytest.raises(ParallelizeError, match=f"as Conv1D of transformers; {name} has {found}: leave transposed"):
            parallelize_module(copy.deepcopy(module), T.Mesh((2,)), kind(transposed=True))

    run_ranks(2, body)
