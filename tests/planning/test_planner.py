"""Plans: the same on every rank, priced without a rank's own view, within bounds of memory and of bytes."""

import os
import random
import subprocess
import sys
from itertools import product
from math import prod

import pytest
import torch

import tritondt as T
from tests.harness.oracle.random_layouts import random_pair, random_placements
from tritondt.comm.transports.threads import run_ranks
from tritondt.planning import planner
from tritondt.planning.cost import CostTable, Link, step_cost
from tritondt.planning.flat_pieces import FlatPieces
from tritondt.planning.plan import Plan, Step
from tritondt.planning.planner import make_plan
from tritondt.sharding.layout import Layout

NUM_PAIRS = 1000
TABLES = (CostTable(), CostTable(max_peers=1), CostTable(ranks_per_host=2, host=Link(1e-3, 1e7), copy_bandwidth=1e8))


def skewed_pair(seed: int) -> tuple[Layout, Layout]:
    """Layouts of one tensor whose pieces differ much in size: what each rank sees of it is different."""
    chosen = random.Random(seed)
    if seed % 2:
        return random_pair(chosen, torch.float32)
    mesh_shape = chosen.choice(((4,), (8,), (2, 3), (2, 2, 2)))
    shape = chosen.randint(0, 17), chosen.randint(1, 17)
    heap = chosen.randrange(mesh_shape[0])
    sizes = tuple(shape[0] if index == heap else 0 for index in range(mesh_shape[0]))
    rest = [T.Replicate() for _ in mesh_shape[1:]]
    source = Layout(mesh_shape, (T.Shard(0, sizes=sizes), *rest), shape)
    placements, order = random_placements(chosen, mesh_shape, shape, torch.float32)
    target = Layout(mesh_shape, placements, shape, order)
    return (source, target) if chosen.random() < 0.5 else (target, source)


def fresh_plan(source: Layout, target: Layout, costs: CostTable) -> Plan:
    """The plan, made anew."""
    return make_plan.__wrapped__(source, target, 4, costs)


def plan_digest(num_pairs: int) -> str:
    """All plans of many pairs as text."""
    plans = (fresh_plan(*skewed_pair(seed), TABLES[seed % 3]) for seed in range(num_pairs))
    return "\n".join(map(str, plans))


def test_every_rank_makes_the_same_plan() -> None:
    """The first, the last and some other rank of each mesh plan with their own specs and nothing remembered."""

    def body(rank: int) -> list[str]:
        found = []
        for seed in range(NUM_PAIRS):
            pair = skewed_pair(seed)
            size = pair[0].num_ranks
            if rank not in {0, seed % size, size - 1}:
                found.append("")
                continue
            mesh = T.Mesh(pair[0].mesh_shape)
            meta = T.TensorMeta.contiguous(pair[0].shape)
            source, target = (T.DTensorSpec(mesh, side.placements, meta, side.order) for side in pair)
            assert source.layout is pair[0]
            found.append(str(fresh_plan(source.layout, target.layout, TABLES[seed % 3])))
        return found

    for seed, plans in enumerate(zip(*run_ranks(8, body), strict=True)):
        assert len({plan for plan in plans if plan}) == 1, skewed_pair(seed)


