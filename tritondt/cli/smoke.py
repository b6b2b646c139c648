"""Smoke test of each transport: two new processes that move and add tensors for some seconds, and check all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

import tritondt as T
from tritondt.cli.launch import RankFailedError, run_on_ranks
from tritondt.comm import world
from tritondt.debug.tracing.clock import Offset, answer_pings, ping

NUM_RANKS = 2
# Rows of unequal number, small and large: eager messages, and more than a socket's buffer takes at once.
_SHAPES = ((5, 3), (1025, 511))
_ROUNDS_AT_ONCE = 4
_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Began:
    """A transport whose test begins."""

    transport: str


@dataclass(frozen=True)
class Passed:
    """A transport whose test passed: the number of exchanges, and the median seconds of the small and large ones."""

    transport: str
    num_exchanges: int
    small_s: float
    large_s: float


def transports() -> tuple[str, ...]:
    """Transports that can be tested on this machine."""
    return ("sockets", "gloo", *(("nccl",) if torch.cuda.device_count() >= NUM_RANKS else ()))


def smoke_test(seconds: float) -> tuple[list[Passed], tuple[str, str] | None, Offset | None]:
    """Transports that passed, the one that failed with its reason, and the offset of two processes' clocks."""
    passed: list[Passed] = []
    began = ["the start of two processes"]
    offsets: list[Offset] = []

    def take(message: object) -> None:
        if isinstance(message, Began):
            began.append(message.transport)
        elif isinstance(message, Passed):
            passed.append(message)
        elif isinstance(message, Offset):
            offsets.append(message)
        else:
            raise AssertionError(f"the ranks of the smoke test send results, but one sent {message!r}")

    try:
        run_on_ranks(NUM_RANKS, _test_on_rank, seconds, transports(), on_message=take)
    except RankFailedError as error:
        return passed, (began[-1], str(error)), next(iter(offsets), None)
    return passed, None, next(iter(offsets), None)


def _test_on_rank(send: Callable[[object], None], seconds: float, names: tuple[str, ...]) -> None:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        answer_pings(store, "doctor", 1, _PATIENCE)
    else:
        send(ping(store, "doctor", 1, _PATIENCE))
    for name in names:
        if rank == 0:
            send(Began(name))
        found = _tested(name, rank, seconds)
        if rank == 0:
            send(found)
        world.close()  # the next transport has a world of its own


def _tested(name: str, rank: int, seconds: float) -> Passed:
    """Rows to columns and terms to their sum, in turns until the time is over, on rank 0's word."""
    device = "cuda" if name == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["TRITONDT_TRANSPORT"] = name
    mesh = T.init_device_mesh(device, (NUM_RANKS,), mesh_dim_names=("ranks",))
    times: dict[tuple[int, ...], list[float]] = {shape: [] for shape in _SHAPES}
    started, goes_on = time.monotonic(), torch.ones(1)
    while goes_on:
        for shape in _SHAPES * _ROUNDS_AT_ONCE:
            times[shape].append(_checked_round(mesh, shape, rank, device))
        goes_on.fill_(time.monotonic() - started < seconds)
        dist.broadcast(goes_on, 0)
    small, large = (median(times[shape]) for shape in _SHAPES)
    return Passed(name, 2 * sum(map(len, times.values())), small, large)


def _checked_round(mesh: object, shape: tuple[int, int], rank: int, device: str) -> float:
    """Seconds of two redistributions, whose results are compared exactly."""
    whole = (torch.arange(shape[0] * shape[1], device=device) % 1024).float().view(shape)
    meta = T.TensorMeta.contiguous(shape)
    rows, columns, terms, summed = (
        T.DTensorSpec(mesh, (placement,), meta)  # type: ignore[arg-type]
        for placement in (T.Shard(0), T.Shard(1), T.Partial(), T.Replicate())
    )
    own_rows = whole.chunk(NUM_RANKS, 0)[rank]
    started = time.perf_counter()
    moved, added = T.redistribute(own_rows, rows, columns), T.redistribute(whole, terms, summed)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    torch.testing.assert_close(moved, whole.chunk(NUM_RANKS, 1)[rank], rtol=0, atol=0)
    torch.testing.assert_close(added, NUM_RANKS * whole, rtol=0, atol=0)
    return seconds
