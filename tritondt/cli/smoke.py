"""Smoke test of each transport: processes that move and add tensors for some seconds, and check all.

They are two new ones of this machine, or those that torchrun, MPI or srun has started, on any number of machines.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

import tritondt as T
from tritondt import environment
from tritondt.cli import ranks
from tritondt.cli.launch import RankFailedError, run_on_ranks
from tritondt.cli.machine import Finding, machine_findings
from tritondt.cli.outputs import is_first
from tritondt.comm import world
from tritondt.comm.objects import gather_objects
from tritondt.comm.transports import table
from tritondt.debug.tracing.clock import Offset, answer_pings, ping
from tritondt.errors import TritondtError

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
    """A transport whose test passed: the number of exchanges, and the median seconds of the small and large ones.

    With `is_elsewhere` another transport carried it all: of ranks that share no memory, sockets.
    """

    transport: str
    num_exchanges: int
    small_s: float
    large_s: float
    is_elsewhere: bool = False


@dataclass(frozen=True)
class Clock:
    """A host's clock against that of rank 0's, as a rank there has measured it."""

    rank: int
    host: str
    offset: Offset


@dataclass(frozen=True)
class Host:
    """A host, the first of its ranks, and what was found there."""

    name: str
    rank: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Ranks:
    """Hosts of the ranks, of which there are `num_ranks`, and the clocks of the hosts but rank 0's."""

    num_ranks: int
    hosts: tuple[Host, ...]
    clocks: tuple[Clock, ...]


@dataclass
class Smoke:
    """The outcome of a test: transports that passed, the one that failed with its reason, and the ranks."""

    passed: list[Passed] = field(default_factory=list)
    failed: tuple[str, str] | None = None
    ranks: Ranks | None = None


def tested_transports(*, is_one_host: bool, has_gpus: bool) -> tuple[str, ...]:
    """Names of the transports that ranks can be tested with, of which each has a GPU of its own, or none needs one."""
    return tuple(
        transport.name
        for transport in table.transports()
        if ("cpu" in transport.device_types or has_gpus) and (transport.crosses_hosts or is_one_host)
    )


def transports_here() -> tuple[str, ...]:
    """Transports that can be tested by this process and one more of this machine."""
    return tested_transports(is_one_host=True, has_gpus=torch.cuda.device_count() >= NUM_RANKS)


def smoke_test(seconds: float) -> Smoke:
    """Tests each transport on two new processes, or on all that a launcher has started: a collective call of those."""
    found, began = Smoke(), ["the start of two processes"]

    def take(message: object) -> None:
        if isinstance(message, Began):
            began.append(message.transport)
        elif isinstance(message, Passed):
            found.passed.append(message)
        elif isinstance(message, Ranks):
            found.ranks = message
        else:
            raise AssertionError(f"the ranks of the smoke test send results, but one sent {message!r}")

    try:
        if environment.launched() is None:
            run_on_ranks(NUM_RANKS, _test_on_rank, seconds, on_message=take)
        else:
            began[0] = "the meeting of the launcher's processes"
            ranks.join(None, NUM_RANKS)
            _test_on_rank(take if is_first() else _drop, seconds)
            ranks.leave()
    except (RankFailedError, TritondtError, RuntimeError) as error:
        found.failed = began[-1], str(error)
    return found


def _drop(_: object) -> None:
    """Ignores a message, on ranks other than 0 of a launcher."""


def _test_on_rank(send: Callable[[object], None], seconds: float) -> None:
    rank = dist.get_rank()
    tell = send if rank == 0 else _drop
    names = _compare_hosts(tell)
    for name in names:
        tell(Began(name))
        tell(_tested(name, rank, seconds))
        world.close()  # the next transport has a world of its own


