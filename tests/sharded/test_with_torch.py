"""Torch's own sharded tensors beside ours on Gloo, process groups, and checkpoints read by other numbers of ranks."""

import inspect
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._shard as torch_shard
import torch.distributed._shard.sharded_tensor as torch_sharded
import torch.distributed._shard.sharding_plan as torch_plan
import torch.distributed._shard.sharding_spec as torch_spec
import torch.distributed.checkpoint as dcp
from torch.testing import assert_close

import tritondt as T
import tritondt.sharded as sharded
from tests.harness.gloo_ranks import GlooRanks
from tests.sharded.cuts import chunks, drawn_spec, expect_shards, listed, whole
from tritondt.sharded.checkpoint import _get_tensor_shard

# Torch's names that are not here, as docs/torch_api.md says.
NOT_HERE = {"ShardedTensorBase"}


@pytest.mark.parametrize(
    "module", [torch_sharded, torch_spec, torch_plan, torch_shard], ids=lambda module: module.__name__
)
def test_public_names_and_parameters_are_those_of_torch(module: Any) -> None:
    for name, theirs in vars(module).items():
        path = getattr(theirs, "__module__", "")
        # Operators are reached by the functions of torch that they stand for.
        is_own = path.startswith("torch.distributed._shard") and "_ops" not in path
        if name.startswith("_") or not is_own or not callable(theirs) or name in NOT_HERE:
            continue
        ours = getattr(sharded, name)
        if inspect.isfunction(theirs) and "options" not in inspect.signature(ours).parameters:
            wanted = [parameter for parameter in inspect.signature(theirs).parameters if parameter != "func"]
            assert set(wanted) <= set(inspect.signature(ours).parameters), name


def test_methods_are_those_of_torch() -> None:
    theirs = torch_sharded.ShardedTensor
    for name in vars(theirs) | vars(torch_sharded.api.ShardedTensorBase):
        if not name.startswith("_") and inspect.isfunction(getattr(theirs, name)):
            assert getattr(sharded.ShardedTensor, name) is not getattr(torch.Tensor, name, None), name
            wanted = set(inspect.signature(getattr(theirs, name)).parameters) - {"args", "kwargs"}
            assert wanted <= set(inspect.signature(getattr(sharded.ShardedTensor, name)).parameters), name


def _values(metadata: Any) -> list[Any]:
    return [
        (list(each.shard_offsets), list(each.shard_sizes), str(each.placement)) for each in metadata.shards_metadata
    ]


def beside_torch(rank: int) -> None:
    """What torch can do, one shard to every rank in chunks, is done alike."""
    warnings.simplefilter("ignore", FutureWarning)
    # Torch cannot reshard uneven chunks on Gloo, whose scatter takes equal pieces; and along the dim that is cut
    # already it aborts (SIGABRT) where the ranks go round, as 2, 0, 1.
    for shape, first in (((7, 5), [0, 1, 2]), ((9, 6), [1, 2, 0]), ((6, 12, 3), [0, 1, 2])):
        values, is_even = whole(shape), all(size % 3 == 0 for size in shape[:2])
        for dim, other_dim, order in ((0, 1, first), (1, 0, [0, 1, 2]), (0, 1, [2, 0, 1])):
            theirs_spec = torch_spec.ChunkShardingSpec(dim, [f"rank:{each}/cpu" for each in order])
            theirs = torch_shard._shard_tensor(values, theirs_spec, 1)
            ours = sharded.shard_tensor(values, chunks(dim, *order), 1)
            assert _values(ours.metadata()) == _values(theirs.metadata())
            assert_close(ours.local_tensor(), theirs.local_tensor(), rtol=0, atol=0)
            outs = [torch.zeros(shape) if rank == 2 else None for _ in (0, 1)]
            theirs.gather(2, outs[0])
            ours.gather(2, outs[1])
            assert_close(outs[1], outs[0], rtol=0, atol=0) if rank == 2 else None
            if not is_even:
                continue
            theirs.reshard(torch_spec.ChunkShardingSpec(other_dim, [f"rank:{each}/cpu" for each in range(3)]))
            ours.reshard(chunks(other_dim, 0, 1, 2))
            assert _values(ours.metadata()) == _values(theirs.metadata())
            assert_close(ours.local_tensor(), theirs.local_tensor(), rtol=0, atol=0)


