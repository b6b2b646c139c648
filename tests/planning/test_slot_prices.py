"""Prices and explanations of messages that ranks pack into memory of each other's GPUs."""

import pytest

from tritondt.planning.across import make_plan_across
from tritondt.planning.alignment import NCCL_ALIGNMENT
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import Explanation, explain_layouts, explain_plan
from tritondt.planning.prices import built_in, from_json, in_slots, to_json
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import parse_placements

ARENA_BYTES = 16 << 20
COSTS = in_slots(built_in(8)["cuda"], ARENA_BYTES)
NCCL_ONLY = built_in(8)["cuda"]


def explained(
    source: str, target: str, side: int, costs: CostTable, mesh: tuple[int, ...] = (8,), at: Coordinate | None = None
) -> Explanation:
    before, after = (Layout(mesh, parse_placements(text), (side, side)) for text in (source, target))
    return explain_layouts(before, after, 4, costs, at, alignment=NCCL_ALIGNMENT, dtype="float32")


@pytest.mark.parametrize(
    ("source", "target", "side", "by_slots", "by_nccl"),
    [
        ("P", "R", 64, ["reduce"], ["all_reduce"]),  # one exchange: everybody adds all terms
        ("P", "R", 1024, ["all_reduce"], ["all_reduce"]),
        ("S0", "R", 64, ["exchange"], ["all_gather"]),
        ("S0", "R", 1024, ["exchange"], ["all_gather"]),
        ("S0", "R", 4096, ["all_gather"], ["all_gather"]),  # 8 MB a message: longer than a slot
        ("S0", "S1", 1024, ["exchange"], ["exchange"]),
    ],
)
def test_forms_with_latency_first_where_messages_fit_slots(
    source: str, target: str, side: int, by_slots: list[str], by_nccl: list[str]
) -> None:
    slots, nccl = (explained(source, target, side, costs) for costs in (COSTS, NCCL_ONLY))
    assert [step.kind for step in slots.steps] == by_slots
    assert [step.kind for step in nccl.steps] == by_nccl
    assert sum(step.seconds for step in slots.steps) <= sum(step.seconds for step in nccl.steps)


def test_what_fits_slots_needs_no_temporary_memory() -> None:
    short, long, before = (explained("S0", "S1", side, costs) for side, costs in SIDES)
    assert [(step.placed_bytes, step.packed_bytes, step.staged_bytes) for step in short.steps] == [(458_752, 0, 0)]
    assert short.peak_bytes == 0
    assert (
        str(short).splitlines()[-1]
        == "up to 458,752 bytes are packed into slots of peers' GPUs, where these unpack them"
    )
    # Of 1,048,576 bytes each, where a slot has 1,048,064; what arrives is rows, in place.
    assert [(step.placed_bytes, step.packed_bytes, step.staged_bytes) for step in long.steps] == [(0, 7 << 20, 0)]
    assert "slots" not in str(long)
    assert [(step.placed_bytes, step.packed_bytes) for step in before.steps] == [(0, 458_752)]


SIDES = ((1024, COSTS), (4096, COSTS), (1024, NCCL_ONLY))


def test_messages_to_other_hosts_are_nccls() -> None:
    """Of 15 messages of 2,048 elements, the 7 of this host are packed into slots."""
    found = explained("S0,S0", "S1,S1", 512, COSTS, (2, 8), at=(1, 3))
    (step,) = found.steps
    assert (step.num_sent, step.sent_bytes) == (15, 15 * 32 * 32 * 4)
    assert step.placed_bytes == 7 * 32 * 32 * 4
    assert (step.packed_bytes, step.staged_bytes) == (8 * 32 * 32 * 4, 0)  # rows land in place


def test_a_step_within_hosts_has_the_price_of_slots_and_one_between_them_has_not() -> None:
    within, between = (explained(source, "R,R" if source == "R,S0" else "S1,R", 64, COSTS, (2, 8)) for source in PAIRS)
    assert within.steps[0].seconds == pytest.approx(COSTS.slot_launch_s, rel=0.2)
    assert between.steps[0].seconds > COSTS.launch_s


PAIRS = ("R,S0", "S0,R")


def test_ranks_agree_on_the_prices_of_slots() -> None:
    tables = {"cpu": built_in(8)["cpu"], "cuda": COSTS}
    assert from_json(to_json(tables)) == tables
    assert tables["cpu"].device_arena_bytes == 0
    assert CostTable().with_json('{"slots": {"latency_s": 1e-7}}').slots.latency_s == 1e-7


def test_a_rank_alone_on_its_host_packs_for_nobody() -> None:
    assert in_slots(built_in(1)["cuda"], ARENA_BYTES).slot_bytes(8) == 0


def test_messages_of_a_narrower_dtype_have_the_price_of_nccls() -> None:
    before, after = (Layout((8,), parse_placements(text), (256, 256)) for text in ("S0", "S1"))
    narrow = explain_layouts(before, after, 4, COSTS, alignment=NCCL_ALIGNMENT, wire_itemsize=2)
    assert narrow == explain_layouts(before, after, 4, NCCL_ONLY, alignment=NCCL_ALIGNMENT, wire_itemsize=2)
    assert narrow.steps[0].placed_bytes == 0


@pytest.mark.parametrize(("ranks", "is_near"), [((0, 1, 2, 3), True), ((8, 11, 10, 15), True), ((6, 7, 8, 9), False)])
def test_ranks_of_two_meshes_share_a_host_by_their_numbers(ranks: tuple[int, ...], is_near: bool) -> None:
    """Rank r is on host r // 8, wherever it stands in its mesh."""
    before, after = (Layout((2,), parse_placements(text), (256, 256)) for text in ("S0", "S1"))
    plan = make_plan_across(before, ranks[:2], after, ranks[2:], 4, COSTS)
    for rank in ranks[:2]:
        found = explain_plan(plan, rank, 4, COSTS)
        assert found.sent_bytes == 128 * 256 * 4
        assert found.steps[0].placed_bytes == (found.sent_bytes if is_near else 0)
