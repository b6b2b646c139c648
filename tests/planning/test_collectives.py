"""Which redistributions are a collective of NCCL: decided by layouts, dtype and prices, and explained."""

from dataclasses import replace

import pytest

from tritondt.planning.collectives import (
    ALL,
    EXACT,
    NONE,
    WIDE,
    Collective,
    collective_between,
    group_of,
    is_offered,
)
from tritondt.planning.cost import CostTable, step_cost
from tritondt.planning.explain import explain_layouts
from tritondt.planning.planner import candidates, make_plan
from tritondt.planning.prices import CUDA
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements


def between(source: str, target: str, shape: tuple[int, ...] = (8, 12), mesh: tuple[int, ...] = (4,)) -> str | None:
    before, after = (Layout(mesh, parse_placements(text), shape) for text in (source, target))
    found = collective_between(before, after)
    return None if found is None else f"{found.kind} {found.op} {found.divisor} {found.is_dense}"


@pytest.mark.parametrize(
    ("source", "target", "mesh", "found"),
    [
        ("S0", "R", (4,), "all_gather None 1 True"),
        ("S1", "R", (4,), "all_gather None 1 False"),
        ("P", "R", (4,), "all_reduce sum 1 True"),
        ("P(avg)", "R", (4,), "all_reduce sum 4 True"),
        ("P(max)", "S0", (4,), "reduce_scatter max 1 True"),
        ("P", "S1", (4,), "reduce_scatter sum 1 False"),
        ("S0, S0", "R, R", (2, 4), "all_gather None 1 True"),
        ("P, P(avg)", "R, R", (2, 4), "all_reduce sum 4 True"),
        ("S0, R", "R, R", (4, 1), "all_gather None 1 True"),
        ("S0", "S1", (4,), None),  # no collective of one call
        ("R", "P", (4,), None),
        ("S0", "R", (1,), None),
        ("S0, S1", "R, R", (2, 2), None),
        ("P, P", "R, R", (4, 1), None),
        ("P, R", "R, P", (4, 1), None),
        # Along one axis of two, in groups side by side.
        ("S0, R", "R, R", (4, 2), "all_gather None 1 True"),
        ("R, S0", "R, R", (2, 4), "all_gather None 1 True"),
        ("S1, S0", "S1, R", (3, 4), "all_gather None 1 True"),
        ("S0, S1", "R, S1", (4, 3), "all_gather None 1 True"),
        ("S0, S1", "S0, R", (4, 3), "all_gather None 1 False"),
        ("S0, S0", "S0, R", (2, 4), "all_gather None 1 True"),
        ("S0, S1", "S0, R", (8, 3), "all_gather None 1 True"),  # of one row each
        ("P, S0", "P, R", (3, 4), "all_gather None 1 True"),
        ("P, R", "S0, R", (4, 2), "reduce_scatter sum 1 True"),
        ("R, P(max)", "R, S1", (2, 4), "reduce_scatter max 1 False"),
        ("S0, P", "S0, S0", (2, 4), "reduce_scatter sum 1 True"),
        ("P, S0", "R, S0", (3, 4), "all_reduce sum 1 True"),
        ("P, P(avg)", "P, R", (2, 4), "all_reduce sum 4 True"),
        ("P(avg), P, R", "P(avg), R, R", (2, 4, 3), "all_reduce sum 1 True"),
        ("S0, S1, R", "R, S1, R", (2, 2, 2), "all_gather None 1 True"),
        ("S0, S0", "R, S0", (2, 4), None),  # blocks of a group are apart
        ("S0, R", "R, S0", (2, 4), None),
        ("P, S0", "R, R", (2, 4), None),
        ("S0, R", "R, P", (2, 4), None),
    ],
)
def test_layouts_that_a_collective_connects(source: str, target: str, mesh: tuple[int, ...], found: str | None) -> None:
    assert between(source, target, mesh=mesh) == found


