"""The exchange as a pure function: every element arrives once per term, from one holder, and nothing else moves."""

import random
from math import prod
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.oracle.arithmetic import held_mask
from tests.harness.oracle.delivery import arrived_terms, assert_both_sides_agree, whole_terms
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_pair, random_placements, random_shape
from tests.harness.work import num_calls
from tritondt.planning.cost import CostTable
from tritondt.planning.exchange import Exchange, Message, Route, exchange, exchange_across, merge
from tritondt.planning.planner import make_plan
from tritondt.sharding.layout import Layout

PAIRS_PER_TEST = 150


def exchanges_of(source: Layout, target: Layout) -> dict[int, Exchange]:
    """The exchanges of all ranks of a mesh by position."""
    return {source.position(coordinate): exchange(source, target, coordinate) for coordinate in source.coordinates()}


def mask_of(layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    return held_mask(layout.mesh_shape, layout.placements, layout.shape, coordinate, layout.order)


def without_partial(layout: Layout) -> Layout:
    return layout.with_placements([T.Replicate() if item.is_partial() else item for item in layout.placements])


@pytest.mark.parametrize("chunk", range(4))
def test_every_rank_receives_exactly_what_it_lacks(chunk: int) -> None:
    for seed in range(chunk * PAIRS_PER_TEST, (chunk + 1) * PAIRS_PER_TEST):
        source, target = map(without_partial, random_pair(random.Random(seed), torch.float32))
        exchanges = exchanges_of(source, target)
        assert_both_sides_agree(exchanges)
        whole = torch.arange(source.numel).view(source.shape)
        for position, found in exchanges.items():
            coordinate = source.coordinate(position)
            wanted, held = mask_of(target, coordinate), mask_of(source, coordinate)
            _, times = arrived_terms(found, position, lambda rank, whole=whole: whole, source.shape, 1)  # type: ignore[misc]
            assert torch.equal(times[0], wanted.long()), (source, target, coordinate)
            received = sum(message.numel for message in found.receives)
            assert received == int((wanted & ~held).sum()), (source, target, coordinate)


def test_peers_are_served_in_the_order_around_the_ring() -> None:
    """So that no rank is everybody's first."""
    source, target = (Layout((5,), T.parse_placements(text), (10, 10)) for text in ("S0", "S1"))
    assert [message.peer for message in exchange(source, target, (2,)).sends] == [3, 4, 0, 1]


def test_the_holder_at_the_receivers_own_index_serves_it() -> None:
    source, target = (Layout((2, 3), T.parse_placements(text), (6,)) for text in ("R, S0", "R, R"))
    found = exchange(source, target, (1, 0))
    assert [source.coordinate(message.peer)[0] for message in found.receives] == [1, 1]


@pytest.mark.parametrize("chunk", range(4))
def test_between_meshes_everything_arrives_once(chunk: int) -> None:
    """Meshes that share all, some or no ranks, in any order; terms of a Partial included."""
    for seed in range(chunk * PAIRS_PER_TEST, (chunk + 1) * PAIRS_PER_TEST):
        check_across(random.Random(seed))


def check_across(chosen: random.Random) -> None:
    shape = random_shape(chosen)
    meshes = [chosen.choice(MESH_SHAPES[chosen.randint(1, 6)]) for _ in range(2)]
    sides = [random_placements(chosen, mesh_shape, shape, torch.int64) for mesh_shape in meshes]
    source, target = (
        Layout(mesh_shape, placements, shape, order)
        for mesh_shape, (placements, order) in zip(meshes, sides, strict=True)
    )
    source_ranks, target_ranks = (chosen.sample(range(8), prod(mesh_shape)) for mesh_shape in meshes)
    exchanges = {rank: exchange_across(source, source_ranks, target, target_ranks, rank) for rank in range(8)}
    assert_both_sides_agree(exchanges)
    route = Route(source, target, source_ranks, target_ranks)
    terms = whole_terms(source.mesh_shape, shape, route.reduced_axes)

    def terms_of(rank: int) -> torch.Tensor:
        if rank not in source_ranks:
            return torch.zeros(shape, dtype=torch.int64)
        coordinate = source.coordinate(source_ranks.index(rank))
        return terms[tuple(coordinate[axis] for axis in route.reduced_axes)]

    for rank, found in exchanges.items():
        values, times = arrived_terms(found, rank, terms_of, shape, len(terms))
        if rank not in target_ranks:
            assert not found.receives
            assert not found.keeps
            continue
        coordinate = target.coordinate(target_ranks.index(rank))
        wanted = mask_of(target, coordinate) & (not route.takes_nothing(coordinate))
        assert torch.equal(times, wanted.long().expand(len(terms), *shape)), (source, target, rank)
        for term, arrived in zip(terms.values(), values, strict=True):
            torch.testing.assert_close(arrived, term * wanted, rtol=0, atol=0)
        if len(terms) == 1:
            own = mask_of(source, source.coordinate(source_ranks.index(rank))) if rank in source_ranks else None
            lacking = wanted if own is None else wanted & ~own
            assert sum(message.numel for message in found.receives) == int(lacking.sum()), (source, target, rank)


def test_new_ranks_are_dealt_out_among_the_holders() -> None:
    """Four ranks hold all; eight others want it: each holder serves two."""
    source = Layout((4,), (T.Replicate(),), (12,))
    target = Layout((8,), (T.Replicate(),), (12,))
    servers, others = range(4), range(4, 12)
    found = [exchange_across(source, servers, target, others, rank) for rank in servers]
    assert [len(item.sends) for item in found] == [2, 2, 2, 2]


def listed(messages: tuple[Message, ...]) -> set[tuple[Any, ...]]:
    """All parts of some messages: peer, tensor, region, contribution."""
    return {(item.peer, part.tensor, part.region, part.contribution) for item in messages for part in item.parts}


@pytest.mark.parametrize("seed", range(40))
def test_merging_makes_one_message_per_peer(seed: int) -> None:
    chosen = random.Random(seed)
    mesh_shape = chosen.choice(MESH_SHAPES[chosen.randint(2, 6)])
    pairs = []
    for _ in range(chosen.randint(1, 4)):
        shape = random_shape(chosen)
        sides = [random_placements(chosen, mesh_shape, shape, torch.float32) for _ in range(2)]
        source, target = (without_partial(Layout(mesh_shape, side[0], shape, side[1])) for side in sides)
        pairs.append((source, target))
    itemsizes = [chosen.choice((1, 2, 4, 8, 16)) for _ in pairs]
    single = [exchanges_of(*pair) for pair in pairs]
    size = prod(mesh_shape)
    merged = {rank: merge([found[rank] for found in single], rank, itemsizes) for rank in range(size)}
    assert_both_sides_agree(merged)
    for rank, found in merged.items():
        for tensor, exchanges in enumerate(single):
            for side in ("sends", "receives"):
                together = {item for item in listed(getattr(found, side)) if item[1] == tensor}
                alone = {(peer, tensor, *rest) for peer, _, *rest in listed(getattr(exchanges[rank], side))}
                assert together == alone
            assert [part.region for part in found.keeps if part.tensor == tensor] == [
                part.region for part in exchanges[rank].keeps
            ]
        assert found.contributions == (1,) * len(single)
        for message in (*found.sends, *found.receives):
            start = 0
            for part in message.parts:
                assert start % itemsizes[part.tensor] == 0, "a part starts off its own size"
                start += part.numel * itemsizes[part.tensor]


@pytest.mark.parametrize(
    ("source", "target"),
    [("S0, S1", "S1, S0"), ("S0, S0", "S0, R"), ("R, S0", "S1, S0"), ("P, S0", "S0, S0"), ("S0(unit=2), R", "S0, S1")],
)
def test_a_coordinate_of_65536_ranks_is_planned_without_the_others(source: str, target: str) -> None:
    def plan() -> None:
        plan_one_rank(source, target)

    calls = num_calls(plan)
    assert calls < 65_536 // 2, f"{calls} calls"


def plan_one_rank(source: str, target: str) -> None:
    before, after = (Layout((256, 256), T.parse_placements(text), (1 << 17, 1 << 17)) for text in (source, target))
    plan = make_plan.__wrapped__(before, after, 4, CostTable(ranks_per_host=8))
    for step in plan.steps:
        found = step.exchange((17, 203))
        assert len(found.receives) <= 256 * 256