def _compare_hosts(tell: Callable[[object], None]) -> tuple[str, ...]:
    """Tells of all ranks' hosts and clocks; returns the transports that every rank can use. A collective call."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    own = socket.gethostname(), _places_of_gpus()
    first_on: dict[str, int] = {}
    told = gather_objects(own)
    for other, (host, _) in enumerate(told):
        first_on.setdefault(host, other)
    # One rank of each other host measures; of one host alone, another process there.
    measuring = sorted(first_on.values())[1:] or ([1] if len(told) > 1 else [])
    clock = None
    if rank == 0:
        for other in measuring:
            answer_pings(store, "doctor", other, _PATIENCE, time.time_ns)
    elif rank in measuring:
        clock = Clock(rank, own[0], ping(store, "doctor", rank, _PATIENCE, time.time_ns))
    is_first = first_on[own[0]] == rank
    found = gather_objects((Host(own[0], rank, tuple(machine_findings())) if is_first else None, clock))
    hosts, clocks = zip(*found, strict=True)
    tell(
        Ranks(
            len(told),
            tuple(host for host in hosts if host is not None),
            tuple(each for each in clocks if each is not None),
        )
    )
    gpus = [(host, place) for host, (place, count) in told if place < count]
    own_names = tested_transports(is_one_host=len(first_on) == 1, has_gpus=len(set(gpus)) == len(told))
    known = gather_objects(own_names)  # a transport of one's own may be registered on some ranks alone
    return tuple(name for name in own_names if all(name in names for names in known))


def _places_of_gpus() -> tuple[int, int]:
    """Number of the GPU that this rank takes among those of its host, and how many there are."""
    local = environment.local_rank()
    return dist.get_rank() if local is None else local, torch.cuda.device_count()


def _tested(name: str, rank: int, seconds: float) -> Passed:
    """Rows to columns and terms to their sum, in turns until the time is over, on rank 0's word."""
    transport = table.named(name)
    device = "cpu" if "cpu" in transport.device_types else transport.device_types[0]
    if device == "cuda":
        torch.cuda.set_device(_places_of_gpus()[0])
    os.environ["TRITONDT_TRANSPORT"] = name
    num_ranks = dist.get_world_size()
    mesh = T.init_device_mesh(device, (num_ranks,), mesh_dim_names=("ranks",))
    times: dict[tuple[int, ...], list[float]] = {shape: [] for shape in _SHAPES}
    started, goes_on = time.monotonic(), torch.ones(1)
    while goes_on:
        for shape in _SHAPES * _ROUNDS_AT_ONCE:
            times[shape].append(_checked_round(mesh, shape, rank, device))
        goes_on.fill_(time.monotonic() - started < seconds)
        dist.broadcast(goes_on, 0)
    small, large = (median(times[shape]) for shape in _SHAPES)
    carrying = world.current().communicator(tuple(range(num_ranks)), device)
    is_elsewhere = not isinstance(carrying, transport.communicator_class)
    return Passed(name, 2 * sum(map(len, times.values())), small, large, is_elsewhere)


def _checked_round(mesh: object, shape: tuple[int, int], rank: int, device: str) -> float:
    """Seconds of two redistributions, whose results are compared exactly."""
    whole = (torch.arange(shape[0] * shape[1], device=device) % 1024).float().view(shape)
    meta = T.TensorMeta.contiguous(shape)
    rows, columns, terms, summed = (
        T.DTensorSpec(mesh, (placement,), meta)  # type: ignore[arg-type]
        for placement in (T.Shard(0), T.Shard(1), T.Partial(), T.Replicate())
    )
    num_ranks = dist.get_world_size()
    own_rows = _part(whole, 0, rank, num_ranks)
    started = time.perf_counter()
    moved, added = T.redistribute(own_rows, rows, columns), T.redistribute(whole, terms, summed)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    torch.testing.assert_close(moved, _part(whole, 1, rank, num_ranks), rtol=0, atol=0)
    torch.testing.assert_close(added, num_ranks * whole, rtol=0, atol=0)
    return seconds


def _part(whole: torch.Tensor, dim: int, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's part as torch.chunk cuts, empty behind the last chunk."""
    chunks = whole.chunk(num_ranks, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