def test_uneven_blocks_and_blocks_in_another_order_have_none() -> None:
    assert between("S0", "R", (9, 12)) is between("P", "S0", (9, 12)) is between("S0", "R", (0, 12)) is None
    order = Layout((2, 4), parse_placements("S0, S0"), (8, 12), order=(1, 0))
    assert collective_between(order, order.with_placements(parse_placements("R, R"))) is None
    assert between("P", "R", (9, 13)) == "all_reduce sum 1 True"  # whole tensors are alike everywhere
    # A group of 5 rows and one of 4: each is even for itself, or not.
    assert between("S0, S1", "S0, R", (9, 12), (2, 4)) == "all_gather None 1 False"
    assert between("S0, P", "S0, R", (9, 12), (2, 4)) == "all_reduce sum 1 True"
    assert between("S0, S0", "S0, R", (9, 12), (2, 4)) is between("S0, P", "S0, S0", (9, 12), (2, 4)) is None
    # Of three ranks one holds nothing.
    assert between("S0, P", "S0, R", (2, 12), (3, 4)) is between("S0, S1", "S0, R", (2, 12), (3, 4)) is None


def test_groups_are_priced_by_their_ranks_and_the_links_between_these() -> None:
    outer, inner = (Layout((2, 8), parse_placements(text), (4096, 4096)) for text in ("S0, R", "R, S0"))
    whole = Layout((2, 8), parse_placements("R, R"), (4096, 4096))
    costs = replace(CUDA, ranks_per_host=8)
    seconds = {}
    for layout in (outer, inner):
        (steps,) = (found for found in candidates(layout, whole, costs, "float32") if found[-1].collective)
        seconds[layout] = step_cost(steps[-1], 4, costs).seconds
    # Half of 64 MiB from another host at 45 GB/s, and seven eighths of it within one at 300 GB/s, in 1 and 7 hops.
    assert seconds[outer] == pytest.approx(5e-6 + 8e-6 + (1 << 25) / 45e9)
    assert seconds[inner] == pytest.approx(5e-6 + 7 * 2e-6 + 7 * (1 << 23) / 300e9)


@pytest.mark.parametrize("text", ["S0, R -> R, R", "S1, S0 -> S1, R", "P, S1 -> R, S1", "S0, P -> S0, S1"])
def test_the_messages_of_a_collective_stay_in_its_group(text: str) -> None:
    before, after = (Layout((3, 4), parse_placements(each), (36, 24)) for each in text.split(" -> "))
    (steps,) = (found for found in candidates(before, after, CUDA, "float32") if found[-1].collective)
    collective = steps[-1].collective
    assert collective is not None
    for coordinate in before.coordinates():
        found, group = steps[-1].exchange(coordinate), group_of((3, 4), collective.axes, coordinate)
        assert len(group) == collective.num_ranks
        peers = {message.peer for message in (*found.sends, *found.receives)}
        assert peers == {*group} - {before.position(coordinate)}


@pytest.mark.parametrize(
    ("op", "divisor", "dtype", "level"),
    [
        (None, 1, "bool", EXACT),
        (None, 1, "complex64", EXACT),
        ("sum", 1, "int64", EXACT),
        ("max", 1, "uint8", EXACT),
        ("sum", 4, "int32", None),
        ("sum", 4, "float32", WIDE),
        ("product", 1, "float64", WIDE),
        ("sum", 1, "bfloat16", ALL),
        ("max", 1, "float32", None),
        ("sum", 1, "complex64", None),
        ("sum", 1, "", None),
    ],
)
def test_dtypes_that_a_level_of_prices_offers(op: str | None, divisor: int, dtype: str, level: int | None) -> None:
    asked = Collective("all_gather" if op is None else "all_reduce", 4, 96, op=op, divisor=divisor)  # type: ignore[arg-type]
    offered = [is_offered(asked, dtype, each) for each in (NONE, EXACT, WIDE, ALL)]
    assert offered == [level is not None and each >= level for each in (NONE, EXACT, WIDE, ALL)]


def steps_of(source: str, target: str, side: int, costs: CostTable, dtype: str) -> list[str]:
    before, after = (Layout((8,), parse_placements(text), (side, side)) for text in (source, target))
    return [str(step) for step in make_plan(before, after, 4, costs, dtype).steps]


