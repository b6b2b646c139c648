"""The backend "tritondt" over NCCL: collectives as on Gloo, training as on torch's own NCCL, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.nccl.conftest import Setting
from tests.nccl.devices import device_of
from tests.process_group import training
from tests.process_group.collectives import CASES

KINDS = ("ddp", "ddp_with_a_hook", "fsdp", "tensor_parallel", "redistributions")

_groups: dict[str, Any] = {}


def group_of(backend: str) -> Any:
    """One to compare with, made by all ranks on first use."""
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]


def results(run: Callable[[], list[torch.Tensor]], kind: str) -> list[torch.Tensor]:
    """What `run` gives with tensors on such a device, on the host."""
    with torch.device(kind):
        return [tensor.cpu() for tensor in run()]


def run_case(rank: int, where: str, name: str) -> None:
    size = dist.get_world_size()
    expected = results(lambda: CASES[name](group_of("gloo"), rank, size), "cpu")
    found = results(lambda: CASES[name](dist.group.WORLD, rank, size), device_of(where).kind)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_as_on_gloo(setting: Setting, name: str) -> None:
    if setting.ranks.size == 1 and name.startswith("messages"):
        pytest.skip("a message needs two ranks")
    setting.ranks.run(run_case, setting.where, name)


def train(rank: int, where: str, kind: str) -> None:
    """With at most 2 ranks, sums are of two terms, which no order changes."""
    run, device = getattr(training, kind), device_of(where).kind
    other = group_of("nccl" if where == "gpu" else "gloo")
    expected = results(lambda: run(other, rank), device)
    found = results(lambda: run(dist.group.WORLD, rank), device)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_torchs_own(setting: Setting, kind: str) -> None:
    setting.ranks.run(train, setting.where, kind, timeout_s=250)


def record_and_replay(rank: int, where: str) -> None:
    device, size = device_of(where), dist.get_world_size()
    given, whole, part = (torch.zeros(length, device=device.kind) for length in (4 * size, 4 * size * size, 4))

    def run() -> None:
        gathered = dist.all_gather_into_tensor(whole, given, async_op=True)
        dist.reduce_scatter_tensor(part, given)
        assert gathered is not None
        gathered.wait()

    replay = device.recorded(run)
    for number in range(3):
        given.copy_(torch.arange(4 * size) + 100 * number + rank)
        replay()
        own = torch.arange(4.0 * size) + 100 * number
        torch.testing.assert_close(whole.cpu(), torch.cat([own + place for place in range(size)]), rtol=0, atol=0)
        summed = sum(own + place for place in range(size))
        assert isinstance(summed, torch.Tensor)
        torch.testing.assert_close(part.cpu(), summed[4 * rank :][:4], rtol=0, atol=0)


def test_what_was_recorded_is_replayed_exactly(setting: Setting) -> None:
    setting.ranks.run(record_and_replay, setting.where)
