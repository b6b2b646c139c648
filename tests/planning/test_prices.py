"""Prices by the type of device: what is decided by them on GPUs, and why; the CPU's plans stay as they were."""

import pytest

from tritondt.planning import prices
from tritondt.planning.cost import CostTable, step_cost
from tritondt.planning.explain import explain_layouts
from tritondt.planning.pipelining import Rows, best_shares
from tritondt.planning.planner import candidates, make_plan, why_more_bytes
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements


def layouts(size: int, shape: tuple[int, ...], source: str = "P", target: str = "R") -> tuple[Layout, Layout]:
    before, after = (Layout((size,), parse_placements(text), shape) for text in (source, target))
    return before, after


def test_products_overlap_within_a_node_of_gpus() -> None:
    rows = Rows(1024, 8192, 2, 8)
    assert best_shares(rows, 8192, prices.built_in(8)["cpu"]) == ()
    assert len(best_shares(rows, 8192, prices.built_in(8)["cuda"])) > 1


@pytest.mark.parametrize(("side", "kinds"), [(64, ["reduce"]), (4096, ["reduce", "gather"])])
def test_small_terms_go_to_everybody_and_large_ones_in_pieces(side: int, kinds: list[str]) -> None:
    plan = make_plan(*layouts(8, (side, side)), 2, prices.CUDA)
    assert [step.kind for step in plan.steps] == kinds


def test_the_form_is_taken_by_predicted_time() -> None:
    source, target = layouts(8, (64, 64))
    plan = make_plan(source, target, 2, prices.CUDA)
    own = sum(step_cost(step, 2, prices.CUDA).seconds for step in plan.steps)
    for steps in candidates(source, target, prices.CUDA):
        assert own <= sum(step_cost(step, 2, prices.CUDA).seconds for step in steps)
    # Where a step and a message cost nothing, there is nothing to gain.
    free = prices.with_prices({"cuda": prices.CUDA}, '{"launch_s": 0, "host": {"latency_s": 1e-12}}')["cuda"]
    assert len(make_plan(source, target, 2, free).steps) == 2


def test_no_form_brings_more_bytes_than_where_latency_decides() -> None:
    for size in (3, 4, 8):
        for side in (8, 64, 128, 256, 512, 1024):
            source, target = layouts(size, (side, side))
            plan = make_plan(source, target, 2, prices.CUDA)
            received = sum(step_cost(step, 2, prices.CUDA).received_elements for step in plan.steps) * 2
            fewest = min(
                sum(step_cost(step, 2, prices.CUDA).received_elements for step in steps) * 2
                for steps in candidates(source, target, prices.CUDA)
            )
            assert received <= max(fewest * (1 + 1e-6), prices.CUDA.one_shot_bytes)


@pytest.mark.parametrize(("size", "kinds"), [(8, ["reduce"]), (16, ["reduce", "gather"])])
def test_terms_go_to_everybody_only_where_all_ranks_share_memory(size: int, kinds: list[str]) -> None:
    """On two hosts of 8 ranks, every rank would receive 15 terms of 16 kB, over the network."""
    costs = prices.in_shared_memory(prices.built_in(8)["cpu"], 1 << 24)
    plan = make_plan(*layouts(size, (64, 64)), 4, costs)
    assert [step.kind for step in plan.steps] == kinds
    assert (why_more_bytes(plan, 4, costs) is None) == (size == 16)


@pytest.mark.parametrize(("side", "kinds"), [(64, ["reduce"]), (1024, ["reduce", "gather"])])
def test_small_terms_in_shared_memory_are_read_by_everybody(side: int, kinds: list[str]) -> None:
    costs = prices.in_shared_memory(prices.built_in(4)["cpu"], 1 << 27)
    plan = make_plan(*layouts(4, (side, side)), 4, costs)
    assert [step.kind for step in plan.steps] == kinds
    reason = why_more_bytes(plan, 4, costs)
    assert (reason is None) == (len(kinds) > 1)
    if reason is not None:
        assert reason.startswith("every term goes to everybody in one step, 49,152 bytes a rank: "), reason
        assert reason.endswith(" for 24,576 bytes in 2 steps; up to 262,144 bytes latency decides"), reason


def test_the_cpu_takes_the_fewest_bytes_always() -> None:
    source, target = layouts(8, (2, 2))
    plan = make_plan(source, target, 4, CostTable())
    assert [step.kind for step in plan.steps] == ["reduce", "gather"]
    assert why_more_bytes(plan, 4, CostTable()) is None


def test_explain_says_which_form_and_why() -> None:
    found = explain_layouts(*layouts(8, (64, 64)), 2, prices.CUDA)
    assert [step.kind for step in found.steps] == ["reduce"]
    assert found.reason is not None
    assert found.reason in str(found)
    assert found.reason.startswith("every term goes to everybody in one step, 57,344 bytes a rank: ")
    assert found.reason.endswith("for 14,336 bytes in 2 steps; up to 262,144 bytes latency decides")
    assert '"reason": "every term' in found.to_json()
    large = explain_layouts(*layouts(8, (4096, 4096)), 2, prices.CUDA)
    assert large.reason is None
    assert "latency" not in str(large)
