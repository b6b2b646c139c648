"""Operators that gather, each with a reason, and those that are taken apart by us."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.sharded import Case, check, distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops.families.gathering import REASONS

X = torch.tensor([[3.0, -1.0, 2.0], [2.0, 0.0, 5.0], [-4.0, 2.0, 1.0], [7.0, 3.0, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize("placements", ["S0", "S1(sizes=3/0)", "R"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x > 0],
        lambda x: x[(x > 0).any(1)],
        lambda x: torch.masked_select(x, x > 1),
        lambda x: x.masked_scatter(x > 1, x),
        lambda x: torch.take(x.clone().put_((x[0] > 0).long(), x[1]), (x[0] > 0).long()),
    ],
)
def test_values_and_gradients_are_those_of_one_device(function, placements):
    check(function, Case((2,), (X,), (placements,)), gradients=True)


@pytest.mark.parametrize("placements", ["S0", "S1(sizes=3/0)", "P"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
        lambda x: torch.unique(x, return_counts=True),
        lambda x: x.median(),
        lambda x: torch.bincount((x + 4).long().flatten()),
        lambda x: torch.histogram(x, 4),
        lambda x: x.histc(4),
        lambda x: x.histc(4, -3, 3),
        lambda x: x.as_strided((2, 3), (1, 2)),
        lambda x: torch.as_strided_scatter(x, x[:2, :2], (2, 2), (5, 1)),
        lambda x: torch.unfold_copy(x, 0, 2, 1),
        lambda x: x[1].repeat_interleave((x[0] + 1).long()),
        lambda x: F.pdist(x),
        lambda x: torch.ops.aten.allclose(x, x + 1e-12),
        lambda x: torch.ops.aten.allclose(x, x + 1),
        lambda x: torch.block_diag(x, x[0], 2 * x.T),
        lambda x: x.norm(3, dim=1),
        lambda x: torch.isclose(x, x).all(),
    ],
)
def test_values_are_those_of_one_device(function, placements):
    check(function, Case((2,), (X,), (placements,)), strides=False)


def test_writing_where_a_mask_says():
    def function(x, values):
        y = x.clone()
        y[x > 2] = values
        return y

    check(function, Case((2,), (X, torch.arange(4.0, dtype=torch.float64)), ("S0", "R")), expect="S0")


def test_counts_in_given_bins_are_terms():
    check(lambda x: x.histc(5, -3, 3), Case((2,), (X,), ("S0",)), expect="P")


def test_places_in_the_memory_of_one_device_are_refused():
    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S0")
        for function in (
            lambda x: x.as_strided((2, 2), (3, 1), 3),
            lambda x: x.t().as_strided((2, 2), (3, 1)),
            lambda x: x[1:].as_strided((4, 3), (3, 1)),
        ):
            with pytest.raises(
                T.PropagationError, match=r"reads by places in the memory of one device: size .*index it"
            ):
                function(x)
        whole: Any = distribute(X, T.Mesh((2,)), "R")
        torch.testing.assert_close(whole[1:].as_strided((2, 2), (3, 1), 1).to_local(), X.as_strided((2, 2), (3, 1), 1))

    run_ranks(2, body)


def test_every_reason_is_a_sentence():
    assert all(len(reason) > 20 for reason in REASONS.values())
