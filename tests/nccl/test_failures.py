"""What does not end in time is aborted, and the ranks go on in a new world: on a GPU, and over the double."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.nccl.conftest import SETTINGS, Setting, SettingOf
from tests.nccl.devices import device_of

TIMEOUT_S = 1.0


def hold_up_a_collective(rank: int, where: str) -> str:
    """Something before it in the stream takes longer than it may."""
    device = device_of(where)
    group: Any = dist.new_group()
    tensor = torch.ones(3, device=device.kind)
    dist.all_reduce(tensor, group=group)  # connects ranks, which may come apart by more than a short timeout
    group.set_timeout(timedelta(seconds=TIMEOUT_S))
    stream = group._router._nccl_groups[device.kind]._stream.engine.stream
    device.hold_up(stream, 4 * TIMEOUT_S)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    with pytest.raises(T.PeerError) as told:
        work.wait(timedelta(seconds=20))
    stream.synchronize()
    tensor = torch.ones(3, device=device.kind)
    dist.all_reduce(tensor)  # on another communicator
    assert tensor.tolist() == [float(dist.get_world_size())] * 3
    return str(told.value)


def test_a_collective_that_takes_too_long_is_aborted(setting: Setting) -> None:
    for told in setting.ranks.run(hold_up_a_collective, setting.where):
        assert "in all_reduce (sum) of 3 float32, asked for at" in told
        assert "test_failures.py" in told


def one_does_not_come(rank: int, where: str) -> tuple[str, list[float]]:
    device = device_of(where)
    mesh = T.Mesh((2,), device_type=device.kind)
    whole = torch.arange(35.0, device=device.kind).reshape(5, 7)
    x: Any = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    T.set_timeout(mesh, TIMEOUT_S)
    told = ""
    if rank == 0:
        moved = x.redistribute(placements=[T.Replicate()], async_op=True)
        deadline = time.monotonic() + 20
        while not moved.work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(T.PeerError) as error:
            moved.to_local()
        told = str(error.value)
    dist.barrier()
    T.abort()
    found = x.redistribute(placements=[T.Replicate()]).to_local()
    return told, found.flatten().tolist()


@pytest.mark.parametrize(("where", "size"), [SETTINGS[1], SETTINGS[3]])
def test_a_rank_that_does_not_come(setting_of: SettingOf, where: str, size: int) -> None:
    outcomes = setting_of(where, size).ranks.run(one_does_not_come, where)
    assert "for rank 1 in step 1 of 1 (exchange (S0) -> (R)) of (5, 7) float32" in outcomes[0][0]
    assert [found for _, found in outcomes] == [list(map(float, range(35)))] * 2
