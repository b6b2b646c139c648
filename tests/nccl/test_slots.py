"""The engine with messages packed into peers' GPU memory (TRITONDT_SLOTS=1): exact, at once, later and replayed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tritondt as T
from tests.comm.transports.test_gloo_cases import CASES_PER_TEST, check_on
from tests.harness.gloo_ranks import GlooRanks
from tests.nccl.conftest import SETTINGS, SettingOf
from tests.nccl.devices import device_of
from tests.nccl.test_redistributions import PAIRS, record_and_replay
from tritondt.comm import world
from tritondt.comm.packing.placed_transfer import PlacedTransfer

TWO = [SETTINGS[1], SETTINGS[3]]
FIRST_SEEDS = range(510_000, 510_000 + 3 * CASES_PER_TEST, CASES_PER_TEST)

RanksOf = Callable[[str, int], GlooRanks]


@pytest.fixture(scope="module")
def ranks_of(setting_of: SettingOf) -> Iterator[RanksOf]:
    """Ranks that pack into each other's memory, started once for each place."""
    pytest.importorskip("triton", reason="cuda.h, which the double of CUDA's driver is compiled against, is Triton's")
    started: dict[str, GlooRanks] = {}

    def find(where: str, size: int) -> GlooRanks:
        if where not in started:
            started[where] = setting_of(where, size).alike(TRITONDT_SLOTS="1", TRITONDT_TIMEOUT="60")
        return started[where]

    yield find
    for ranks in started.values():
        ranks.close()


def communicator_of(mesh: T.Mesh) -> Any:
    return world.current().communicator(mesh.ranks, mesh.device_type)


def count_exchanges(rank: int, where: str, size: int) -> tuple[int, int]:
    """How many of six exchanges went through slots, and how many messages of theirs were left to NCCL."""
    device = device_of(where)
    mesh = T.Mesh((size,), device_type=device.kind)
    whole = torch.arange(35.0).reshape(5, 7).to(device.kind)
    rows: Any = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    communicator = communicator_of(mesh)
    plans: list[Any] = []
    original = communicator._run_plan

    def noted(plan: Any, *arguments: Any) -> None:
        plans.append(plan)
        original(plan, *arguments)

    communicator._run_plan = noted
    for _ in range(3):
        columns = rows.redistribute(placements=[T.Shard(1)])
        rows = columns.redistribute(placements=[T.Shard(0)])
    del communicator._run_plan
    assert torch.equal(rows.to_local().cpu(), whole.cpu().chunk(size)[rank])
    placed = [plan for plan in plans if isinstance(plan, PlacedTransfer)]
    return len(placed), sum(len(plan.far_sends) for plan in placed)


@pytest.mark.parametrize(("where", "size"), TWO)
def test_messages_go_through_slots(ranks_of: RanksOf, where: str, size: int) -> None:
    assert ranks_of(where, size).run(count_exchanges, where, size) == [(6, 0)] * size


@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
@pytest.mark.parametrize(("where", "size"), [SETTINGS[3]])
@pytest.mark.timeout(400)  # Triton compiles what it has not seen
def test_random_cases(ranks_of: RanksOf, where: str, size: int, first_seed: int) -> None:
    """comm/nccl/test_device_arenas.py has those over the doubles."""
    check_on(ranks_of(where, size), first_seed, "cuda", timeout_s=380)


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize(("where", "size"), TWO)
def test_what_was_recorded_is_replayed_exactly(
    ranks_of: RanksOf, where: str, size: int, source: str, target: str, is_async: bool
) -> None:
    ranks_of(where, size).run(record_and_replay, where, size, source, target, is_async)


def replay_between_others(rank: int, where: str, size: int) -> None:
    """One rank replays where the others call: the counts are the device's, whoever put the exchange there."""
    device = device_of(where)
    mesh = T.Mesh((size,), device_type=device.kind)
    local = torch.zeros(1, 8, device=device.kind)
    found = torch.zeros(size, 8, device=device.kind)
    x: Any = T.DTensor.from_local(local, mesh, [T.Shard(0)])

    def run() -> None:
        found.copy_(x.redistribute(placements=[T.Replicate()]).to_local())

    with torch.no_grad():
        replay = device.recorded(run)
        for turn in range(6):
            local.fill_(10.0 * turn + rank)
            found.fill_(-1)
            (replay if (turn + rank) % 2 else run)()
            expected = torch.tensor([10.0 * turn + each for each in range(size)])[:, None].expand(size, 8)
            assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(("where", "size"), TWO)
def test_one_rank_replays_what_another_one_calls(ranks_of: RanksOf, where: str, size: int) -> None:
    ranks_of(where, size).run(replay_between_others, where, size)


def overlap(rank: int, where: str, size: int, count: int) -> None:
    """Sums, and rows to columns, under way together."""
    device = device_of(where)
    mesh = T.Mesh((size,), device_type=device.kind)
    term = torch.zeros(16, 16, device=device.kind)
    whole = torch.arange(256.0).reshape(16, 16).to(device.kind)
    sums: Any = T.DTensor.from_local(term, mesh, [T.Partial()])
    rows: Any = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    for turn in range(count):
        term.fill_(float(turn + rank))  # what has read it has been waited for
        total = sums.redistribute(placements=[T.Replicate()], async_op=True)
        columns = rows.redistribute(placements=[T.Shard(1)], async_op=True)
        assert torch.equal(total.to_local().cpu(), torch.full((16, 16), float(size * turn + sum(range(size)))))
        assert torch.equal(columns.to_local().cpu(), whole.cpu().chunk(size, 1)[rank])


@pytest.mark.parametrize(("where", "size"), TWO)
def test_exchanges_under_way_together(ranks_of: RanksOf, where: str, size: int) -> None:
    ranks_of(where, size).run(overlap, where, size, 30)
