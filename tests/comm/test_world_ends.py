"""Worlds of one process, one after the other: none leaves threads, descriptors, meshes or specs behind."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tritondt as T
from tests.harness.descriptors import kept_targets
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.ports import free_port
from tritondt import sharded
from tritondt.dtensor.local_map import local_map
from tritondt.fsdp import fully_shard
from tritondt.interop.checkpoint_folder import CheckpointFolder
from tritondt.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from tritondt.parallel.context.ring_attention import ring_attention
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.spec import DTensorSpec

NUM_RANKS = 2


class Taken(NamedTuple):
    """Threads and descriptors of a process."""

    threads: int
    descriptors: int


class Alive(NamedTuple):
    """Objects of worlds that are alive in a process."""

    groups: int
    meshes: int
    specs: int


def least(count: Callable[[], int]) -> int:
    """The least of several looks: what other ranks or threads are about to close does not count."""
    looks = [count()]
    for _ in range(4):
        time.sleep(0.02)
        looks.append(count())
    return min(looks)


def taken() -> Taken:
    return Taken(
        least(lambda: sum(1 for _ in Path("/proc/self/task").iterdir())),
        least(lambda: len(kept_targets())),
    )


def alive() -> Alive:
    gc.collect()
    found = gc.get_objects()
    kinds = [type(it) for it in found]
    return Alive(
        sum(issubclass(kind, dist.ProcessGroup) for kind in kinds),
        kinds.count(Mesh),
        kinds.count(DTensorSpec),
    )


def operators(mesh: Any, folder: str) -> None:
    x: Any = T.distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [T.Shard(0)]).requires_grad_()
    loss = nn.functional.gelu(x @ x.t()).sum() + x.redistribute(placements=[T.Shard(1)], async_op=True).norm()
    loss.full_tensor().backward()
    T.explain(x, [T.Replicate()])
    T.redistribute_many([(x.detach(), [T.Replicate()]), (x.detach(), [T.Shard(1)])])
    alone = T.Mesh((1,), ranks=(0,))
    x.detach().redistribute(alone, [T.Replicate()])
    y: Any = T.DTensor.from_local(torch.ones(2, 2), mesh, [T.Shard(0)], run_check=True)
    y.to_torch()
    local_map(lambda part: part + 1, out_placements=[T.Shard(0)], in_placements=([T.Shard(0)],), device_mesh=mesh)(x)
    T.randn(4, 4, device_mesh=mesh, placements=[T.Shard(0)]).sort(0)


def tensor_parallel(mesh: Any, folder: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model(torch.ones(2, 4)).sum().backward()
    T.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()
    with loss_parallel():
        logits = T.distribute_tensor(torch.ones(2, 4), mesh, [T.Shard(1)]).requires_grad_()
        nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()


def fully_sharded(mesh: Any, folder: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    folders = CheckpointFolder(folder, keep=1)
    folders.save({"model": model.state_dict()}, 1)
    folders.load({"model": model.state_dict()})


def context_parallel(mesh: Any, folder: str) -> None:
    part = torch.ones(1, 2, 3, 4, requires_grad=True)
    ring_attention(part, part, part, mesh, length=3 * NUM_RANKS).sum().backward()


def in_shards(mesh: Any, folder: str) -> None:
    spec = sharded.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(NUM_RANKS)])
    x = sharded.ones(spec, 4, 2)
    x.gather(0, torch.empty(4, 2) if dist.get_rank() == 0 else None)


def collectives(mesh: Any, folder: str) -> None:
    group = dist.new_group(backend="tritondt")
    dist.all_reduce(torch.ones(8), group=group)
    dist.all_gather_object([None] * NUM_RANKS, dist.get_rank(), group=group)
    dist.destroy_process_group(group)


Entry = Callable[[Any, str], None]
ENTRIES: list[Entry] = [operators, tensor_parallel, context_parallel, in_shards, collectives]


def world_of(rank: int, port: int, number: int, folder: str, entries: list[Entry]) -> None:
    """A world of either backend, ended by `close` or by the next one."""
    backend = ("gloo", "tritondt")[number % 2]
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    mesh = T.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    for enter in entries:
        enter(mesh, folder)
    if number % 3 != 2:
        T.close()


def make_worlds(rank: int, ports: list[int], folder: str) -> tuple[list[Taken], list[tuple[Taken, Alive]]]:
    """Everything taken after each of half the worlds, without the garbage collector, and of the others with it.

    Sharded modules are in the latter: modules, their hooks and their parameters' meshes are garbage in cycles.
    """
    T.close()
    half = len(ports) // 2
    gc.collect()
    gc.disable()
    uncollected = []
    for number, port in enumerate(ports[:half]):
        world_of(rank, port, number, folder, ENTRIES)
        uncollected.append(taken())
    gc.enable()
    collected = []
    for number, port in enumerate(ports[half:]):
        world_of(rank, port, number, folder, [*ENTRIES, fully_sharded])
        found = alive()
        collected.append((taken(), found))
    return uncollected, collected


def most(found: list[Any]) -> list[int]:
    return list(map(max, zip(*found, strict=True)))


@pytest.mark.extended
def test_worlds_leave_nothing_with_or_without_the_garbage_collector(tmp_path: Path) -> None:
    with GlooRanks(NUM_RANKS, {"TRITONDT_TRANSPORT": "shared-memory"}) as ranks:
        for of_rank in ranks.run(make_worlds, [free_port() for _ in range(24)], str(tmp_path), timeout_s=280):
            uncollected, collected = of_rank
            # Six worlds are of all kinds; the first ones load what stays. A leak of one kind alone is two at the end.
            for each in (uncollected, [resources for resources, _ in collected]):
                first, last = most(each[:6]), most(each[-6:])
                assert all(after <= before + 1 for before, after in zip(first, last, strict=True)), of_rank
            objects = [found for _, found in collected]
            assert all(after <= before for before, after in zip(most(objects[:6]), most(objects[-6:]), strict=True)), (
                of_rank
            )
