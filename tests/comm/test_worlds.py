"""Worlds of processes: torch's meshes, flattened ones, forks, and one world after another."""

import copy
import gc
import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.ports import free_port
from tritondt.comm import world
from tritondt.sharding.mesh import canonical_mesh


def gather_after_flatten(rank: int) -> list[list[int]]:
    """The whole of arange(5) + 1 on every rank, before and after torch's mesh was flattened."""
    mesh = T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meta = T.TensorMeta.contiguous((5,), torch.int64)
    source = T.DTensorSpec(mesh, (T.Shard(0), T.Shard(0)), meta)
    target = T.DTensorSpec(mesh, (T.Replicate(), T.Replicate()), meta)
    local = torch.tensor([[1, 2], [3], [4], [5]][rank])
    found = [T.redistribute(local, source, target).tolist()]
    mesh._flatten()
    found.append(T.redistribute(local, source, target).tolist())
    assert T.DTensorSpec(mesh, (T.Shard(0), T.Shard(0)), meta) is source
    return found


def test_a_flattened_mesh_gathers_what_was_cut(four_ranks: GlooRanks) -> None:
    """torch 2.13 gathers [1, 2, 3, 0, 4] here: it cuts in 2, 1, 1, 1 and puts together as if in 2, 2, 1, 0."""
    assert four_ranks.run(gather_after_flatten) == [[[1, 2, 3, 4, 5]] * 2] * 4


def look_at_meshes(rank: int) -> None:
    meta = T.TensorMeta.contiguous((6, 4))
    theirs = T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = T.Mesh((2, 2), ("dp", "tp"))
    assert canonical_mesh(theirs) is ours
    spec = T.DTensorSpec(theirs, (T.Shard(0), T.Replicate()), meta)
    assert spec is T.DTensorSpec(ours, (T.Shard(0), T.Replicate()), meta)
    assert spec is T.DTensorSpec(T.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), spec.placements, meta)
    assert spec is not T.DTensorSpec(T.init_device_mesh("cpu", (2, 2)), spec.placements, meta)
    assert spec.coordinate == (rank // 2, rank % 2)
    assert spec.mesh.device_mesh is not None
    for copied in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert copied is spec
    column = T.DTensorSpec(theirs["tp"], (T.Shard(1),), meta)
    assert column.mesh.ranks == (rank // 2 * 2, rank // 2 * 2 + 1)


def test_torchs_meshes_and_ours_are_one(four_ranks: GlooRanks) -> None:
    four_ranks.run(look_at_meshes)


def intern_in_a_fork(rank: int) -> int:
    """The exit status of a forked child that makes the same spec again."""
    meta = T.TensorMeta.contiguous((6, 4))
    spec = T.DTensorSpec(T.Mesh((2, 2)), (T.Shard(0), T.Replicate()), meta)
    pid = os.fork()
    if pid == 0:
        again = T.DTensorSpec(T.Mesh((2, 2)), (T.Shard(0), T.Replicate()), meta)
        same = again is spec and pickle.loads(pickle.dumps(spec)) is spec
        other = T.DTensorSpec(T.Mesh((2, 2)), (T.Shard(1), T.Replicate()), meta)
        os._exit(0 if same and other is spec.with_placements(other.placements) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_finds_the_same_specs(four_ranks: GlooRanks) -> None:
    assert four_ranks.run(intern_in_a_fork) == [0, 0, 0, 0]


def subsets_in_any_order(rank: int) -> list[int]:
    """Communicators are made by their members alone, whoever asks first for what."""
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    sums = []
    for pair in pairs:
        if rank in pair:
            meta = T.TensorMeta.contiguous((2,), torch.int64)
            source, target = (T.DTensorSpec(T.Mesh((2,), ranks=pair), T.parse_placements(text), meta) for text in "PR")
            sums.append(int(T.redistribute(torch.full((2,), 10**rank), source, target)[0]))
    group = dist.new_group([0, 1, 2, 3])  # c10d's own counters are where they were
    dist.barrier(group)
    return sums


def test_communicators_of_some_ranks_need_no_others(four_ranks: GlooRanks) -> None:
    assert four_ranks.run(subsets_in_any_order) == [
        [11, 101, 1001], [11, 110, 1010], [101, 110, 1100], [1001, 1010, 1100],
    ]  # fmt: skip


def send_beside(rank: int) -> tuple[list[float], list[list[float]]]:
    """The user's own messages round the ring are under way while tensors are redistributed."""
    size = dist.get_world_size()
    arriving = torch.zeros(3)
    receive = dist.irecv(arriving, (rank - 1) % size)
    meta = T.TensorMeta.contiguous((8,))
    source, target = (T.DTensorSpec(T.Mesh((size,)), T.parse_placements(text), meta) for text in ("S0", "R"))
    moved = [T.redistribute(torch.full((2,), float(rank)), source, target).tolist() for _ in range(20)]
    dist.send(torch.full((3,), float(rank)), (rank + 1) % size)
    assert receive is not None
    receive.wait()
    return arriving.tolist(), moved


def test_the_users_own_messages_are_left_alone(four_ranks: GlooRanks) -> None:
    for rank, (arrived, moved) in enumerate(four_ranks.run(send_beside)):
        assert arrived == [(rank - 1) % 4] * 3
        assert moved == [[0, 0, 1, 1, 2, 2, 3, 3]] * 20


def live_twice(rank: int, port: int) -> dict[str, object]:
    """Two worlds one after the other in one process, the second with the ranks in reverse."""
    meta = T.TensorMeta.contiguous((5,), torch.int64)

    def gathered() -> list[int]:
        mesh = T.init_device_mesh("cpu", (2,))
        source, target = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "R"))
        specs.append(source)
        local = torch.arange(source.local_shape[0]) + 3 * dist.get_rank()
        for late in (-1, 0, 1):  # connected first, then either rank waits once, and its watch starts
            time.sleep(0.3 * (late == dist.get_rank()))
            whole = T.redistribute(local, source, target)
        return whole.tolist()

    specs: list[T.DTensorSpec] = []
    found = [gathered()]
    kept = world.current()
    world.close()
    with pytest.raises(T.WorldError, match=r"this world is closed; tritondt\.comm\.world\.current"):
        kept.communicator((0, 1))
    dist.destroy_process_group()
    with pytest.raises(T.WorldError, match=r"torch\.distributed is not initialised"):
        T.Mesh((1,))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1 - rank, world_size=2)
    found.append(gathered())
    with pytest.raises(T.MeshError, match="was made in another world"):
        T.DTensorSpec(specs[0].mesh, (T.Shard(0),), meta)
    return {
        "gathered": found,
        "coordinates": [spec.coordinate for spec in specs],
        "watches": sum(thread.name == "tritondt-watch" for thread in threading.enumerate()),
    }


