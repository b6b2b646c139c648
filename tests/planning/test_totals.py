"""Totals of ranks that are counted without a list, against the lists."""

import random
from itertools import pairwise
from typing import Any

import pytest

from tritondt.cli.wide_traffic import WideTraffic
from tritondt.errors import LayoutError
from tritondt.planning.between_hosts import HostStep
from tritondt.planning.cost import CostTable
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Plan
from tritondt.planning.planner import candidates, make_plan
from tritondt.planning.traffic import rank_totals, rank_traffic
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Placement, parse_placements

COSTS = CostTable(ranks_per_host=4)
LARGE = [((96,), "S0", "S1"), ((64,), "P", "R"), ((32, 3), "S0,R", "R,S1"), ((32, 3), "P,S0", "S0,R")]


def random_placement(rng: random.Random, shape: tuple[int, ...], num_ranks: int, is_source: bool) -> Placement:
    dim = rng.randrange(len(shape))
    cuts = [rng.randrange(shape[dim] + 1) for _ in range(num_ranks - 1)]
    bounds = [0, *sorted(cuts), shape[dim]]
    sizes = "/".join(str(after - before) for before, after in pairwise(bounds))
    texts = [f"S{dim}", f"S{dim}", f"S{dim}(unit=2)", f"S{dim}(sizes={sizes})", "R", "R", "P", "P(max)"]
    texts += [f"S{dim}(repeats=2)"] if shape[dim] % 2 == 0 else []
    (found,) = parse_placements(rng.choice(texts if is_source else [text for text in texts if text != "P(max)"]))
    return found


def random_pair(rng: random.Random) -> tuple[Layout, Layout]:
    """Two random layouts of a tensor that fit together; those that do not are drawn again."""
    while True:
        mesh = rng.choice([(3,), (4,), (2, 2), (2, 3), (2, 2, 2)])
        shape = tuple(rng.randrange(0 if rng.random() < 0.1 else 1, 8) for _ in range(rng.randrange(1, 4)))
        sides = [
            [random_placement(rng, shape, num_ranks, is_source) for num_ranks in mesh] for is_source in (True, False)
        ]
        orders = [tuple(rng.sample(range(len(mesh)), len(mesh))) for _ in sides]
        try:
            before, after = (Layout(mesh, side, shape, order) for side, order in zip(sides, orders, strict=True))
            make_plan(before, after, 4, COSTS)
        except LayoutError:
            continue
        return before, after


def check(plan: Plan) -> None:
    listed, counted = rank_traffic(plan, 4), rank_totals(plan, 4)
    assert counted.messages == listed.messages, plan
    assert counted.sent == tuple(listed.sent), plan
    assert counted.received == tuple(listed.received), plan
    assert counted.spreads == listed.spreads


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_those_of_the_lists(seed):
    rng = random.Random(seed)
    for _ in range(60):
        before, after = random_pair(rng)
        check(make_plan(before, after, 4, COSTS))
        for steps in candidates(before, after, COSTS):  # forms that the planner does not choose here, too
            check(Plan(before, after, tuple(steps)))


@pytest.mark.parametrize(("mesh", "source", "target"), LARGE)
def test_counts_of_larger_meshes(mesh, source, target):
    check(make_plan(*(Layout(mesh, parse_placements(text), (97, 50)) for text in (source, target)), 4, COSTS))


@pytest.mark.parametrize(("mesh", "source", "target"), [((8,), "S0", "R"), ((8,), "P", "R"), ((2, 4), "S0,P", "R,S1")])
def test_counts_of_plans_that_know_hosts(mesh, source, target):
    """Their steps have no closed form, and are counted by the same questions."""
    before, after = (Layout(mesh, parse_placements(text), (17, 30)) for text in (source, target))
    plan = make_plan(before, after, 4, COSTS, hosts=(0, 0, 0, 1, 1, 1, 0, 1))
    assert any(isinstance(step, HostStep) for step in plan.steps)
    check(plan)
    listed, wide = rank_traffic(plan, 4), WideTraffic(plan, 4)
    assert [wide.blocks(most) for most in (8, 3)] == [listed.blocks(most) for most in (8, 3)]


def test_a_large_world_is_counted_by_products(monkeypatch):
    calls: list[int] = []
    real = Layout.dim_holders

    def counted(self: Layout, dim: int, *arguments: Any) -> Any:
        for found in real(self, dim, *arguments):
            calls.append(dim)
            yield found

    monkeypatch.setattr(Layout, "dim_holders", counted)
    before, after = (Layout((64, 64), parse_placements(text), (4096, 512)) for text in ("P,S0", "R,S0"))
    found = rank_totals(make_plan(before, after, 4, COSTS), 4)
    # 64 ranks share a box of 64 rows: each sends the pieces of the 63 others, then its own to them.
    assert set(found.sent) == set(found.received) == {2 * 63 * (64 * 512 // 64) * 4}
    assert set(found.messages) == {2 * 63}
    assert len(calls) <= 2 * 4096  # a list has 516,096 messages


def test_pieces_that_would_have_to_be_listed_are_refused(monkeypatch):
    monkeypatch.setattr("tritondt.planning.traffic.MOST_PAIRS", 1000)
    before, after = (Layout((16, 16), parse_placements(text), (64, 64)) for text in ("P,S0", "R,S1"))
    plans = [Plan(before, after, tuple(steps)) for steps in candidates(before, after, COSTS)]
    in_pieces = [plan for plan in plans if isinstance(plan.steps[0].target, FlatPieces)]
    refused = r"in 16 pieces of \(64, 64\) on 256 ranks has more than 1,000 different pairs .* explain one rank"
    for plan in in_pieces:
        with pytest.raises(LayoutError, match=refused):
            rank_totals(plan, 4)
    assert 0 < len(in_pieces) < len(plans)
    assert all(sum(rank_totals(plan, 4).sent) > 0 for plan in plans if plan not in in_pieces)