def test_the_faster_form_is_taken_and_never_on_the_cpu() -> None:
    assert steps_of("S0", "R", 4096, CUDA, "float32") == ["all_gather (S0) -> (R)"]
    assert steps_of("P", "R", 4096, CUDA, "float32") == ["all_reduce (P(sum)) -> (R)"]
    assert steps_of("P", "S0", 4096, CUDA, "float32") == ["reduce_scatter (P(sum)) -> (S0)"]
    for costs, dtype in ((CostTable(), "float32"), (CUDA, ""), (replace(CUDA, collectives=NONE), "float32")):
        assert steps_of("S0", "R", 4096, costs, dtype) == ["exchange (S0) -> (R)"]
        assert len(steps_of("P", "R", 4096, costs, dtype)) == 2
    assert len(steps_of("P", "R", 4096, CUDA, "bfloat16")) == 2
    slow = replace(CUDA, collective_launch_s=1.0)
    assert steps_of("S0", "R", 4096, slow, "float32") == ["exchange (S0) -> (R)"]


def test_a_collective_brings_as_many_bytes_as_messages_do() -> None:
    for text in ("S0, R", "P, R", "P, S1"):
        before, after = (Layout((8,), parse_placements(each), (64, 64)) for each in text.split(", "))
        (found,) = (steps for steps in candidates(before, after, CUDA, "float32") if steps[-1].collective)
        told = explain_layouts(before, after, 4, CUDA, dtype="float32")
        fewest = explain_layouts(before, after, 4, replace(CUDA, one_shot_bytes=0))
        assert found[-1].collective is not None
        assert found[-1].collective.moved_elements * 4 == fewest.received_bytes
        assert told.reason is not None


def test_explanations_say_which_form_was_taken_and_why() -> None:
    rows, whole = (Layout((8,), parse_placements(text), (4096, 4096)) for text in ("S1", "R"))
    found = explain_layouts(rows, whole, 4, replace(CUDA, collective_speedup=2.0), dtype="float32")
    (step,) = found.steps
    assert (step.kind, step.num_received, step.packed_bytes, step.staged_bytes) == ("all_gather", 7, 0, 4096 * 4096 * 4)
    assert found.reason == "all_gather of NCCL: 177 us predicted against 264 us for messages of our own"
    slow = explain_layouts(rows, whole, 4, CUDA, dtype="float32")
    assert slow.steps[0].kind == "exchange"
    assert slow.reason == "messages of our own: 264 us predicted against 274 us for all_gather of NCCL"
    assert explain_layouts(rows, whole, 4, CostTable()).reason is None


def test_registered_memory_is_a_form_where_prices_offer_it() -> None:
    columns, rows, whole = (Layout((8,), parse_placements(text), (256, 256)) for text in ("S1", "S0", "R"))
    costs = replace(CUDA, registered_bytes=1 << 20)
    found = explain_layouts(columns, whole, 4, costs, dtype="float32")
    assert found.reason == (
        "all_gather of NCCL through registered memory: 25 us predicted against 30 us for messages of our own"
    )
    (step,) = found.steps
    assert (step.packed_bytes, step.staged_bytes) == (256 * 32 * 4, 256 * 256 * 4)
    assert found.received_bytes == explain_layouts(columns, whole, 4, CUDA).received_bytes
    # Copies take more than the hops that are saved, and what does not fit goes without.
    assert explain_layouts(rows, whole, 4, costs, dtype="float32").reason == (
        "all_gather of NCCL: 20 us predicted against 30 us for messages of our own"
    )
    small = replace(costs, registered_bytes=256 * 288 * 4)
    told = explain_layouts(columns, whole, 4, small, dtype="float32").reason
    assert told == "messages of our own: 30 us predicted against 35 us for all_gather of NCCL"
    # Between hosts a ring's hops stay.
    outside = explain_layouts(columns, whole, 4, replace(costs, ranks_per_host=4), dtype="float32").steps
    assert [step.kind for step in outside] == ["exchange"]
