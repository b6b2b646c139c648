"""Tensors that move ahead of their use: what is prefetched is found, waited for, and dropped after a write."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.sharded import distribute
from tests.redistribution.moves import FULL, equal, to
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode


def test_prefetch():
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        with CommDebugMode() as comm:
            T.prefetch(x, [T.Replicate()])
            T.prefetch(x, [T.Replicate()])  # it is on its way already
            whole = to(x, "R")
        assert comm.get_comm_counts() == {"(S0) -> (R)": 1}
        assert whole.work is None
        torch.testing.assert_close(whole.to_local(), FULL, rtol=0, atol=0)
        with CommDebugMode() as comm:
            to(x, "R")
        assert comm.get_comm_counts() == {"(S0) -> (R)": 1}  # taken once

    run_ranks(2, body)


def test_prefetch_in_a_graph_has_the_gradient():
    def body(rank):
        x: Any = distribute(FULL, T.Mesh((2,)), "S0").requires_grad_()
        T.prefetch(x, [T.Replicate()])
        whole = to(x, "R", async_op=True)
        (whole * 3).sum().backward()
        equal(x.grad, torch.full((7, 11), 3.0))

    run_ranks(2, body)


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: x.to_local().add_(1)], ids=["through the tensor", "to the local tensor"]
)
def test_what_was_prefetched_before_a_write_is_dropped(write):
    def body(rank):
        x = distribute(FULL, T.Mesh((2,)), "S0")
        T.prefetch(x, [T.Replicate()])
        world.current().communicator((0, 1)).barrier()
        write(x)
        torch.testing.assert_close(to(x, "R").to_local(), FULL + 1, rtol=0, atol=0)

    run_ranks(2, body)
