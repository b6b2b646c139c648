"""ShardedTensor: how it is made, what it tells, copies, saving, and distributed tensors that share its memory."""

import copy
import io
import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tritondt as T
import tritondt.sharded as sharded
from tests.sharded.cuts import chunks, expect_shards, listed, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import LayoutError, MeshError, WorldError

# The first rank holds two shards, the second one, the third none.
UNEVEN = listed(([0, 0], [2, 3], 0), ([4, 0], [1, 3], 0), ([2, 0], [2, 3], 1))


def test_factories() -> None:
    def body(rank: int) -> None:
        for tensor, value, dtype in (
            (sharded.zeros(UNEVEN, 5, 3), 0, torch.float32),
            (sharded.ones(UNEVEN, (5, 3), dtype=torch.int32), 1, torch.int32),
            (sharded.full(UNEVEN, (5, 3), 7), 7, torch.int64),
            (sharded.full(UNEVEN, (5, 3), 2.5, dtype=torch.float64, requires_grad=True), 2.5, torch.float64),
        ):
            assert tensor.shape == tensor.size() == torch.Size([5, 3])
            assert tensor.dim() == tensor.ndim == 2
            assert tensor.dtype is dtype
            assert len(tensor.local_shards()) == (2, 1, 0)[rank]
            expect_shards(tensor, torch.full((5, 3), value, dtype=dtype))
        assert all(shard.tensor.requires_grad for shard in tensor.local_shards())
        assert tensor.requires_grad
        assert sharded.empty(UNEVEN, 5, 3).metadata().shards_metadata == UNEVEN.shards
        assert not tensor.is_pinned()
        assert repr(tensor).startswith("ShardedTensor(ShardedTensorMetadata(")

    run_ranks(3, body)


def test_random_numbers_follow_from_the_place() -> None:
    def body(rank: int) -> list[torch.Tensor]:
        outs = []
        for spec in (UNEVEN, chunks(1, 2, 0, 1)):
            for make in (sharded.rand, sharded.randn):
                torch.manual_seed(3)
                outs.append(torch.empty(5, 3))
                make(spec, 5, 3).gather(0, outs[-1] if rank == 0 else None)
        return outs

    uniform, normal, *others = run_ranks(3, body)[0]
    assert_close(others, [uniform, normal], rtol=0, atol=0)
    assert uniform.unique().numel() == 15
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert normal.min() < 0


