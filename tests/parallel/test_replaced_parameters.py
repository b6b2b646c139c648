"""Parameters of a parallelized module that are plain later on, or computed by a parametrization."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


def _laid_out() -> nn.Module:
    model = nn.Sequential()
    model.add_module("a", nn.Linear(4, 6))
    model.add_module("b", nn.Linear(6, 4))
    return parallelize_module(model, T.Mesh((2,)), {"a": ColwiseParallel(), "b": RowwiseParallel()})


def test_a_plain_weight_put_in_is_named_in_the_next_forward() -> None:
    def body(rank: int) -> None:
        whole = nn.Sequential()
        whole.add_module("a", nn.Linear(4, 6))
        whole.add_module("b", nn.Linear(6, 4))
        assigned, put, called = _laid_out(), _laid_out(), _laid_out()
        assigned(torch.ones(2, 4))
        assigned.load_state_dict(whole.state_dict(), assign=True)
        with pytest.raises(ParallelizeError, match=r"^a\.weight is plain now, of shape \(6, 4\).*set_model_state_dict"):
            assigned(torch.ones(2, 4))
        put.get_submodule("b").bias = nn.Parameter(torch.zeros(4))  # the first forward, nothing known yet
        with pytest.raises(ParallelizeError, match=r"^b\.bias is plain now"):
            put(torch.ones(2, 4))
        with pytest.raises(ParallelizeError, match=r"^a\.weight is plain now"):
            torch.func.functional_call(called, dict(whole.named_parameters()), torch.ones(2, 4))
        assert called(torch.ones(2, 4)).shape == (2, 4)

    run_ranks(2, body)


def test_a_state_dict_of_plain_tensors_names_the_function_that_loads_it() -> None:
    def body(rank: int) -> None:
        whole = nn.Sequential(nn.Linear(4, 6))
        model = parallelize_module(nn.Sequential(nn.Linear(4, 6)), T.Mesh((2,)), {"0": ColwiseParallel()})
        with pytest.raises(
            RuntimeError, match=r"load whole tensors by torch\.distributed\.checkpoint\.state_dict\.set_"
        ):
            model.load_state_dict(whole.state_dict())

    run_ranks(2, body)


def _weight_norm_by_hook(module: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(module)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel, SequenceParallel])
@pytest.mark.parametrize(
    "parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm, _weight_norm_by_hook]
)
def test_a_parametrized_module_is_refused_before_it_is_changed(parametrize: Any, style: Any) -> None:
    def body(rank: int) -> Any:
        module = parametrize(nn.Linear(4, 4))
        names = [name for name, _ in module.named_parameters()]
        with pytest.raises(ParallelizeError, match="is computed by a parametrization, as weight_norm"):
            parallelize_module(module, T.Mesh((2,)), style())
        assert [name for name, _ in module.named_parameters()] == names
        assert not any(isinstance(parameter, T.DTensor) for parameter in module.parameters())
        return module(torch.ones(2, 4)).shape

    assert run_ranks(2, body) == [(2, 4)] * 2


def test_a_parametrization_of_a_parallelized_module_is_named_in_forward() -> None:
    def body(rank: int) -> None:
        model = _laid_out()
        parametrizations.weight_norm(model.get_submodule("a"))
        with pytest.raises(ParallelizeError, match=r"^a\.weight is computed by a parametrization now"):
            model(torch.ones(2, 4))

    run_ranks(2, body)