@pytest.mark.extended
def test_torch_does_the_same(three_ranks: GlooRanks) -> None:
    three_ranks.run(beside_torch)


def on_processes(rank: int) -> None:
    """Random specs, and a process group of some ranks in another order than the world's."""
    for seed in range(4):
        numbers = random.Random(seed)
        shape = numbers.choice([(7,), (5, 6), (3, 4, 5)])
        values = whole(shape, torch.bfloat16)
        tensor = drawn_spec(numbers, shape, 3).shard(values, 2)
        for _ in range(3):
            tensor.reshard(drawn_spec(numbers, shape, 3))
            expect_shards(tensor, values)
    tensor = chunks(0, 0, 1, 2).shard(whole((5, 2)), 1, T.init_device_mesh("cpu", (3,)))
    assert tensor.to_dtensor().full_tensor().equal(whole((5, 2)))
    group = dist.new_group([0, 2])
    if rank != 1:
        tensor = sharded.shard_tensor(whole((5, 2)) + rank, chunks(0, 2, 0), 1, group)
        expect_shards(tensor, whole((5, 2)) + 2)
        assert len(tensor.local_shards()) == 1
        with sharded.load_with_process_group(group):
            loaded = pickle.loads(pickle.dumps(tensor))
        assert loaded._process_group is group
        expect_shards(loaded, whole((5, 2)) + 2)
    else:
        with pytest.raises(T.MeshError, match="takes a process group, a mesh, or None for the world"):
            sharded.shard_tensor(whole((5, 2)), chunks(0, 2, 0), 1, group)
    theirs: Any = torch_spec.ChunkShardingSpec(0, ["rank:0/cpu"])
    with pytest.raises(
        TypeError, match=r"a sharding spec is a tritondt\.sharded\.ShardingSpec, .* got torch\.distributed"
    ):
        sharded.zeros(theirs, 4)


@pytest.mark.extended
def test_processes_and_process_groups(three_ranks: GlooRanks) -> None:
    three_ranks.run(on_processes)


SAVED = listed(([0, 0], [3, 6], 2), ([3, 0], [6, 1], 0), ([3, 1], [6, 5], 2), ([9, 0], [0, 6], 1))


def save(rank: int, folder: str) -> None:
    state = {"weight": SAVED.shard(whole((9, 6))), "nothing": chunks(0, 0, 1).shard(whole((0, 3)))}
    dcp.save(state, checkpoint_id=folder)


def load(rank: int, folder: str) -> None:
    state = {"weight": sharded.zeros(chunks(1, 2, 0, 1), 9, 6), "nothing": sharded.zeros(chunks(0, 0, 1), 0, 3)}
    dcp.load(state, checkpoint_id=folder)
    expect_shards(state["weight"], whole((9, 6)))
    with pytest.raises(ValueError, match="no shard of this rank starts at"):
        _get_tensor_shard(state["weight"], dcp.metadata.MetadataIndex("weight", torch.Size([8, 8])))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_are_read_under_other_specs_and_by_one_process(three_ranks: GlooRanks, tmp_path: Path) -> None:
    three_ranks.run(save, str(tmp_path))
    three_ranks.run(load, str(tmp_path))
    found = {"weight": torch.zeros(9, 6), "nothing": torch.zeros(0, 3)}
    dcp.load(found, checkpoint_id=str(tmp_path), no_dist=True)
    assert_close(found["weight"], whole((9, 6)), rtol=0, atol=0)
