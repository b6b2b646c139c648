"""Torch's "fake" process group: one process plans, allocates and counts as one rank of many."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import tritondt as T
from tritondt.comm import world
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZE, RANK = 6, 2


@pytest.fixture(scope="module")
def mesh() -> Iterator[T.DeviceMesh]:
    """Six ranks, of which this process is one and the others do not exist."""
    dist.init_process_group("fake", rank=RANK, world_size=SIZE, store=FakeStore())
    try:
        yield T.init_device_mesh("cpu", (SIZE,))
        T.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("source", "target"), [("S0", "R"), ("S0", "S1"), ("P", "R"), ("P", "S1"), ("R", "S0")])
def test_shapes_and_bytes_are_those_of_real_ranks(mesh: T.DeviceMesh, source: str, target: str) -> None:
    spec = T.DTensorSpec(mesh, T.parse_placements(source), T.TensorMeta.contiguous((13, 7)))
    x = T.DTensor.from_local(torch.ones(spec.local_shape), mesh, spec.placements, shape=(13, 7), stride=(7, 1))
    traffic = world.current().communicator(range(SIZE)).traffic
    wanted = spec.with_placements(T.parse_placements(target))
    for async_op in (False, True):
        before = traffic.received_bytes
        found = x.redistribute(placements=wanted.placements, async_op=async_op).wait()
        assert found.to_local().shape == wanted.local_shape
        exchange = T.explain(spec, wanted)
        assert (traffic.received_bytes == before) is (exchange.received_bytes == 0)


def test_a_module_trains_one_step(mesh: T.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weight = model[0].weight
    assert isinstance(weight, T.DTensor)
    assert weight.to_local().shape == (2, 4)
    assert weight.full_tensor().shape == (9, 4)
    drawn = T.rand(5, device_mesh=mesh, placements=[T.Shard(0)])
    assert drawn.full_tensor().shape == (5,)


def test_reductions_and_comparisons_take_every_rank_for_this_one(mesh: T.DeviceMesh) -> None:
    x = T.DTensor.from_local(torch.ones(3), mesh, [T.Partial()], run_check=True)
    summed = x.full_tensor()
    assert summed.shape == (3,)
    assert summed.isfinite().all()


def test_nothing_is_opened(mesh: T.DeviceMesh) -> None:
    made = world.current()
    assert type(made).__name__ == "FakeWorld"
    T.close()
    assert world.current() is not made
    found = T.ones(4, device_mesh=mesh, placements=[T.Shard(0)]).full_tensor()
    assert found.shape == (4,)


def test_layouts_on_gpus_are_explained_with_the_collectives_of_nccl(mesh: T.DeviceMesh) -> None:
    meta = T.TensorMeta.contiguous((SIZE * 512, 1024))
    found = {}
    for device_type in ("cuda", "cpu"):
        terms = T.DTensorSpec(T.Mesh((SIZE,), device_type=device_type), [T.Partial("sum")], meta)
        found[device_type] = T.explain(terms, terms.with_placements([T.Replicate()]))
    assert [step.kind for step in found["cuda"].steps] == ["all_reduce"]
    assert [step.kind for step in found["cpu"].steps] == ["reduce", "gather"]
    assert found["cuda"].received_bytes == found["cpu"].received_bytes
    assert str(found["cuda"]).splitlines()[-1].startswith("all_reduce of NCCL: ")
    assert found["cpu"].reason is None
