"""torch's data-parallel wrappers on modules of distributed parameters: refused before they change anything."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.nn.parallel import DistributedDataParallel

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.errors import FullyShardError
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def _laid_out(mesh: Any) -> Any:
    return parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _check_refused(wrap: Callable[[Any], object], model: nn.Module, sentence: str) -> None:
    layouts = {
        name: parameter._spec for name, parameter in model.named_parameters() if isinstance(parameter, T.DTensor)
    }
    with pytest.raises(FullyShardError, match=sentence):
        wrap(model)
    found = {name: parameter._spec for name, parameter in model.named_parameters() if isinstance(parameter, T.DTensor)}
    assert found == layouts
    assert model(torch.ones(2, 4)).shape == (2, 4)


def _refusals(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  takes long to import, and after tritondt here

    grid = T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sentence = (
        r"given the parameter .*weight', a tritondt DTensor .*call tritondt\.fsdp\.fully_shard\(module, mesh=mesh\["
    )
    _check_refused(lambda model: fully_shard(model, mesh=grid["dp"]), _laid_out(grid["tp"]), sentence)
    _check_refused(lambda model: fully_shard(model[0], mesh=grid["dp"]), _laid_out(grid["tp"]), sentence)
    _check_refused(DistributedDataParallel, _laid_out(grid["tp"]), sentence)
    _check_refused(replicate_by_ddp, _laid_out(grid["tp"]), sentence)
    data = grid["dp"].get_group()
    mixed = nn.Sequential(*_laid_out(grid["tp"]), nn.LayerNorm(4))
    _check_refused(
        lambda model: DistributedDataParallel(model, process_group=data),
        mixed,
        "distributed parameters, as '0.weight', and plain ones, as '3.weight'.*within tritondt.implicit_replication",
    )
    with T.implicit_replication():
        DistributedDataParallel(mixed, process_group=data)
    DistributedDataParallel(_model())  # plain ones as ever
    fully_shard(_model(), mesh=grid["dp"])


def _in_place_of_it(rank: int) -> Any:
    """After the refusal, the cure: the same module is sharded, and gives what one process gives."""
    from torch.distributed.fsdp import fully_shard as fully_shard_of_torch  # noqa: PLC0415

    from tritondt.fsdp import fully_shard  # noqa: PLC0415

    grid = T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _laid_out(grid["tp"])
    with pytest.raises(FullyShardError, match=r"tritondt\.fsdp\.fully_shard"):
        fully_shard_of_torch(model, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    x = torch.arange(8.0).view(2, 4)
    torch.testing.assert_close(model(x), _model()(x))
    return dist.get_rank()


@pytest.mark.extended
def test_torchs_wrappers_refuse_a_module_of_distributed_parameters_at_once() -> None:
    with GlooRanks(4) as ranks:
        ranks.run(_refusals, timeout_s=100)
        assert ranks.run(_in_place_of_it, timeout_s=100) == [0, 1, 2, 3]
