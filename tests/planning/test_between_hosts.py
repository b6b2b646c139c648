"""Plans that know hosts: the fewest elements between these, counted element by element, in equal shares."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.harness.oracle.across_cases import random_across_case
from tests.harness.oracle.cases import parsed
from tests.harness.oracle.random_layouts import random_pair
from tritondt.planning.across import make_plan_across
from tritondt.planning.between_hosts import HostStep, MeshRanks
from tritondt.planning.cost import CostTable
from tritondt.planning.exchange import Exchange
from tritondt.planning.explain import explain_layouts
from tritondt.planning.planner import between_hosts, candidates, is_near, least_between_hosts, make_plan
from tritondt.planning.prices import CUDA
from tritondt.planning.traffic import crossing_elements, elements_between_hosts
from tritondt.sharding.layout import Coordinate, Layout
from tritondt.sharding.placement import Partial, parse_placements

ONE_AXIS = [("S0", "R"), ("S1", "R"), ("P", "R"), ("P", "S0"), ("S0", "S1"), ("P(max)", "S1")]


def layouts_of(mesh_shape: tuple[int, ...], shape: tuple[int, ...], *texts: str) -> list[Layout]:
    return [Layout(mesh_shape, parse_placements(text), shape) for text in texts]


def elements(layout: Layout, coordinate: Coordinate) -> set[tuple[int, ...]]:
    return {index for box in layout.boxes(coordinate) for index in product(*(range(*interval) for interval in box))}


def elements_on_hosts(layout: Layout, hosts: Sequence[int]) -> dict[int, set[tuple[int, ...]]]:
    """Elements that each host's ranks have together; `hosts` are those of all coordinates in order."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for host, coordinate in zip(hosts, layout.coordinates(), strict=True):
        found.setdefault(host, set()).update(elements(layout, coordinate))
    return found


def check_exchanges(exchanges: Mapping[int, Exchange]) -> None:
    """Every rank is sent what it receives."""
    for rank, found in exchanges.items():
        for message in found.receives:
            back = [sent for sent in exchanges[message.peer].sends if sent.peer == rank]
            assert [sent.parts for sent in back] == [message.parts]
    assert sum(len(found.sends) for found in exchanges.values()) == sum(len(it.receives) for it in exchanges.values())


def least_by_elements(source: Layout, target: Layout, hosts: tuple[int, ...]) -> int:
    """Elements that hosts lack and ranks want; with terms on one axis, the messages that bring each sum together."""
    held, wanted = elements_on_hosts(source, hosts), elements_on_hosts(target, hosts)
    if not source.axes_where(Partial):
        return sum(len(wanted[host] - held[host]) for host in held)
    found = 0
    for index in set().union(*wanted.values()):
        having = {host for host in held if index in held[host]}
        wanting = {host for host in wanted if index in wanted[host]}
        if len(having) == 1:  # one host has all terms
            found += len(wanting - having)
        else:
            found += len(having) + len(wanting) - (2 if having & wanting else 1)
    return found


@pytest.mark.parametrize(
    "hosts", [(0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 1, 1), (0, 1, 2, 2, 1, 0, 0, 1)], ids=str
)
@pytest.mark.parametrize("pair", ONE_AXIS, ids="->".join)
def test_the_fewest_on_one_axis(pair: tuple[str, str], hosts: tuple[int, ...]) -> None:
    source, target = layouts_of((8,), (13, 9), *pair)
    least = least_between_hosts(source, target, hosts)
    assert least == least_by_elements(source, target, hosts)
    assert between_hosts(make_plan(source, target, 4, CostTable(), "", hosts).steps, hosts) == least


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(40, 400))])
def test_no_random_plan_takes_more(seed: int) -> None:
    made = random.Random(seed)
    source, target = random_pair(made, torch.float32)
    hosts = tuple(made.randrange(3) for _ in range(source.num_ranks))
    costs, sides = CostTable(), (source.placements, target.placements)
    plan = make_plan(source, target, 4, costs, "", hosts)
    least = least_between_hosts(source, target, hosts)
    assert least is not None
    crossing = between_hosts(plan.steps, hosts)
    assert crossing <= between_hosts(make_plan(source, target, 4, costs).steps, hosts)
    if not any(isinstance(now, Partial) and not isinstance(was, Partial) for was, now in zip(*sides, strict=True)):
        assert crossing == least
    if not source.axes_where(Partial) and not target.axes_where(Partial):
        assert least == least_by_elements(source, target, hosts)
    for step in plan.steps:
        exchanges = {rank: step.exchange_of(rank) for rank in range(len(hosts))}
        check_exchanges(exchanges)
        if isinstance(step, HostStep) and is_near(step, hosts):
            for rank, found in exchanges.items():
                assert all(hosts[message.peer] == hosts[rank] for message in found.receives)


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(40, 1500))]
)
def test_no_random_plan_between_meshes_takes_more(seed: int) -> None:
    """Meshes that share all, some or no ranks, on up to three hosts."""
    made, case = random.Random(seed), random_across_case(seed, 8)
    source, target = (
        Layout(side.mesh_shape, parsed(side.placements), case.shape, side.order) for side in (case.source, case.target)
    )
    ranks = MeshRanks(case.source.ranks, case.target.ranks)
    hosts = tuple(made.randrange(3) for _ in ranks.either)
    host_of, sides = dict(zip(ranks.either, hosts, strict=True)), (source, ranks.source, target, ranks.target)
    plan = make_plan_across(*sides, 4, CostTable(), hosts)
    least = least_between_hosts(source, target, hosts, ranks)
    crossing = between_hosts(plan.steps, hosts, ranks.either)
    assert crossing == least
    assert crossing <= between_hosts(make_plan_across(*sides, 4, CostTable()).steps, hosts, ranks.either)
    if not source.axes_where(Partial) and not target.axes_where(Partial):
        held, wanted = (
            elements_on_hosts(layout, [host_of[rank] for rank in own])
            for layout, own in ((source, ranks.source), (target, ranks.target))
        )
        assert least == sum(len(elements - held.get(host, set())) for host, elements in wanted.items())
    for step in plan.steps:
        check_exchanges({rank: step.exchange_of(rank) for rank in ranks.either})
        if is_near(step, hosts, ranks.either):
            assert all(
                host_of[message.peer] == host_of[rank]
                for rank in ranks.either
                for message in step.exchange_of(rank).sends
            )


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(20, 1500))]
)
def test_crossing_elements_are_those_of_the_messages(seed: int) -> None:
    made = random.Random(seed)
    source, target = random_pair(made, torch.float32)
    hosts = tuple(made.randrange(3) for _ in range(source.num_ranks))
    forms = [*candidates(source, target, CostTable()), make_plan(source, target, 4, CostTable(), "", hosts).steps]
    for step in (step for steps in forms for step in steps):
        listed = elements_between_hosts((step,), hosts, range(len(hosts)))
        assert crossing_elements(step, hosts) == sum(listed.values())


