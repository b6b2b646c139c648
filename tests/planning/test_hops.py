"""Plans of several hops, taken where one hop would have too many peers."""

import random

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.planning.cost import CostTable, step_cost
from tritondt.planning.planner import make_plan
from tritondt.redistribution.compile import plan_for
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements

PAIRS = [
    ("S0,S0", "S1,S1"),
    ("S0,S1", "S1,S0"),
    ("R,R", "S0,S1"),
    ("S0,S1", "R,R"),
    ("P,P", "R,R"),
    ("P,P", "S0,S1"),
    ("P,S0", "S1,R"),
    ("P,P", "S1,S1"),
    ("S1,S0", "P,S1"),
    ("P(avg),P", "R,S0"),
]


def large(text, mesh_shape=(256, 256)):
    return Layout(mesh_shape, parse_placements(text), (1 << 20, 1 << 20))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_above_max_peers_no_step_has_more_peers_than_one_axis(source, target):
    costs = CostTable()
    plan = make_plan(large(source), large(target), 2, costs)
    assert all(step_cost(step, 2, costs).num_peers <= costs.max_peers for step in plan.steps)


def test_one_hop_below_max_peers():
    plan = make_plan(large("S0,S0", (8, 8)), large("S1,S1", (8, 8)), 2, CostTable())
    assert [step.kind for step in plan.steps] == ["exchange"]


def test_hops_never_hold_more_than_source_or_target():
    source, target = large("S0,S0"), large("S1,S1")
    for step in make_plan(source, target, 2, CostTable()).steps:
        assert step.target.max_local_numel <= max(source.max_local_numel, target.max_local_numel)


@pytest.mark.parametrize("shape", [(5, 7), (1, 9), (8, 8), (0, 3)])
def test_hops_move_the_same_values(shape):
    rng = random.Random(str(shape))
    full = torch.tensor([float(rng.randrange(-8, 8)) for _ in range(shape[0] * shape[1])]).reshape(shape)

    def body(rank):
        mesh = T.Mesh((2, 3))
        meta = T.TensorMeta.contiguous(shape)
        whole = T.DTensorSpec(mesh, parse_placements("R,R"), meta)
        num_steps = 0
        for source_text, target_text in PAIRS:
            source = T.DTensorSpec(mesh, parse_placements(source_text), meta)
            target = T.DTensorSpec(mesh, parse_placements(target_text), meta)
            num_steps = max(num_steps, len(plan_for(source, target).steps))
            local = T.redistribute(full, whole, source)
            result = T.redistribute(T.redistribute(local, source, target), target, whole)
            torch.testing.assert_close(result, full, rtol=0, atol=0)
        return num_steps

    assert min(run_ranks(6, body, costs=CostTable(max_peers=2))) >= 2
