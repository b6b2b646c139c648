"""Asynchronous checkpoints of models and of parts of tensors: a save has the values of when it was asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.fsdp import fully_shard
from tritondt.interop.checkpoint_folder import CheckpointFolder


def _model(offset: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + offset)
    return fully_shard(model, mesh=T.Mesh((2,)))


def _state(model: Any, cpu_offload: bool) -> dict[str, Any]:
    options = StateDictOptions(cpu_offload=cpu_offload)
    found: dict[str, Any] = torch_state_dict.get_model_state_dict(model, options=options)
    whole = T.distribute_tensor(
        torch.arange(24.0).reshape(4, 6) + model[0].bias.detach().full_tensor()[0], T.Mesh((2,)), [T.Shard(0)]
    )
    return found | {"columns": whole[:, 1:4]}


def save_while_training(rank: int, folder: str, cpu_offload: bool) -> None:
    """Saves by both, writes to what is being saved, and compares what another model loads."""
    model = _model(0.5)
    expected = {name: found.full_tensor() for name, found in _state(model, False).items()}
    checkpoints = CheckpointFolder(f"{folder}/saves")
    state = _state(model, cpu_offload)
    under_way: list[Any] = [dcp.async_save(state, checkpoint_id=f"{folder}/plain"), checkpoints.async_save(state, 1)]
    for found in (*model.parameters(), *state.values()):
        with torch.no_grad():
            found.zero_()
    for save in under_way:
        save.result()
    for load in (lambda into: dcp.load(into, checkpoint_id=f"{folder}/plain"), checkpoints.load):
        into = _state(_model(100.0), False)
        load(into)
        for name, found in into.items():
            torch.testing.assert_close(found.full_tensor(), expected[name], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
def test_what_is_saved_is_what_was_there(tmp_path: Path) -> None:
    with GlooRanks(2) as ranks:
        for cpu_offload in (False, True):
            ranks.run(save_while_training, str(tmp_path / str(cpu_offload)), cpu_offload)
