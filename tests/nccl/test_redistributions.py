"""The engine over NCCL: random redistributions, and one that is recorded once and replayed; exact."""

import threading
import time
from typing import Any

import pytest
import torch

import tritondt as T
from tests.comm.transports.test_gloo_cases import CASES_PER_TEST, check_on
from tests.nccl.conftest import GPUS, SETTINGS, Setting, SettingOf
from tests.nccl.devices import device_of

FIRST_SEEDS = range(500_000, 500_000 + 5 * CASES_PER_TEST, CASES_PER_TEST)


@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
@pytest.mark.parametrize(("where", "size"), GPUS)
@pytest.mark.timeout(400)  # Triton compiles what it has not seen
def test_random_cases(setting_of: SettingOf, where: str, size: int, first_seed: int) -> None:
    """300 for each number of ranks; comm/transports/test_nccl_cases.py has those over the double on 2, 4 and 8."""
    check_on(setting_of(where, size).ranks, first_seed, "cuda", timeout_s=380)


def test_random_cases_of_one_rank_over_the_double(setting_of: SettingOf) -> None:
    check_on(setting_of("host", 1).ranks, FIRST_SEEDS[0])


PAIRS = (("S0", "S1"), ("S1", "S0"), ("S0", "R"), ("P", "S1"), ("P", "R"), ("R", "S0"))


def share(whole: torch.Tensor, text: str, rank: int, size: int) -> torch.Tensor:
    """What a rank holds of a tensor; as a term of a sum, all of it at rank 0 and zeros elsewhere."""
    if text == "R":
        return whole
    if text == "P":
        return whole if rank == 0 else torch.zeros_like(whole)
    parts = whole.chunk(size, int(text[1]))
    return parts[rank]


def record_and_replay(rank: int, where: str, size: int, source: str, target: str, is_async: bool) -> None:
    device = device_of(where)
    mesh = T.Mesh((size,), device_type=device.kind)
    wholes = [torch.randint(-9, 9, (7, 5), generator=torch.Generator().manual_seed(seed)).float() for seed in range(4)]
    local = share(wholes[0], source, rank, size).to(device.kind).contiguous()
    found = torch.empty_like(share(wholes[0], target, rank, size), device=device.kind)
    x: Any = T.DTensor.from_local(local, mesh, T.parse_placements(source), shape=(7, 5), stride=(5, 1))

    def run() -> None:
        moved = x.redistribute(placements=T.parse_placements(target), async_op=is_async)
        found.copy_(moved.to_local())

    with torch.no_grad():
        replay = device.recorded(run)
        for whole in wholes:
            local.copy_(share(whole, source, rank, size))
            found.fill_(-1)
            replay()
            assert torch.equal(found.cpu(), share(whole, target, rank, size))


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_was_recorded_is_replayed_exactly(setting: Setting, source: str, target: str, is_async: bool) -> None:
    setting.ranks.run(record_and_replay, setting.where, setting.ranks.size, source, target, is_async)


def move_to_one_rank(rank: int, where: str, size: int, receiver: int) -> None:
    """To a mesh of one rank, as the whole tensors of a state dict go: twice, since programs run from the second on."""
    kind = device_of(where).kind
    mesh, alone = T.Mesh((size,), device_type=kind), T.Mesh((1,), ranks=(receiver,), device_type=kind)
    whole = torch.randint(-9, 9, (7, 5), generator=torch.Generator().manual_seed(3)).float()
    for text in ("S0", "S1", "P", "R"):
        local = share(whole, text, rank, size).to(kind).contiguous()
        x = T.DTensor.from_local(local, mesh, T.parse_placements(text), shape=(7, 5), stride=(5, 1))
        for _ in range(2):
            found = x.redistribute(alone, [T.Replicate()]).to_local().cpu()
            assert torch.equal(found, whole) if rank == receiver else not found.numel()


@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
def test_one_rank_of_a_mesh_gets_all_of_it(setting: Setting, is_last: bool) -> None:
    size = setting.ranks.size
    setting.ranks.run(move_to_one_rank, setting.where, size, size - 1 if is_last else 0)


def record_for_long(rank: int, where: str) -> list[str]:
    """The watch looks once a second at what was put before, and must not touch what is recorded."""
    device = device_of(where)
    mesh = T.Mesh((2,), device_type=device.kind)
    whole = torch.arange(35.0).reshape(5, 7)
    x: Any = T.distribute_tensor(whole.to(device.kind), mesh, [T.Shard(0)])
    found = torch.empty(5, 7, device=device.kind)
    seconds = iter([0.0, 2.5])

    def run() -> None:
        time.sleep(next(seconds, 0.0))
        found.copy_(x.redistribute(placements=[T.Replicate()]).to_local())

    replay = device.recorded(run)
    found.zero_()
    replay()
    assert torch.equal(found.cpu(), whole)
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(("where", "size"), [SETTINGS[1], SETTINGS[3]])
def test_the_watch_goes_on_while_something_is_recorded(setting_of: SettingOf, where: str, size: int) -> None:
    for threads in setting_of(where, size).ranks.run(record_for_long, where):
        assert "tritondt-watch" in threads


@pytest.mark.parametrize(("where", "size"), SETTINGS)
def test_the_transport_is_nccl(setting_of: SettingOf, where: str, size: int) -> None:
    found = setting_of(where, size).ranks.run(name_of_transport, where, size)
    assert found == ["NcclCommunicator"] * size


def name_of_transport(rank: int, where: str, size: int) -> str:
    return type(T.comm.world.current().communicator(tuple(range(size)), device_of(where).kind)).__name__
