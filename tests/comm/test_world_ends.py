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


class Held(NamedTuple):
    """Descriptors and threads of a process, and objects of worlds that are alive in it."""

    threads: int
    descriptors: int
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


def held() -> Held:
    gc.collect()
    found = gc.get_objects()
    kinds = [type(it) for it in found]
    return Held(
        least(lambda: sum(1 for _ in Path("/proc/self/task").iterdir())),
        least(lambda: len(kept_targets())),
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


ENTRIES: list[Callable[[Any, str], None]] = [
    operators,
    tensor_parallel,
    fully_sharded,
    context_parallel,
    in_shards,
    collectives,
]


def world_of(rank: int, port: int, backend: str, folder: str, *, is_closed: bool) -> None:
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    mesh = T.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
    for enter in ENTRIES:
        enter(mesh, folder)
    if is_closed:
        T.close()


def make_worlds(rank: int, ports: list[int], folder: str) -> list[Held]:
    """Everything held after each world: of either backend, ended by `close` or by the next one."""
    T.close()
    found = []
    for number, port in enumerate(ports):
        backend = ("gloo", "tritondt")[number % 2]
        world_of(rank, port, backend, folder, is_closed=number % 3 != 2)
        found.append(held())
    return found


@pytest.mark.extended
def test_twenty_worlds_leave_nothing(tmp_path: Path) -> None:
    with GlooRanks(NUM_RANKS, {"TRITONDT_TRANSPORT": "shared-memory"}) as ranks:
        for of_rank in ranks.run(make_worlds, [free_port() for _ in range(20)], str(tmp_path), timeout_s=280):
            # Six worlds are of all kinds; the first ones load what stays. A leak of one kind alone is two at the end.
            first, last = (Held(*map(max, zip(*some, strict=True))) for some in (of_rank[:8], of_rank[-6:]))
            allowed = first._replace(threads=first.threads + 1, descriptors=first.descriptors + 1)
            assert all(after <= most for most, after in zip(allowed, last, strict=True)), of_rank
