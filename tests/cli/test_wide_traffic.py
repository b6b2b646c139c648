"""Traffic that is counted by fans is what listing every message gives, and more than can be listed is counted."""

import pytest

from tritondt.cli.wide_traffic import WideTraffic, fans
from tritondt.errors import LayoutError
from tritondt.planning.cost import CostTable
from tritondt.planning.plan import Plan
from tritondt.planning.planner import make_plan
from tritondt.planning.topology import link_loads, parse_topology
from tritondt.planning.traffic import rank_totals, rank_traffic
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements

TOPOLOGIES = ("fat-tree:2,2", "rail-optimised:3", "rail-optimised:4", "dragonfly:2,1,2", "dragonfly:3,1,2")
CASES = [
    ((12,), "S0", "S1", (7, 15)),
    ((12,), "S0", "R", (5, 2)),
    ((12,), "S0(sizes=5/0/3/0/0/1/0/9/2/0/1/1)", "S0", (22,)),
    ((12,), "P", "R", (7, 9)),
    ((12,), "P", "S1", (7, 30)),
    ((12,), "S0(unit=2)", "S0", (50, 2)),
    ((3, 4), "S0,R", "R,S0", (10, 3)),
    ((3, 4), "S0,S0", "S1,R", (13, 6)),
    ((3, 4), "S0,S1", "S1,S0", (13, 6)),
    ((3, 4), "P,R", "R,S0", (13, 6)),
    ((3, 4), "S0,P", "R,R", (13, 6)),
    ((3, 4), "P,P", "R,R", (5, 7)),
    ((3, 4), "R,S1", "P,R", (5, 7)),
    ((2, 2, 3), "S0,R,S1", "S1,S0,R", (9, 8)),
]


def plan_of(mesh: tuple[int, ...], source: str, target: str, shape: tuple[int, ...]) -> Plan:
    before, after = (Layout(mesh, parse_placements(text), shape) for text in (source, target))
    return make_plan(before, after, 4, CostTable())


@pytest.mark.parametrize(("mesh", "source", "target", "shape"), CASES)
def test_blocks_and_links_are_those_of_all_messages(mesh, source, target, shape):
    plan = plan_of(mesh, source, target, shape)
    listed, wide = rank_traffic(plan, 4), WideTraffic(plan, 4)
    assert listed.links
    for most in (12, 5, 1):
        assert wide.blocks(most) == listed.blocks(most)
    for text in TOPOLOGIES:
        topology = parse_topology(text)
        expected = {link: num_bytes for link, num_bytes in link_loads(listed, topology).items() if num_bytes}
        assert wide.link_loads(topology) == expected
    assert wide.spreads == listed.spreads


def test_messages_that_are_not_listed_are_counted():
    plan = plan_of((4096,), "S0", "S1", (4100, 4099))  # 16,773,120 messages
    sent = rank_totals(plan, 4).sent
    wide = WideTraffic(plan, 4)
    rows, size = wide.blocks(64)
    assert [sum(row) for row in rows] == [sum(sent[start : start + size]) for start in range(0, 4096, size)]
    loads = wide.link_loads(parse_topology("rail-optimised:8"))
    assert sum(num_bytes for link, num_bytes in loads.items() if link.kind in ("host out", "card out")) == sum(sent)
    assert len(list(fans(plan, 4))) <= 4


def test_what_is_too_much_even_so_is_refused(monkeypatch):
    plan = plan_of((12,), "S0(unit=2)", "S0", (50, 2))
    monkeypatch.setattr("tritondt.planning.traffic.MOST_PAIRS", 10)
    with pytest.raises(LayoutError, match="more than 10 different pairs of parts"):
        WideTraffic(plan, 4).blocks(4)
    monkeypatch.setattr("tritondt.cli.wide_traffic.MOST_SWITCHES", 2)
    with pytest.raises(LayoutError, match=r"has 3 switches for 12 ranks; at most 2 are allowed"):
        WideTraffic(plan, 4).link_loads(parse_topology("fat-tree:2,2"))
