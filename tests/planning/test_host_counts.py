"""Counts of steps that know hosts are those of all messages: of random layouts on uneven hosts, and of large worlds."""

import random

import pytest
import torch

from tests.harness.oracle.random_layouts import random_pair
from tritondt.cli.wide_traffic import WideTraffic
from tritondt.errors import LayoutError
from tritondt.planning.between_hosts import HostStep, pairing_of, steps_through, ways
from tritondt.planning.cost import CostTable
from tritondt.planning.plan import Plan
from tritondt.planning.planner import least_between_hosts, make_plan
from tritondt.planning.topology import FatTree, RailOptimised, link_loads
from tritondt.planning.traffic import RankTraffic, rank_totals, rank_traffic
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, parse_placements


def listed(plan: Plan, itemsize: int) -> RankTraffic:
    """The traffic of a plan from the exchanges that ranks would run."""
    links, messages = dict[tuple[int, int], int](), [0] * plan.source.num_ranks
    for step in plan.steps:
        for rank, coordinate in enumerate(plan.source.coordinates()):
            for message in step.exchange(coordinate).sends:
                link = rank, message.peer
                links[link] = links.get(link, 0) + message.numel * itemsize
                messages[rank] += 1
    return RankTraffic(plan.source.num_ranks, links, tuple(messages))


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 1500))])
def test_counts_are_those_of_the_exchanges(seed: int) -> None:
    """By every way that a tensor may go, also by those that no plan takes."""
    chosen = random.Random(seed)
    source, target = random_pair(chosen, torch.float32)
    if any(isinstance(after, Partial) for after in target.placements):  # its terms are made after the last step
        target = source.with_placements([parse_placements("R")[0]] * len(source.mesh_shape))
    hosts = tuple(chosen.randrange(3) for _ in range(source.num_ranks))
    pairing = pairing_of(source, target, hosts)
    assert pairing is not None
    for stages in ways(pairing):
        plan = Plan(source, target, steps_through(pairing, stages))
        expected, found, wide = listed(plan, 4), rank_traffic(plan, 4), WideTraffic(plan, 4)
        totals = rank_totals(plan, 4)
        assert found.links == expected.links
        assert found.messages == expected.messages == totals.messages
        assert (list(totals.sent), list(totals.received)) == (expected.sent, expected.received)
        assert wide.blocks(5) == expected.blocks(5)
        for topology in (FatTree(2, 2), RailOptimised(3)):
            assert wide.link_loads(topology) == link_loads(expected, topology)


@pytest.mark.parametrize(
    ("num_ranks", "texts"),
    [
        (512, ("P", "S0")),
        (512, ("S0", "R")),
        (512, ("P", "R")),
        pytest.param(4096, ("P", "S0"), marks=pytest.mark.extended),
    ],
)
def test_all_cards_of_thousands_of_ranks_carry_the_fewest_bytes(num_ranks: int, texts: tuple[str, str]) -> None:
    """512 hosts take seconds, however many the messages are."""
    source, target = (Layout((num_ranks,), parse_placements(text), (num_ranks * 2, 4)) for text in texts)
    hosts = tuple(rank // 8 for rank in range(num_ranks))
    plan = make_plan(source, target, 4, CostTable(), "", hosts)
    assert all(isinstance(step, HostStep) for step in plan.steps)
    loads = WideTraffic(plan, 4).link_loads(FatTree(8, 4))
    least = least_between_hosts(source, target, hosts)
    assert least is not None
    for kind in ("card out", "card in"):
        carried = [num_bytes for link, num_bytes in loads.items() if link.kind == kind]
        assert carried == [least * 4 // num_ranks] * num_ranks


def test_senders_that_all_differ_are_refused_where_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritondt.planning.traffic.MOST_PAIRS", 100)
    source, target = (Layout((64,), parse_placements(text), (197, 3)) for text in ("S0", "R"))
    plan = make_plan(source, target, 4, CostTable(), "", tuple(rank // 8 for rank in range(64)))
    with pytest.raises(LayoutError, match=r"of \(197, 3\) on 64 ranks has more than 100 different pairs of parts"):
        rank_totals(plan, 4)