def test_plans_of_2048_ranks_know_their_hosts() -> None:
    """Without a list of all messages, which would take a minute."""
    source, target = layouts_of((2048,), (4096, 16), "S0", "R")
    hosts = tuple(rank // 8 for rank in range(2048))
    steps = make_plan(source, target, 4, CostTable(), "", hosts).steps
    assert [type(step) for step in steps] == [HostStep, HostStep]


@pytest.mark.parametrize("pair", [("S0", "R"), ("S1", "R"), ("P", "R"), ("P", "S0")], ids="->".join)
def test_all_ranks_carry_equal_shares(pair: tuple[str, str]) -> None:
    source, target = layouts_of((12,), (48, 36), *pair)
    hosts = tuple(rank // 4 for rank in range(12))
    steps = make_plan(source, target, 4, CostTable(), "", hosts).steps
    carried = [0] * 12
    for step in steps:
        for rank, coordinate in enumerate(source.coordinates()):
            found = step.exchange(coordinate)
            carried[rank] += sum(it.numel for it in found.receives if hosts[it.peer] != hosts[rank])
    assert len(set(carried)) == 1, carried


def test_one_exchange_where_it_moves_as_little() -> None:
    source, target = layouts_of((8,), (16, 16), "S0", "S1")
    hosts = (0,) * 4 + (1,) * 4
    assert make_plan(source, target, 4, CostTable(), "", hosts) == make_plan(source, target, 4, CostTable())


def test_ranks_of_one_host_plan_as_ever() -> None:
    source, target = layouts_of((4,), (16, 16), "P", "R")
    assert make_plan(source, target, 4, CostTable(), "", (3, 3, 3, 3)) == make_plan(source, target, 4, CostTable())


def test_on_gpus_predicted_time_decides_and_collectives_come_first() -> None:
    """A large uneven gather goes in stages, a small one at once, an even one by NCCL, and explanations say why."""
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    kinds, reasons = [], []
    for side in (1001, 5, 1024):
        source, target = layouts_of((8,), (side, side), "S0", "R")
        found = explain_layouts(source, target, 4, CUDA, dtype="float32", hosts=hosts)
        kinds.append([step.kind for step in found.steps])
        reasons.append(found.reason)
    assert kinds == [["exchange", "exchange"], ["exchange"], ["all_gather"]]
    assert reasons == [
        "stages over hosts: 77 us predicted and 4,008,004 bytes between hosts, against 106 us and 16,032,016 bytes "
        "without them",
        None,
        "all_gather of NCCL: 45 us predicted against 108 us for messages of our own",
    ]
    # Where the link between hosts is as fast as the one inside, a stage has nothing to win.
    source, target = layouts_of((8,), (1001, 1001), "S0", "R")
    fast = explain_layouts(source, target, 4, replace(CUDA, network=CUDA.host), dtype="float32", hosts=hosts)
    assert [step.kind for step in fast.steps] == ["exchange"]
    # The rings of an all_gather pass each host once, and share what crosses.
    source, target = layouts_of((8,), (1024, 1024), "S0", "R")
    even = explain_layouts(source, target, 4, CUDA, dtype="float32", hosts=hosts)
    assert even.far_bytes * 8 == sum(row[2] for row in even.between_hosts) == 2 * 7 * 1024 * 1024 * 4 // 8
