"""Exchanges through slots of other ranks' memory, all ranks in one process; exact."""

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from tests.harness.slots_of_ranks import SlotsOfRanks
from tritondt.planning.slots import NUM_SLOTS

PAIRS = (("S0", "S1"), ("S1", "S0"), ("S0", "R"), ("S1", "R"), ("P", "S0"), ("P", "R"))


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> SlotsOfRanks:
    return SlotsOfRanks(request.param, 1 << 16)


def expected(source: str, target: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    total = whole * (size * (size + 1) // 2) if source == "P" else whole
    if target == "R":
        return total
    parts = total.chunk(size, int(target[1]))
    return parts[rank] if rank < len(parts) else total.narrow(int(target[1]), 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5], indirect=True)
def test_exchanges_in_turns(ranks: SlotsOfRanks, dtype: torch.dtype) -> None:
    """Six exchanges three times, on two slots: a slot is used again by the same one and by others."""
    for turn in range(3):
        for source, target in PAIRS:
            whole = ((torch.arange(35) + 11 * turn) % 7).reshape(7, 5).to(dtype)
            for rank, found in enumerate(ranks.redistribute(source, target, whole)):
                wanted = expected(source, target, whole, rank, ranks.size)
                torch.testing.assert_close(found, wanted.contiguous(), rtol=0, atol=0)


class RankAhead:
    """A rank with its own list of exchanges to pack and to unpack, in order; nobody waits for it."""

    def __init__(self, ranks: SlotsOfRanks, rank: int, wholes: list[torch.Tensor]) -> None:
        self.launches, self.results = list[Callable[[], None]](), list[torch.Tensor]()
        self.num_run, self._stop = 0, ranks.arenas[rank]._stop
        for whole in wholes:
            plan, held, result = ranks.plans("S0", "R", whole)[rank], ranks.part(whole, "S0", rank), whole * 0 - 1
            self.launches += [partial(ranks.pack, plan, held), partial(ranks.unpack, plan, held, result)]
            self.results.append(result)

    def step(self) -> bool:
        """Runs the next launch unless it would wait; whether it ran."""
        self._stop.asked.fill_(1)  # a launch that would wait ends, and notes it
        self.launches[self.num_run]()
        if self._stop.met.item():
            self._stop.met.zero_()
            return False
        self.num_run += 1
        return True

    @property
    def is_over(self) -> bool:
        return self.num_run == len(self.launches)

    @property
    def num_packed(self) -> int:
        return (self.num_run + 1) // 2

    @property
    def num_unpacked(self) -> int:
        return self.num_run // 2


def in_any_order(seed: int, rows: Sequence[int]) -> int:
    """Runs exchanges of so many rows each on 3 ranks, whose launches come in any order; how far rank 0 was ahead.

    Each rank must read what was sent to it, and somebody can always go on.
    """
    draw, ranks, most = random.Random(seed), SlotsOfRanks(3, 1 << 14), 0
    wholes = [torch.arange(3.0 * count).reshape(count, 3) + 100 * number for number, count in enumerate(rows)]
    running = [RankAhead(ranks, rank, wholes) for rank in range(3)]
    while left := [each for each in running if not each.is_over]:
        order = [draw.choice(left)] * draw.randrange(1, 6) + draw.sample(left, len(left))
        has_run = [each.step() for each in order if not each.is_over]
        assert any(has_run), [each.num_run for each in running]
        most = max(most, running[0].num_packed - min(each.num_unpacked for each in running[1:]))
    for each in running:
        for found, whole in zip(each.results, wholes, strict=True):
            assert torch.equal(found, whole)
    return most


@pytest.mark.in_core(4)
@pytest.mark.parametrize("seed", range(40))
def test_ranks_run_ahead_in_any_order(seed: int) -> None:
    """Rows of one rank alone, which is ahead of its readers by as many messages as there are slots, and of all."""
    draw = random.Random(1000 + seed)
    assert in_any_order(seed, [1] * 12) == NUM_SLOTS
    in_any_order(seed, [draw.choice((1, 2, 6)) for _ in range(12)])


def test_a_launch_behind_a_stopped_wait_does_nothing() -> None:
    ranks = SlotsOfRanks(2, 1 << 14)
    sent = [torch.full((1, 3), float(number)) for number in range(4)]
    plans, target = ranks.plans("S0", "R", sent[0]), torch.full((1, 3), -1.0)
    empty = sent[0][:0]
    for local in sent[:2]:
        ranks.pack(plans[0], local)
    ranks.arenas[0].stop()
    ranks.pack(plans[0], sent[2])  # both slots are taken
    assert ranks.arenas[0]._stop.met.item() == 1
    for local in sent[:2]:
        ranks.unpack(plans[1], empty, target)
        assert torch.equal(target, local)
    ranks.pack(plans[0], sent[3])  # there is room now
    ranks.arenas[1].stop()
    ranks.unpack(plans[1], empty, target)
    assert torch.equal(target, sent[1])
    assert ranks.arenas[1]._stop.met.item() == 1


@pytest.mark.extended
def test_more_terms_than_a_kernel_takes_are_left_to_nccl() -> None:
    whole = torch.ones(64, 1)
    with pytest.raises(AssertionError, match="every message fits a slot"):
        SlotsOfRanks(32, 1 << 18).redistribute("P", "S0", whole)
    assert torch.equal(SlotsOfRanks(32, 1 << 18).redistribute("S0", "R", whole)[5], whole)
