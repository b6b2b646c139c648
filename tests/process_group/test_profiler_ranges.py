"""Collectives of the backend have ranges in torch.profiler, by stable names, over either transport."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.harness.gloo_ranks import GlooRanks


def profiled(rank: int) -> list[str]:
    x, parts = torch.ones(4), [torch.empty(4), torch.empty(4)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(x)
        dist.all_gather(parts, x)
    return sorted({event.name for event in profiler.events() or () if event.name.startswith("tritondt::")})


@pytest.mark.parametrize("over", ["sockets", "nccl"])
def test_collectives_have_ranges(over: str, ranks_of: Callable[[str, int], GlooRanks]):
    found = ["tritondt::allgather", "tritondt::allreduce", *(["tritondt::exchange"] if over == "sockets" else [])]
    assert ranks_of(over, 2).run(profiled, timeout_s=250) == [found] * 2