@pytest.mark.extended
def test_a_process_with_other_hashes_makes_the_same_plans() -> None:
    """Ranks of a job do not share PYTHONHASHSEED: the order of a set must decide nothing."""
    code = "from tests.planning.test_planner import plan_digest; print(plan_digest(300))"
    other = {**os.environ, "PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == plan_digest(300)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 4), (2, 2, 2)])
def test_prices_hold_for_the_busiest_rank_where_pieces_are_equal(mesh_shape: tuple[int, ...]) -> None:
    """A price takes no coordinate, and so cannot differ between ranks: bytes are exact here, peers a bound."""
    plain = (T.Replicate(), T.Shard(0), T.Shard(1))
    sources = product((*plain, T.Partial()), repeat=len(mesh_shape))
    pairs = list(product(sources, product(plain, repeat=len(mesh_shape))))
    for placements in random.Random(0).sample(pairs, min(len(pairs), 250)):
        source, target = (Layout(mesh_shape, side, (16, 16)) for side in placements)
        for step in fresh_plan(source, target, CostTable()).steps:
            cost, peers, received = step_cost(step, 4, CostTable()), 0, 0
            for coordinate in source.coordinates():
                found = step.exchange(coordinate)
                peers = max(peers, len(found.receives), len(found.sends))
                received = max(received, sum(message.numel for message in found.receives))
            if isinstance(step.target, FlatPieces):  # how much of one a rank has already, the price only guesses
                most = step.route.contributions * step.target.max_local_numel
                assert max(cost.received_elements, received) <= most, f"{step} on {mesh_shape}"
            else:
                assert received == pytest.approx(cost.received_elements), f"{step} on {mesh_shape}"
            assert peers <= cost.num_peers, f"{step} on {mesh_shape}"


@pytest.mark.parametrize("chunk", range(4))
def test_steps_that_nobody_runs_are_local_and_local_ones_run_for_nobody(chunk: int) -> None:
    for seed in range(chunk * 100, (chunk + 1) * 100):
        source, target = random_pair(random.Random(seed), torch.float32)
        for step in fresh_plan(source, target, CostTable()).steps:
            if step.kind in ("local", "scale"):
                for coordinate in source.coordinates():
                    found = step.exchange(coordinate)
                    assert not found.sends, str(step)
                    assert not found.receives, str(step)


@pytest.mark.parametrize("chunk", range(4))
def test_no_step_holds_more_than_source_and_target(chunk: int) -> None:
    """With few peers allowed, plans take several hops; none passes through a larger layout."""
    for seed in range(chunk * 150, (chunk + 1) * 150):
        source, target = random_pair(random.Random(seed), torch.float32)
        limit = max(largest(source), largest(target))
        for step in fresh_plan(source, target, TABLES[seed % 2]).steps:
            assert largest(step.target_layout) <= limit, f"{step} of {source.shape} on {source.mesh_shape}"


def largest(layout: Layout) -> int:
    return max(prod(layout.local_shape(coordinate)) for coordinate in layout.coordinates())


def kinds(source: str, target: str, shape: tuple[int, ...] = (64, 64), costs: CostTable | None = None) -> list[str]:
    before, after = (Layout((4, 4), T.parse_placements(text), shape) for text in (source, target))
    return [step.kind for step in fresh_plan(before, after, costs or CostTable()).steps]


def test_plans_have_the_steps_that_the_bytes_ask_for() -> None:
    assert kinds("S0, S1", "S0, S1") == []
    assert kinds("R, R", "S0, S1") == ["local"]
    assert kinds("S0, R", "R, S1") == ["exchange"]
    assert kinds("P, S0", "S1, S0") == ["reduce"]
    assert kinds("P, S0", "R, S0") == ["reduce", "gather"]
    assert kinds("P, R", "P(avg), R") == ["scale"]
    assert kinds("P(avg), S0", "P(sum), R") == ["scale", "exchange"]
    assert kinds("R, R", "P, R") == ["local"]


def test_more_peers_than_allowed_make_several_hops() -> None:
    few = CostTable(max_peers=8)
    assert kinds("S0, S0", "S1, S1", costs=CostTable()) == ["exchange"]
    found = kinds("S0, S0", "S1, S1", costs=few)
    assert len(found) > 1
    source, target = (Layout((4, 4), T.parse_placements(text), (64, 64)) for text in ("S0, S0", "S1, S1"))
    for step in fresh_plan(source, target, few).steps:
        assert step_cost(step, 4, few).num_peers <= 8


def test_plans_are_remembered() -> None:
    source, target = (Layout((2,), T.parse_placements(text), (77,)) for text in ("S0", "R"))
    assert make_plan(source, target, 4, CostTable()) is make_plan(source, target, 4, CostTable())


def test_layouts_of_other_tensors_or_meshes_are_refused() -> None:
    layout = Layout((2,), (T.Shard(0),), (4, 4))
    with pytest.raises(T.LayoutError, match=r"source has shape \(4, 4\), the target \(4, 5\); they must be equal"):
        planner.check_pair(layout, Layout((2,), (T.Shard(0),), (4, 5)))
    with pytest.raises(
        T.MeshError, match=r"source mesh has shape \(2,\), the target mesh \(2, 1\); they must be equal"
    ):
        planner.check_pair(layout, Layout((2, 1), (T.Shard(0), T.Replicate()), (4, 4)))


def test_cost_tables_travel_as_text() -> None:
    table = CostTable(max_peers=7, host=Link(1e-4, 3e9))
    assert CostTable.from_json(table.to_json()) == table
    assert table.fingerprint != CostTable().fingerprint


def test_the_slowest_link_inside_a_group_is_its_price() -> None:
    table = CostTable(ranks_per_device=2, ranks_per_host=8)
    assert [table.link(span) for span in (1, 2, 4, 8, 16)] == [
        table.device, table.device, table.host, table.host, table.network,
    ]  # fmt: skip


def test_a_step_is_what_it_says() -> None:
    source, target = (Layout((2,), T.parse_placements(text), (4,)) for text in ("P(avg)", "S0"))
    step = Step("reduce", source, target)
    assert (step.reduce_op, step.divisor, step.moving_axes, str(step)) == ("sum", 2, (0,), "reduce (P(avg)) -> (S0)")
