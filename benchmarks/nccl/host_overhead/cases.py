"""Timed calls: redistributions of distributed tensors, and torch.distributed's collectives on our backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"

import tritondt as T
from benchmarks.nccl.host_overhead.timing import Issue

# torch 2.13's names, and those of before, which warn there.
_all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

REDISTRIBUTION, COLLECTIVE = "redistribution", "collective"
FLOOR = "fake"
_REDISTRIBUTIONS = (("S0", "S1"), ("S0", "R"), ("S1", "S0"), ("P", "S0"), ("P", "R"))
_OF_TWO_STEPS = ("P", "R")
_SHAPE = (63, 65)
_LENGTH = 256
# Of a plan of one step.
_MOST_US = 25.0
# The same until it returns, where CUDA's calls take their time.
MOST_WITH_COSTS_US = 40.0


class Case(NamedTuple):
    """A call, the most that it may take until the end of its wait, and what is timed beside it."""

    kind: str
    name: str
    issue: Issue
    most_us: float | None = None
    floor: Issue | None = None


def cases() -> list[Case]:
    """All of them, with their communicators made; every rank calls this."""
    found = [*_redistributions(), *_collectives()]
    for case in found:
        case.issue().wait()
    return found


def _redistributions() -> list[Case]:
    mesh = T.Mesh((dist.get_world_size(),))
    found = []
    for source, target in _REDISTRIBUTIONS:
        tensor = T.zeros(_SHAPE, device_mesh=mesh, placements=T.parse_placements(source))
        issue = partial(tensor.redistribute, placements=T.parse_placements(target), async_op=True)
        most_us = None if (source, target) == _OF_TWO_STEPS else _MOST_US
        found.append(Case(REDISTRIBUTION, f"{source} -> {target}", issue, most_us))
    return found


def _collectives() -> list[Case]:
    """Collectives of our group; beside each the same call of a group of torch's in C++ that does nothing at all."""
    ours = dist.new_group(backend="tritondt")
    theirs = dist.new_group(backend=FLOOR)
    floors = _issues(theirs)
    return [Case(COLLECTIVE, name, issue, None, floors[name]) for name, issue in _issues(ours).items()]


def _issues(group: Any) -> dict[str, Callable[[], Any]]:
    size = dist.get_world_size()
    part, whole, other = torch.zeros(_LENGTH), torch.zeros(_LENGTH * size), torch.zeros(_LENGTH * size)
    parts = list(torch.zeros(size, _LENGTH).unbind())
    asked: dict[str, Any] = {"group": group, "async_op": True}
    return {
        "all_reduce": lambda: dist.all_reduce(whole, **asked),
        "all_gather_into_tensor": lambda: _all_gather_single(whole, part, **asked),
        "all_gather": lambda: dist.all_gather(parts, part, **asked),
        "reduce_scatter_tensor": lambda: _reduce_scatter_single(part, whole, **asked),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, **asked),
        "reduce": lambda: dist.reduce(whole, group_dst=0, **asked),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, other, **asked),
    }
