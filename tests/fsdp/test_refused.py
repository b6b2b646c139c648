"""What `fully_shard` refuses, on all ranks alike and before anything moves."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import tritondt as T
from tests.fsdp.models import DataAxes
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import FullyShardError, MeshError, ParallelizeError
from tritondt.fsdp import fully_shard, register_fsdp_forward_method
from tritondt.parallel import ColwiseParallel, parallelize_module


def refused(call: Any) -> list[str]:
    def body(rank: int) -> str:
        with pytest.raises((FullyShardError, MeshError, ParallelizeError)) as found:
            call(rank)
        return str(found.value)

    texts = run_ranks(4, body)
    assert len(set(texts)) == 1, texts
    return texts


def test_bad_input_is_refused_by_all_ranks_alike() -> None:
    def twice(rank: int) -> None:
        fully_shard(fully_shard(nn.Linear(2, 2), mesh=T.Mesh((4,))), mesh=T.Mesh((4,)))

    def tied(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        fully_shard(model[0], mesh=T.Mesh((4,)))
        fully_shard(model, mesh=T.Mesh((4,)))

    def too_late(rank: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=T.Mesh((4,)))
        parallelize_module(model, T.Mesh((4,)), {"0": ColwiseParallel()})

    def wrong_axis(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        parallelize_module(model, T.Mesh((4,)), {"0": ColwiseParallel()})
        fully_shard(model, mesh=T.Mesh((4,)), dp_mesh_dims=DataAxes("dp"))

    def same_axis(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        mesh = T.Mesh((4,), ("dp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh)

    def unknown_axis(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        parallelize_module(model, T.Mesh((2,), ranks=(rank // 2 * 2, rank // 2 * 2 + 1)), {"0": ColwiseParallel()})
        with pytest.raises(MeshError) as found:
            fully_shard(model, mesh=T.Mesh((2,), ("dp",), ranks=(rank % 2, rank % 2 + 2)))
        assert f"ranks {rank % 2}, {rank % 2 + 2}" in str(found.value)
        raise MeshError(str(found.value).partition("; ")[2])

    def converted(rank: int) -> None:
        model: Any = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=T.Mesh((4,)))
        model[0].to(torch.bfloat16)
        model(torch.ones(1, 2))

    cases: list[tuple[Any, str]] = [
        (converted, "convert the module that fully_shard was given, and"),
        (
            lambda rank: register_fsdp_forward_method(fully_shard(nn.Linear(2, 2), mesh=T.Mesh((4,))), "sample"),
            "FSDPLinear has no method of this name",
        ),
        (twice, "this FSDPLinear was sharded by fully_shard already"),
        (tied, "shared with a module that was sharded before, as weight"),
        (too_late, r"parallelize_module(model, mesh['tp'], plan), then fully_shard(model, mesh=mesh['dp'])"),
        (wrong_axis, "has no axis 'dp'"),
        (same_axis, "and the two share ranks; allowed is another axis"),
        (unknown_axis, "allowed is a slice of a DeviceMesh that has both"),
        (
            lambda rank: fully_shard(nn.Linear(2, 2), mesh=T.Mesh((2, 2), ("a", "b")), dp_mesh_dims=DataAxes("a", "a")),
            "allowed are one or more axes that shard, and others that replicate",
        ),
        (lambda rank: fully_shard(nn.ReLU(), mesh=T.Mesh((4,))), "without parameters to shard"),
        (lambda rank: fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=T.Mesh((4,))), "which has no forward"),
        (lambda rank: fully_shard(nn.Linear(2, 2), mesh=T.Mesh((1, 2, 2))), "takes a mesh of one axis"),
        (
            lambda rank: fully_shard(nn.Linear(2, 2), mesh=T.Mesh((4,)), offload_policy=CPUOffloadPolicy()),
            "shards stay on the device of the mesh",
        ),
        (
            lambda rank: fully_shard(nn.Linear(2, 2), mesh=T.Mesh((4,)), reshard_after_forward=3),
            "allowed are True, False, None, and a divisor of 4",
        ),
        (
            lambda rank: fully_shard(nn.Linear(2, 2), mesh=T.Mesh((4,)), shard_placement_fn=lambda _: T.Replicate()),
            "allowed are None and tritondt's Shard(dim)",
        ),
    ]
    for call, text in cases:
        assert text in refused(call)[0], refused(call)[0]


@pytest.mark.parametrize("dims", [DataAxes("c", "a"), DataAxes(("b", "c"), "a")], ids=["one axis", "two axes"])
def test_a_shard_that_one_rank_has_freed_is_heard_of_by_all_that_gather_it(dims: DataAxes) -> None:
    shape = (2, 2, 2) if len(dims.shard) == 2 else (2, 1, 2)
    num_ranks = torch.Size(shape).numel()

    def body(rank: int) -> str:
        layer: Any = nn.Linear(3, 5)
        fully_shard(layer, mesh=T.Mesh(shape, ("a", "b", "c")), dp_mesh_dims=dims)
        if rank == 1:
            layer.weight.to_local().untyped_storage().resize_(0)
        try:
            layer(torch.ones(1, 3))
        except T.TritondtError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    found = run_ranks(num_ranks, body)
    assert found[1].startswith("LocalTensorError: a gather of fully_shard got a tensor of ")
    for rank, text in enumerate(found):
        is_replica = rank >= num_ranks // 2  # which needs nothing of rank 1, and may have ended before it hears
        if rank != 1 and not (is_replica and text == "no error"):
            assert text.startswith(f"RefusalError: rank 1 failed while rank {rank} waited for"), text
