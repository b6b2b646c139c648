"""Ranges in torch.profiler: redistributions and exchanges by stable names, while a profiler is on."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tritondt as T
from tests.harness.work import num_calls
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks

X = torch.arange(24.0).view(4, 6)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")  # torch 2.10 to 2.12
def test_redistributions_and_exchanges_have_ranges():
    def body(rank: int) -> Counter[str]:
        mesh = T.Mesh((2,))
        x: Any = distribute(X, mesh, "S0")
        terms: Any = distribute(X, mesh, "P")
        if rank == 1:  # a profiler is one for the whole process
            found = [x.redistribute(placements=(T.Shard(1),)), x.redistribute(placements=(T.Replicate(),))]
            found += [terms.redistribute(placements=(T.Replicate(),))]
            return Counter(str(each.to_local().shape) for each in found)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            x.redistribute(placements=(T.Shard(1),))
            x.redistribute(placements=(T.Replicate(),), async_op=True).to_local()
            terms.redistribute(placements=(T.Replicate(),))
        return Counter(event.name for event in profiler.events() or ())

    names, _ = run_ranks(2, body)
    assert names["tritondt::redistribute"] == 3
    # What was issued is exchanged in a thread of the communicator, which the profiler does not follow.
    assert names["tritondt::exchange"] == 2


def test_without_a_profiler_a_range_is_no_call():
    def body(rank: int) -> tuple[int, int]:
        x: Any = distribute(X, T.Mesh((1,)), "S0")

        def move() -> None:
            x.redistribute(placements=(T.Shard(1),))

        move()
        off = num_calls(move)
        with profile(activities=[ProfilerActivity.CPU]):
            on = num_calls(move)
        return off, on

    ((off, on),) = run_ranks(1, body)
    assert on > off
