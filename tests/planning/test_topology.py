"""Loads of links: paths that hold together, bytes that no link loses, and what the transports count at the ends."""

import random
from collections import Counter
from itertools import permutations

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import LayoutError
from tritondt.planning.cost import CostTable
from tritondt.planning.planner import make_plan
from tritondt.planning.topology import (
    Dragonfly,
    FatTree,
    RailOptimised,
    Topology,
    link_loads,
    loads_by_kind,
    parse_topology,
    path,
)
from tritondt.planning.traffic import rank_traffic
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements

TOPOLOGIES: list[Topology] = [FatTree(2, 2), RailOptimised(4), Dragonfly(1, 2, 2), Dragonfly(2, 1, 3)]


def kinds(topology, sender, receiver):
    return [link.kind for link in path(topology, sender, receiver)]


def test_paths_are_the_shortest_that_a_topology_has():
    tree, rails, fly = FatTree(2, 2), RailOptimised(2), Dragonfly(1, 1, 2)
    assert kinds(tree, 0, 1) == ["host out", "host in"]
    assert kinds(tree, 0, 3) == ["card out", "card in"]
    assert kinds(tree, 0, 4) == ["card out", "leaf up", "leaf down", "card in"]
    assert kinds(rails, 0, 6) == ["card out", "card in"]
    assert kinds(rails, 0, 5) == ["card out", "rail up", "rail down", "card in"]
    # Groups {0, 1}, {2, 3}, {4, 5}: from group 0 to group 1 by way of routers 1 and 2.
    assert list(path(fly, 0, 3))[1:-1] == [("in group", 0, 1), ("between groups", 0, 1), ("in group", 2, 3)]
    assert kinds(fly, 1, 2) == ["card out", "between groups", "card in"]
    assert kinds(fly, 0, 1) == ["card out", "in group", "card in"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_path_leaves_at_the_sender_and_arrives_at_the_receiver(topology):
    for sender, receiver in permutations(range(12), 2):
        links = list(path(topology, sender, receiver))
        assert links[0].source == sender
        assert links[-1].target == receiver
        assert len(set(links)) == len(links)


def test_loads_at_the_ends_are_what_the_transports_count():
    rng = random.Random(1)
    for topology in TOPOLOGIES:
        texts = [",".join(rng.choices(["S0", "S1", "R"], k=2)) for _ in range(2)]
        shape = (rng.randrange(3, 9), rng.randrange(3, 9))

        def count_on(rank: int) -> tuple[int, int]:
            meta = T.TensorMeta.contiguous(shape)  # noqa: B023  called at once
            source, target = (T.DTensorSpec(T.Mesh((2, 2)), parse_placements(text), meta) for text in texts)  # noqa: B023
            T.redistribute(torch.ones(source.local_shape), source, target)
            counted = T.comm.world.current().communicator(range(4)).traffic
            return counted.sent_bytes, counted.received_bytes

        layouts = [Layout((2, 2), parse_placements(text), shape) for text in texts]
        loads = link_loads(rank_traffic(make_plan(*layouts, 4, CostTable(ranks_per_host=4)), 4), topology)
        ends: Counter[tuple[int, str]] = Counter()
        for link, num_bytes in loads.items():
            if link.kind in ("host out", "card out"):
                ends[link.source, "sent"] += num_bytes
            if link.kind in ("host in", "card in"):
                ends[link.target, "received"] += num_bytes
        found = [(ends[rank, "sent"], ends[rank, "received"]) for rank in range(4)]
        assert run_ranks(4, count_on) == found, (topology, texts, shape)


def test_what_crosses_the_core_of_a_tree_is_what_its_leaves_send_to_others():
    layouts = [Layout((8,), parse_placements(text), (16, 8)) for text in ("S0", "S1")]
    traffic = rank_traffic(make_plan(*layouts, 4, CostTable()), 4)
    found = loads_by_kind(link_loads(traffic, FatTree(2, 2)))
    across = sum(num_bytes for (one, other), num_bytes in traffic.links.items() if one // 4 != other // 4)
    assert found["leaf up"][0].total == found["leaf down"][0].total == across
    assert found["leaf up"][0].most == across / 2


@pytest.mark.parametrize("text", ["ring:4", "fat-tree", "fat-tree:8", "rail-optimised:0", "dragonfly:2,2,x"])
def test_a_topology_that_cannot_be_read_is_refused(text):
    with pytest.raises(LayoutError, match=f"cannot read the topology '{text}'; allowed are fat-tree:RANKS_PER_HOST"):
        parse_topology(text)