NO_SPEC: Any = [0, 1]
BAD = {
    "a spec": (lambda: sharded.zeros(NO_SPEC, 4), TypeError, "a sharding spec is a tritondt.sharded.ShardingSpec"),
    "a size": (lambda: sharded.zeros(chunks(0, 0, 1), 4.5), TypeError, "a size is ints, or one sequence of ints"),
    "rrefs": (lambda: sharded.zeros(chunks(0, 0, 1), 4, init_rrefs=True), NotImplementedError, "not made here; gather"),
    "layout": (
        lambda: sharded.zeros(chunks(0, 0, 1), 4, layout=torch.sparse_coo),
        LayoutError,
        "strided and contiguous",
    ),
    "format": (
        lambda: sharded.zeros(chunks(0, 0, 1), 4, memory_format=torch.channels_last),
        LayoutError,
        "strided and contiguous",
    ),
    "a rank": (lambda: sharded.zeros(chunks(0, 0, 5), 4), LayoutError, "rank 5, which is not among the group's (0, 1)"),
    "a gap": (lambda: sharded.zeros(listed(([0], [3], 0)), 4), LayoutError, "make up the whole tensor"),
    "devices": (
        lambda: sharded.zeros(sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cuda:0"]), 4),
        LayoutError,
        "placed on devices of one type",
    ),
    "a group": (lambda: sharded.zeros(chunks(0, 0, 1), 4, process_group=[0, 1]), MeshError, "a process group, a mesh"),
    "several": (
        lambda: sharded.zeros(chunks(0, 0, 0, 1, 1), 4).local_tensor(),
        NotImplementedError,
        "use local_shards()",
    ),
    "remote": (lambda: sharded.zeros(chunks(0, 0, 1), 4).remote_shards(), RuntimeError, "gather or reshard instead"),
}


def test_what_cannot_be_is_refused_on_all_ranks() -> None:
    def body(rank: int) -> None:
        for make, kind, text in BAD.values():
            with pytest.raises(kind, match=re.escape(text)):
                make()

    run_ranks(2, body)


def test_copies_and_other_dtypes() -> None:
    def body(rank: int) -> None:
        tensor = UNEVEN.shard(whole((5, 3)).requires_grad_())
        for made in (tensor.clone(), copy.deepcopy(tensor), tensor.to(copy=True)):
            assert made.metadata() == tensor.metadata()
            for ours, theirs in zip(tensor.local_shards(), made.local_shards(), strict=True):
                assert ours.tensor.data_ptr() != theirs.tensor.data_ptr()
            expect_shards(made, whole((5, 3)))
        detached = tensor.detach()
        assert not detached.requires_grad
        assert not detached.metadata().tensor_properties.requires_grad
        for ours, theirs in zip(tensor.local_shards(), detached.local_shards(), strict=True):
            assert ours.tensor.data_ptr() == theirs.tensor.data_ptr()
        for made in (tensor.to(torch.float64), tensor.double(), tensor.to("cpu", torch.float64)):
            assert made.dtype is torch.float64
            assert made.metadata().tensor_properties.dtype is torch.float64
            expect_shards(made, whole((5, 3), torch.float64))
        assert not tensor.to(torch.int64).requires_grad
        with torch.no_grad():
            assert not tensor.to(torch.float64).requires_grad
        assert tensor.to("cpu") is tensor
        assert tensor.cpu() is tensor
        assert tensor.contiguous() is tensor
        with pytest.raises(LayoutError, match=r"shards are contiguous, got memory_format=torch\.channels_last"):
            tensor.cpu(memory_format=torch.channels_last)
        with pytest.raises(LayoutError, match="shards are contiguous"):
            tensor.clone(memory_format=torch.channels_last)
        detached.requires_grad_()
        assert all(shard.tensor.requires_grad for shard in detached.local_shards())
        assert detached.metadata().tensor_properties.requires_grad

    run_ranks(3, body)


@pytest.mark.parametrize("spec", [chunks(0, 1, 0, 2), UNEVEN], ids=["chunks", "listed"])
def test_saved_and_loaded(spec: sharded.ShardingSpec) -> None:
    def body(rank: int) -> tuple[bytes, str]:
        tensor: Any = nn.Parameter(spec.shard(whole((5, 3))))
        file = io.BytesIO()
        torch.save({"weight": tensor}, file)
        file.seek(0)
        loaded: Any = torch.load(file)["weight"]
        is_parameter = isinstance(loaded, nn.Parameter)
        assert is_parameter
        assert loaded.metadata() == tensor.metadata()
        assert loaded.sharding_spec() == spec
        expect_shards(loaded, whole((5, 3)))
        with torch.no_grad():
            loaded.reshard(chunks(1, 0, 1, 2))
        loaded.gather(0, torch.empty(5, 3) if rank == 0 else None)
        mesh = T.Mesh((3,), ranks=(2, 1, 0))
        file.seek(0)
        with sharded.load_with_process_group(mesh):
            if rank != 1:
                with pytest.raises(WorldError, match=rf"saved with local rank {rank} and is loaded with {2 - rank}"):
                    torch.load(file)
            with (
                pytest.raises(RuntimeError, match="load_with_process_group is within another one"),
                sharded.load_with_process_group(mesh),
            ):
                pass
        file.seek(0)
        torch.load(file)  # the context has ended
        return file.getvalue(), str(rank)

    saved = run_ranks(3, body)

    def other_world(rank: int) -> None:
        with pytest.raises(RuntimeError, match="local world size 3 and is loaded with 2; load what this rank saved"):
            torch.load(io.BytesIO(saved[rank][0]))

    run_ranks(2, other_world)


def test_distributed_tensors_share_memory() -> None:
    def body(rank: int) -> None:
        expected = whole((7, 4))
        for spec in (chunks(0, 0, 1, 2), chunks(1, 2, 0, 1), listed(([0, 0], [1, 4], 1), ([1, 0], [6, 4], 0))):
            tensor = spec.shard(expected)
            distributed = tensor.to_dtensor()
            if tensor.local_shards():
                assert distributed.to_local().data_ptr() == tensor.local_tensor().data_ptr()
            assert_close(distributed.full_tensor(), expected, rtol=0, atol=0) if tensor.local_shards() else None
            back = sharded.ShardedTensor.from_dtensor(distributed, T.Mesh((3,)))
            assert back.metadata() == tensor.metadata() or spec == chunks(1, 2, 0, 1)
            for ours, theirs in zip(tensor.local_shards(), back.local_shards(), strict=True):
                assert ours.tensor.data_ptr() == theirs.tensor.data_ptr()

    run_ranks(3, body)


def test_distributed_tensors_of_any_layout() -> None:
    def body(rank: int) -> None:
        expected, mesh = whole((7, 6)), T.Mesh((2, 2))
        spec = listed(([0, 0], [3, 6], 0), ([3, 0], [4, 2], 3), ([3, 2], [4, 4], 3))
        tensor = spec.shard(expected)
        with pytest.raises(LayoutError, match="where every rank holds one at most, cut along one dim"):
            tensor.to_dtensor()
        for placements in ("S0, S1", "R, S1", "S1(repeats=3), S0", "S0(sizes=7/0), R"):
            distributed = tensor.to_dtensor(mesh, T.parse_placements(placements))
            assert_close(distributed.full_tensor(), expected, rtol=0, atol=0)
        back = sharded.ShardedTensor.from_dtensor(tensor.to_dtensor(mesh, T.parse_placements("S1(repeats=3), S0")))
        assert len(back.local_shards()) == 3
        expect_shards(back, expected)
        with pytest.raises(LayoutError, match="an element lies in one shard only, and on several ranks under"):
            sharded.ShardedTensor.from_dtensor(distributed)
        terms = T.DTensor.from_local(torch.ones(2), mesh, [T.Shard(0), T.Partial()])
        with pytest.raises(LayoutError, match=r"a rank holds a term of each element|an element lies in one shard"):
            sharded.ShardedTensor.from_dtensor(terms)
        with pytest.raises(LayoutError, match="takes device_mesh and placements together, or neither"):
            tensor.to_dtensor(mesh)
        with pytest.raises(LayoutError, match="a gradient comes back from one rank for each element"):
            sharded.ones(chunks(0, 0, 1, 2, 3), 8, requires_grad=True).to_dtensor(mesh, T.parse_placements("R, S0"))

    run_ranks(4, body)


def test_gradients_pass_between_shards_and_distributed_tensors() -> None:
    def body(rank: int) -> None:
        tensor = chunks(0, 0, 1).shard(whole((5, 4)).requires_grad_())
        leaf = tensor.local_tensor()
        distributed = tensor.to_dtensor() * 2
        again = sharded.ShardedTensor.from_dtensor(distributed)
        (again.local_tensor() * 3).sum().backward()
        assert_close(leaf.grad, torch.full_like(leaf, 6), rtol=0, atol=0)
        parts = tensor.to_dtensor(T.Mesh((2,)), [T.Shard(1)])
        (parts * whole((5, 4)).tolist()[0][0]).sum().full_tensor().backward()

    run_ranks(2, body)


def test_state_dict_hooks() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = sharded.ones(chunks(0, 0, 1), 4)
            self._register_state_dict_hook(sharded.state_dict_hook)
            self.register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook)

    def body(rank: int) -> None:
        net = nn.Sequential(Holder())
        found = net.state_dict()
        assert found["0.table"] is net[0].table
        other = nn.Sequential(Holder())
        other.load_state_dict(found, strict=False)
        assert other[0].table is net[0].table

    run_ranks(2, body)


def test_sizes_of_kaiming_are_those_of_the_whole() -> None:
    def body(rank: int) -> float:
        tensor = sharded.empty(chunks(1, 0, 1), 4, 600)
        assert nn.init.kaiming_uniform_(tensor, a=math.sqrt(5)) is tensor
        return float(tensor.local_tensor().abs().max())

    bound = 1 / math.sqrt(600)
    assert all(0.95 * bound < found <= bound for found in run_ranks(2, body))
