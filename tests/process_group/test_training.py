"""DDP, FSDP2 and torch's tensor parallelism train on the backend as they do on Gloo: the same losses and weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.distributed.checkpoint.state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness.gloo_ranks import GlooRanks
from tests.process_group import training
from tests.process_group.conftest import groups

RanksOf = Callable[[str, int], GlooRanks]

KINDS = ("ddp", "ddp_with_a_hook", "fsdp", "tensor_parallel", "redistributions")


@pytest.fixture(params=["sockets", pytest.param("shared-memory", marks=pytest.mark.extended), "nccl"])
def ranks(request: pytest.FixtureRequest, ranks_of: RanksOf) -> GlooRanks:
    return ranks_of(request.param, 2)


def train_on_both(rank: int, kind: str) -> None:
    """With 2 ranks, sums are of two terms, which no order changes."""
    run = getattr(training, kind)
    expected, found = run(groups["gloo"], rank), run(dist.group.WORLD, rank)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_gloo(ranks: GlooRanks, kind: str) -> None:
    ranks.run(train_on_both, kind, timeout_s=250)


def train_replicated_and_sharded(rank: int) -> None:
    """4 ranks in a grid, so that every sum has two terms."""
    grid = torch.arange(4).reshape(2, 2)
    columns, rows = ([dist.new_group(line.tolist(), backend="gloo") for line in lines] for lines in (grid.T, grid))
    own_groups = [columns[rank % 2], rows[rank // 2]]
    on_gloo = DeviceMesh.from_group(own_groups, "cpu", mesh=grid, mesh_dim_names=("replicas", "shards"))
    on_nccl = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    expected, found = training.fsdp_on(on_gloo, rank), training.fsdp_on(on_nccl, rank)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_replicas_of_sharded_models_train_as_on_gloo(ranks_of: RanksOf) -> None:
    ranks_of("nccl", 4).run(train_replicated_and_sharded, timeout_s=250)


def save_and_load(rank: int, folder: str) -> None:
    mesh = training.mesh_of(dist.group.WORLD)
    model, again = training.model_of(), training.model_of(1)
    for each in (model, again):
        fully_shard(each, mesh=mesh)
    checkpoint.save(states.get_model_state_dict(model), checkpoint_id=folder)
    found = states.get_model_state_dict(again)
    checkpoint.load(found, checkpoint_id=folder)
    states.set_model_state_dict(again, found)
    for expected, parameter in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(training.whole(parameter), training.whole(expected), rtol=0, atol=0)


def test_checkpoints_of_sharded_models(ranks: GlooRanks, tmp_path: Any) -> None:
    ranks.run(save_and_load, str(tmp_path), timeout_s=250)
