"""Forms that the planner prices, and the rule by which it takes one of them."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import tritondt as T
from tests.harness.oracle.random_layouts import random_pair
from tritondt.planning.cost import CostTable, Link, step_cost
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Step
from tritondt.planning.planner import candidates, make_plan, why_collective, why_more_bytes
from tritondt.planning.prices import CUDA
from tritondt.sharding.layout import Layout

FEW = CostTable(max_peers=1)
# Whole seconds, so that every digit of a sentence counts.
SLOW = replace(CUDA, host=Link(3.1, 1e6))


def layouts(mesh: tuple[int, ...], source: str, target: str, side: int = 64) -> tuple[Layout, Layout]:
    before, after = (Layout(mesh, T.parse_placements(text), (side, side)) for text in (source, target))
    return before, after


def forms(mesh: tuple[int, ...], source: str, target: str, costs: CostTable, dtype: str = "") -> list[list[str]]:
    """Each form as its steps in words."""
    return [[str(step) for step in steps] for steps in candidates(*layouts(mesh, source, target), costs, dtype)]


def totals(steps: Sequence[Step], itemsize: int, costs: CostTable) -> tuple[int, float, float]:
    """Most peers, bytes and seconds of a form."""
    single = [step_cost(step, itemsize, costs) for step in steps]
    return (
        max((cost.num_peers for cost in single), default=0),
        sum(cost.received_elements for cost in single) * itemsize,
        sum(cost.seconds for cost in single),
    )


@pytest.mark.parametrize("chunk", range(4))
def test_the_form_with_the_fewest_bytes_is_taken_and_among_many_peers_the_quickest(chunk: int) -> None:
    """Tables whose limits of peers and of bytes are those of one of the forms, or one below."""
    for seed in range(chunk * 40, (chunk + 1) * 40):
        chosen = random.Random(seed)
        source, target = random_pair(chosen, torch.float32)
        if source is target:
            continue
        peers, num_bytes, _ = totals(chosen.choice(candidates(source, target, CUDA)), 4, CUDA)
        costs = replace(
            chosen.choice((CUDA, CostTable())),
            max_peers=max(1, peers - chosen.randint(0, 1)),
            one_shot_bytes=max(0, int(num_bytes) - chosen.randint(0, 1)),
            collectives=0,
        )
        check_choice(source, target, costs)


def check_choice(source: Layout, target: Layout, costs: CostTable) -> None:
    found = [totals(steps, 4, costs) for steps in candidates(source, target, costs)]
    peers, num_bytes, seconds = totals(make_plan(source, target, 4, costs).steps, 4, costs)
    if max(peers for peers, _, _ in found) > costs.max_peers:
        fewest_peers = min(peers for peers, _, _ in found)
        allowed = [item for item in found if item[0] <= max(fewest_peers, costs.max_peers)]
    else:
        limit = max(min(num_bytes for _, num_bytes, _ in found) * (1 + 1e-5), costs.one_shot_bytes)
        allowed = [item for item in found if item[1] <= limit]
    assert (peers, num_bytes) in {item[:2] for item in allowed}, (source, target, costs)
    assert seconds <= min(item[2] for item in allowed) * (1 + 1e-9), (source, target, costs)


def test_limits_are_reached_before_they_are_passed() -> None:
    """Terms of 4096 floats go to 7 peers in one step, 114,688 bytes, or in pieces, a fourth of them."""
    pair = layouts((8,), "P", "R")
    for change, num_steps in (
        ({"max_peers": 7}, 2),
        ({"max_peers": 6}, 1),  # too many for either form: the quickest
        ({"max_peers": 6, "one_shot_bytes": 1}, 1),
        ({"one_shot_bytes": 114_688}, 1),
        ({"one_shot_bytes": 114_687}, 2),
    ):
        costs = replace(CostTable(), **change)  # type: ignore[arg-type]
        plan = make_plan(*pair, 4, costs)
        assert len(plan.steps) == num_steps, change
        reason = why_more_bytes(plan, 4, costs)
        assert (reason is not None) == (change == {"one_shot_bytes": 114_688}), change
    assert len(forms((4, 4), "S0, S0", "S1, S1", CostTable(max_peers=15))) == 1
    assert len(forms((4, 4), "S0, S0", "S1, S1", CostTable(max_peers=14))) == 3


def test_of_forms_of_few_peers_the_quickest_is_taken_though_it_brings_more_bytes() -> None:
    """15 peers are too many; by way of either axis there are 8, and the way of more bytes has fewer messages."""
    costs = CostTable(max_peers=8, ranks_per_host=1, network=Link(1.0, 1e12))
    source, target = layouts((2, 8), "S0, S0", "S1, R")
    plan = make_plan(source, target, 4, costs)
    assert [str(step) for step in plan.steps] == ["exchange (S0, S0) -> (S0, R)", "exchange (S0, R) -> (S1, R)"]
    check_choice(source, target, costs)


def test_each_hop_of_large_terms_is_in_pieces() -> None:
    found = candidates(*layouts((4, 4), "P, P", "R, R", 4096), CostTable(max_peers=14))
    assert [[step.kind for step in steps] for steps in found[2:]] == [["reduce", "gather"] * 2] * 2


def test_plans_refuse_what_nothing_connects() -> None:
    source, _ = layouts((2,), "S0", "R")
    with pytest.raises(T.LayoutError, match=r"the source has shape \(64, 64\), the target \(64, 65\); they must be"):
        make_plan(source, Layout((2,), (T.Replicate(),), (64, 65)), 4, CostTable())
    with pytest.raises(T.MeshError, match=r"the source mesh has shape \(2,\), the target mesh \(3,\); they must be"):
        make_plan(source, layouts((3,), "S0", "R")[1], 4, CostTable())


def test_hops_change_each_axis_once_and_hold_no_more_than_source_or_target() -> None:
    one_by_one = [["exchange (S0, R) -> (R, S0)"], ["local (S0, R) -> (S0, S0)", "exchange (S0, S0) -> (R, S0)"]]
    assert forms((2, 2), "S0, R", "R, S0", FEW) == one_by_one  # not by way of (R, R)
    by_shards = ["exchange (R, S0) -> (S0, S0)", "exchange (S0, S0) -> (S0, R)"]
    assert forms((2, 2), "R, S0", "S0, R", FEW)[1:] == [by_shards]
    assert len(forms((2, 2), "S0, S1", "R, R", FEW)) == 3
    assert forms((2, 2, 2), "S0, S0, R", "S1, S1, R", FEW)[1:] == [
        ["exchange (S0, S0, R) -> (S1, S0, R)", "exchange (S1, S0, R) -> (S1, S1, R)"],
        ["exchange (S0, S0, R) -> (S0, S1, R)", "exchange (S0, S1, R) -> (S1, S1, R)"],
    ]
    assert [len(steps) for steps in forms((2, 2, 2), "S0, S0, S0", "S1, S1, S1", FEW)] == [1, *[3] * 6]


def test_terms_are_reduced_among_some_or_all_of_their_holders() -> None:
    found = candidates(*layouts((4, 4), "P, R", "R, R"), CostTable())
    assert [steps[0].target.axes for steps in found if isinstance(steps[0].target, FlatPieces)] == [(0,), (0, 1)]


def test_a_shard_that_becomes_a_term_is_never_gathered() -> None:
    assert forms((4, 4), "P, S0", "R, P", CostTable())[0] == [
        "reduce (P(sum), S0) -> (R, S0)",
        "local (R, S0) -> (R, P(sum))",
    ]


def test_collectives_are_exchanges_or_reductions() -> None:
    for target, source, kind in (("R", "S0", "exchange"), ("R", "P", "reduce"), ("S0", "P", "reduce")):
        found = candidates(*layouts((8,), source, target), CUDA, "float32")
        assert [step.kind for steps in found for step in steps if step.collective] == [kind]
    assert forms((8,), "S0", "S1", CUDA, "float32") == [["exchange (S0) -> (S1)"]]


@pytest.mark.parametrize("costs", [SLOW, replace(SLOW, collective_launch_s=1000.0)])
def test_a_sentence_compares_the_collective_with_the_best_of_our_own(costs: CostTable) -> None:
    source, target = layouts((8,), "P", "R")
    (one,) = (steps for steps in candidates(source, target, costs, "float32") if steps[-1].collective)
    its_us, own_us = (
        f"{totals(steps, 4, costs)[2] * 1e6:.0f} us" for steps in (one, make_plan(source, target, 4, costs).steps)
    )
    found = why_collective(make_plan(source, target, 4, costs, "float32"), 4, costs, "float32")
    if costs is SLOW:
        assert found == f"all_reduce of NCCL: {its_us} predicted against {own_us} for messages of our own"
    else:
        assert found == f"messages of our own: {own_us} predicted against {its_us} for all_reduce of NCCL"
    assert why_collective(make_plan(source, target, 4, costs), 4, replace(costs, collectives=0), "float32") is None


def test_a_sentence_compares_one_step_with_the_fewest_bytes() -> None:
    source, target = layouts((8,), "P", "R")
    in_one, in_pieces = candidates(source, target, SLOW)
    one_us, pieces_us = (f"{totals(steps, 4, SLOW)[2] * 1e6:.0f} us" for steps in (in_one, in_pieces))
    assert why_more_bytes(make_plan(source, target, 4, SLOW), 4, SLOW) == (
        f"every term goes to everybody in one step, 114,688 bytes a rank: {one_us} predicted against {pieces_us} for "
        "28,672 bytes in 2 steps; up to 262,144 bytes latency decides"
    )


def test_a_form_with_the_fewest_bytes_needs_no_reason() -> None:
    for pair in (layouts((8,), "S0", "R"), layouts((8,), "S0", "S0"), layouts((8,), "P", "S0")):
        assert why_more_bytes(make_plan(*pair, 2, CUDA), 2, CUDA) is None


def test_the_largest_flat_piece_is_the_first() -> None:
    for side, most in ((4, 4), (5, 7), (0, 0)):
        pieces = FlatPieces(layouts((2, 4), "R, R", "R, R", side)[0], (1,))
        lengths = [stop - start for start, stop in map(pieces.bounds, pieces.layout.coordinates())]
        assert pieces.max_local_numel == max(lengths) == most