def carried_over(rank: int, port: int) -> tuple[bool, list[float]]:
    """A tensor of a world that has ended, taken to the next one by the mesh of torch that both have."""
    mesh = T.init_device_mesh("cpu", (2,))
    x = T.ones(4, device_mesh=mesh, placements=[T.Shard(0)])
    world.close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    new = T.ones(4, device_mesh=mesh, placements=[T.Replicate()])
    whole = x.redistribute(mesh, [T.Replicate()])
    both: Any = whole + new
    return whole._spec.mesh is new._spec.mesh, both.to_local().tolist()


def test_a_second_world_is_another() -> None:
    port = free_port()
    with GlooRanks(2) as ranks:
        first, second = ranks.run(live_twice, port)
        assert ranks.run(carried_over, free_port()) == [(True, [2.0] * 4)] * 2
    assert first["gathered"] == second["gathered"] == [[0, 1, 2, 3, 4]] * 2
    assert first["coordinates"] == [(0,), (1,)]
    assert second["coordinates"] == [(1,), (0,)]
    assert first["watches"] == second["watches"] == 1


def close_behind_the_store(rank: int, port: int, port_after: int, folder: Path) -> None:
    """Closes a world in which ranks 1 and 2 meet after rank 0, which has no part in that, has left with the store."""
    T.close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    x = T.distribute_tensor(torch.arange(6.0), T.Mesh((3,)), [T.Shard(0)])
    assert x.full_tensor().tolist() == torch.arange(6.0).tolist()
    others = T.Mesh((2,), ranks=(1, 2))
    if rank > 0:
        terms = T.DTensor.from_local(torch.ones(3), others, [T.Partial()])
        assert terms.full_tensor().tolist() == [2.0] * 3
    if rank == 2:
        world.current().communicator((0, 1, 2)).close()  # which rank 0 closes; and rank 1 waits in the other one
        while not (folder / "left").exists():
            time.sleep(0.05)
        time.sleep(2.5)  # the watch of rank 1 looks once a second
    T.close()
    dist.destroy_process_group()
    if rank == 0:
        gc.collect()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        (folder / "left").touch()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port_after}", rank=rank, world_size=3)


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["sockets", "gloo", pytest.param("shared-memory", marks=pytest.mark.soak)])
def test_ranks_that_close_their_world_need_no_store(tmp_path: Path, transport: str) -> None:
    with GlooRanks(3, {"TRITONDT_TRANSPORT": transport}) as ranks:
        ranks.run(close_behind_the_store, free_port(), free_port(), tmp_path)
