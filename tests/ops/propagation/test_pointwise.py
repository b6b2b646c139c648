"""Elementwise operators, broadcasting, and what passes pending sums through."""

import pytest
import torch

import tritondt as T
from tests.ops.sharded import Case, check
from tritondt.comm.transports.threads import run_ranks

X, Y, ROW = torch.randn(7, 5), torch.randn(7, 5), torch.randn(5)


@pytest.mark.parametrize(
    ("function", "placements", "expect"),
    [
        (lambda x, y: x + y, ("S0", "S0"), "S0"),
        (lambda x, y: x * y, ("S0(sizes=4/0/3)", "R"), "S0(sizes=4/0/3)"),
        (lambda x, y: x + y, ("S1(unit=5)", "S1(unit=5)"), "S1(unit=5)"),
        (lambda x, y: x + y, ("P", "P"), "P"),
        (lambda x, y: x - y, ("P(avg)", "P(avg)"), "P(avg)"),
        (lambda x, y: x * y, ("P", "R"), "P"),
        (lambda x, y: x * y, ("R", "P"), "P"),
        (lambda x, y: x / y, ("P", "R"), "P"),
        (lambda x, y: x * y, ("P", "P"), "P"),
        (lambda x, y: torch.relu(x) + y, ("P", "R"), "R"),
        (lambda x, y: x + 1 + y, ("S0", "S0"), "S0"),
        (lambda x, y: torch.where(x > 0, x, y), ("S1", "R"), "S1"),
    ],
)
def test_placements_pass_through(function, placements, expect):
    check(function, Case((3,), (X, Y), placements), gradients=True, expect=expect)


def test_an_argument_that_broadcasts_stays_whole_along_what_it_lacks():
    check(lambda x, row: x + row, Case((3,), (X, ROW), ("S0", "R")), gradients=True, expect="S0")
    check(lambda x, row: x * row, Case((3,), (X, ROW), ("S1", "R")), gradients=True, expect="S1")
    check(lambda x, row: x * row, Case((2, 2), (X, ROW), ("S0, S1", "R, S0")), gradients=True, expect="S0, S1")


def test_arguments_that_differ_meet_where_fewest_bytes_move():
    def body(rank):
        mesh = T.Mesh((2,))
        small = T.DTensor.from_local(torch.ones(4, 8), mesh, [T.Shard(0)])
        other = T.DTensor.from_local(torch.ones(8, 4), mesh, [T.Shard(1)])
        total = small + other
        assert isinstance(total, T.DTensor)
        assert total.placements == (T.Shard(0),)
        small.add_(other)
        assert small.placements == (T.Shard(0),)

    run_ranks(2, body)
