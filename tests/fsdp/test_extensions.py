"""torch's FullyShardedDataParallel over tensor-parallel modules, and fully_shard, on processes that speak Gloo."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

import tritondt as T
from tests.fsdp.models import Block, Net, loss_of, plan, train
from tests.harness.gloo_ranks import GlooRanks
from tritondt.errors import FullyShardError, MeshError
from tritondt.fsdp import DTensorExtensions, fully_shard, register_fsdp_extensions
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.extended


def meshes() -> T.DeviceMesh:
    return T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallel_net(mesh: T.DeviceMesh) -> nn.Module:
    return parallelize_module(Net(), mesh["tp"], plan(), src_data_rank=None)


def train_fully_sharded(rank: int, expected: list[float]) -> None:
    mesh = meshes()
    model = parallel_net(mesh)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    parameters = list(model.parameters())
    assert all(isinstance(each, T.DTensor) and each.device_mesh == mesh for each in parameters)
    losses = torch.tensor(train(model, 2, rank // 2), dtype=torch.float64)
    dist.all_reduce(losses)
    torch.testing.assert_close((losses / 4).tolist(), expected, rtol=0, atol=1e-5)


def test_fully_shard_on_processes(four_ranks: GlooRanks) -> None:
    four_ranks.run(train_fully_sharded, train(Net()), timeout_s=100)


def wrapped(use_orig_params: bool) -> tuple[Any, T.DeviceMesh]:
    register_fsdp_extensions()
    mesh = meshes()
    model = FullyShardedDataParallel(
        parallel_net(mesh),
        device_mesh=mesh["dp"],
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
    )
    return model, mesh


def train_wrapped(rank: int, use_orig_params: bool, expected: list[float]) -> None:
    model, _ = wrapped(use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(len(expected)):
        loss = loss_of(model, step, 2, rank // 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    losses = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(losses)
    torch.testing.assert_close((losses / 4).tolist(), expected, rtol=0, atol=1e-5)


def unclipped_losses() -> list[float]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_torchs_wrapper_trains_as_one_process_does(four_ranks: GlooRanks, use_orig_params: bool) -> None:
    four_ranks.run(train_wrapped, use_orig_params, unclipped_losses(), timeout_s=100)


def state_there_and_back(rank: int, use_orig_params: bool) -> None:
    model, mesh = wrapped(use_orig_params)
    single = Net().state_dict()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
    state = model.state_dict()
    for name, value in single.items():
        held = state[name]
        assert isinstance(held, T.DTensor), (name, type(held))
        assert held.device_mesh == mesh
        torch.testing.assert_close(held.full_tensor(), value, rtol=0, atol=0)
    changed = {name: copy.deepcopy(value).add_(1) for name, value in state.items()}
    model.load_state_dict(changed)
    optimizer = torch.optim.AdamW(model.parameters())
    for refused in (
        lambda: model.clip_grad_norm_(1.0),
        lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer),
        lambda: FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, {}),
    ):
        with pytest.raises(FullyShardError, match="it counts what a rank holds for the whole"):
            refused()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), single[name] + 1, rtol=0, atol=0)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_state_dicts_are_distributed_tensors(four_ranks: GlooRanks, use_orig_params: bool) -> None:
    four_ranks.run(state_there_and_back, use_orig_params, timeout_s=100)


def chunk_by_itself(rank: int) -> None:
    mesh = meshes()
    extension = DTensorExtensions(torch.cpu)
    whole = torch.arange(45.0).view(9, 5)
    tensor = T.distribute_tensor(whole, mesh["tp"], [T.Shard(0)])
    local, spec = extension.pre_flatten_transform(tensor)
    assert type(local) is torch.Tensor
    rebuilt: Any = extension.post_unflatten_transform(local, spec)
    assert rebuilt.placements == tensor.placements
    chunk = extension.chunk_dtensor(tensor, rank // 2, mesh["dp"])
    assert [3, 2, 2, 2][(rank // 2) + 2 * (rank % 2)] == chunk.to_local().shape[0]
    torch.testing.assert_close(chunk.full_tensor(), whole, rtol=0, atol=0)
    gathered = extension.all_gather_dtensor(chunk, mesh)
    torch.testing.assert_close(gathered, tensor.to_local(), rtol=0, atol=0)
    plain = extension.chunk_dtensor(whole, rank // 2, mesh["dp"])
    assert plain.placements == (T.Shard(0), T.Replicate())
    torch.testing.assert_close(plain.full_tensor(), whole, rtol=0, atol=0)
    nested: Any = extension.chunk_tensor(tensor, rank // 2, 2, 1, mesh["dp"].get_group())
    assert isinstance(nested, ShardedTensor)
    offsets = [each.shard_offsets for each in nested.metadata().shards_metadata]
    assert (tuple(nested.size()), offsets) == ((9, 5), [[0, 0], [5, 0]])
    inner, shards = extension.pre_load_state_dict_transform(nested)
    assert tuple(inner.size()) == tuple(tensor.to_local().shape)
    torch.testing.assert_close(shards[0].tensor, chunk.to_local(), rtol=0, atol=0)
    with pytest.raises(MeshError, match="allowed is a slice of a mesh that has a tensor axis too"):
        extension.chunk_dtensor(whole, rank, T.init_device_mesh("cpu", (4,)))


def test_the_parts_of_the_extension(four_ranks: GlooRanks) -> None:
    four_ranks.run(chunk_by_itself, timeout_s=100)


def shard_over(rank: int, number: int) -> None:
    """Gradients of one process, and torch's view of the parameters, on meshes as torchtitan and others make them."""
    names: tuple[str, ...]
    if number == 2:
        world = T.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        mesh = world._unflatten(0, (1, 2, 2), ("replicate", "fsdp", "tp"))
        data, names = mesh["replicate", "fsdp"], ("replicate", "fsdp", "tp")
    else:
        mesh = T.init_device_mesh("cpu", (1, 2, 1, 2), mesh_dim_names=("pp", "dp", "cp", "tp"))
        data, names = mesh["dp"], ("dp", "tp")
        if number == 1:
            data, names = mesh["dp", "cp"]._flatten("dp_cp"), ("dp_cp", "tp")
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model: Any = copy.deepcopy(single)
    batch = torch.randn(4, 8)
    single(batch).square().mean().backward()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=data)
    model(batch.chunk(2)[rank // 2]).square().mean().backward()
    for name, parameter in single.named_parameters():
        held: Any = model.get_parameter(name)
        torch.testing.assert_close(held.grad.full_tensor(), parameter.grad, rtol=1e-5, atol=1e-7)
        assert held.device_mesh.mesh_dim_names == names
        assert dist.get_process_group_ranks(held.device_mesh["tp"].get_group()) == mesh["tp"].mesh.tolist()
        assert held.device_mesh[names[:-1]].size() == 2
        torch.testing.assert_close(held.to_torch().full_tensor(), parameter.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("number", [0, 1, 2], ids=["slice of four axes", "flattened", "unflattened"])
def test_meshes_whose_axes_come_from_others(four_ranks: GlooRanks, number: int) -> None:
    four_ranks.run(shard_over, number, timeout_s=100)


def load_on_slice(rank: int, is_flattened: bool) -> None:
    register_fsdp_extensions()
    mesh = T.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    data = mesh["pp", "dp"]._flatten("pp_dp") if is_flattened else mesh["dp"]
    model = FullyShardedDataParallel(
        parallel_net(mesh), device_mesh=data, device_id=torch.device("cpu"), use_orig_params=True
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
    single = Net().state_dict()
    model.load_state_dict({name: copy.deepcopy(value).add_(1) for name, value in model.state_dict().items()})
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), single[name] + 1, rtol=0, atol=0)


@pytest.mark.parametrize("is_flattened", [False, True])
def test_state_dicts_of_a_slice_of_three_axes_load(four_ranks: GlooRanks, is_flattened: bool) -> None:
    four_ranks.run(load_on_slice, is_flattened, timeout_s=100)
