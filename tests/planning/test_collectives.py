"""Which redistributions are a collective of NCCL: decided by layouts, dtype and prices, and explained."""

from dataclasses import replace

import pytest

from tritondt.planning.collectives import ALL, EXACT, NONE, WIDE, Collective, collective_between, is_offered
from tritondt.planning.cost import CostTable
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
        ("S0, R", "R, R", (4, 2), None),  # along one axis of two
        ("S0, S1", "R, R", (2, 2), None),
        ("P, R", "S0, R", (4, 2), None),
        ("P, P", "R, R", (4, 1), None),
    ],
)
def test_layouts_that_a_collective_connects(source: str, target: str, mesh: tuple[int, ...], found: str | None) -> None:
    assert between(source, target, mesh=mesh) == found


def test_uneven_blocks_and_blocks_in_another_order_have_none() -> None:
    assert between("S0", "R", (9, 12)) is between("P", "S0", (9, 12)) is between("S0", "R", (0, 12)) is None
    order = Layout((2, 4), parse_placements("S0, S0"), (8, 12), order=(1, 0))
    assert collective_between(order, order.with_placements(parse_placements("R, R"))) is None
    assert between("P", "R", (9, 13)) == "all_reduce sum 1 True"  # whole tensors are alike everywhere


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
