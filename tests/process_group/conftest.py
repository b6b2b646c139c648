"""Processes that tests share: starting them costs more than what they do here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import backend_ranks


@pytest.fixture(scope="session")
def ranks_of(kept_ranks: list[GlooRanks]) -> Callable[[str, int], GlooRanks]:
    """So many ranks on the backend, over what carries its tensors, with a group on plain Gloo to compare with."""
    started: dict[tuple[str, int], GlooRanks] = {}

    def find(over: str, size: int) -> GlooRanks:
        if (over, size) not in started or not started[over, size].pids:  # a test that hangs kills them
            started[over, size] = backend_ranks(over, size, TRITONDT_TIMEOUT="60")
            kept_ranks.append(started[over, size])
            started[over, size].run(meet, timeout_s=250)
        return started[over, size]

    return find


groups: dict[str, Any] = {}


def meet(rank: int) -> None:
    """Makes the group to compare with."""
    groups["gloo"] = dist.new_group(backend="gloo")
