"""Bytes that a training step sends: ours as the transport counts them, torch's as rings would send its collectives."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.autograd import profiler

from tritondt.cli.bench.harness import Run
from tritondt.events import StepRan, subscribe

# A ring sends to its neighbour, of a collective over n ranks, this many n-ths of what a rank puts in.
_RING_STEPS: dict[str, Callable[[int], int]] = {
    "all_gather_into_tensor": lambda size: (size - 1) * size,
    "reduce_scatter_tensor": lambda size: size - 1,
    "all_reduce": lambda size: 2 * (size - 1),
    "all_to_all_single": lambda size: size - 1,
    "shard_dim_alltoall": lambda size: size - 1,
}
_ITEMSIZE = {"float": 4, "double": 8, "long int": 8}
# Functions of the same library that send nothing.
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")


@dataclass(frozen=True)
class Traffic:
    """Bytes sent in a step, and how often a rank calls each kind of exchange or collective."""

    sent_bytes: int
    calls: dict[str, int]

    def of_all_ranks(self) -> Traffic:
        """The bytes of all ranks together; a collective call. Every rank makes the same calls."""
        total = torch.tensor(self.sent_bytes)
        dist.all_reduce(total)
        return Traffic(int(total), self.calls)


def count_ours(step: Run) -> Traffic:
    """The transport's count of bytes and calls in one step on this rank."""
    events: list[StepRan] = []
    unsubscribe = subscribe(events.append)
    try:
        step()
    finally:
        unsubscribe()
    moved = [event for event in events if event.kind not in ("local", "scale")]
    calls = Counter(f"{event.source} -> {event.target}" for event in moved)
    return Traffic(sum(event.sent_bytes for event in moved), dict(calls))


def can_count_theirs() -> bool:
    """Whether torch's profiler tells the dtypes of inputs, from which bytes follow: from 2.12 on."""
    return "input_dtypes" in inspect.signature(profiler.FunctionEvent.__init__).parameters


def count_theirs(step: Run) -> Traffic:
    """The collectives of one step, and what this rank sends of them where they run as rings.

    The profiler sees them all; a dispatch mode, such as CommDebugMode, misses those inside foreach optimizers.
    AssertionError where one is none of those whose bytes are known here; RuntimeError before torch 2.12.
    """
    if not can_count_theirs():
        raise RuntimeError(
            f"torch's bytes are counted by the dtypes that its profiler tells from 2.12 on; this is {torch.__version__}"
        )
    with profiler.profile(record_shapes=True, use_kineto=False) as profile:
        step()
    size, sent_bytes, calls = dist.get_world_size(), 0, Counter[str]()
    for event in profile.function_events:
        library, _, kind = event.name.partition("::")
        parent = event.cpu_parent
        # A collective is recorded once for each key that it is dispatched to.
        if library not in ("_c10d_functional", "_dtensor") or (parent is not None and parent.name == event.name):
            continue
        if kind in _RING_STEPS:
            calls[kind] += 1
            put_in = prod(event.input_shapes[0]) * _ITEMSIZE[event.input_dtypes[0]]
            sent_bytes += put_in * _RING_STEPS[kind](size) // size
        elif kind not in _LOCAL:
            raise AssertionError(f"{event.name} is a collective whose bytes are not known here")
    return Traffic(sent_bytes, dict(calls))
