"""Collectives by `tritondt.redistribute`, on tritondt's own transports: each is a move from one layout to another.

So too through shared memory, whatever transport the engine takes otherwise: by the plans of the engine, whose messages
lie in arenas that the ranks of a machine have mapped. The result is a new tensor, so that there is no call in place,
and its allocation is part of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

import tritondt as T
from tritondt import identity
from tritondt.cli.bench.breakdown import Breakdown, parts_of
from tritondt.cli.bench.collective.case import Case
from tritondt.cli.bench.collective.sides import Call, NotOfferedError, Run
from tritondt.cli.bench.harness import time_interleaved
from tritondt.comm import world
from tritondt.comm.objects import gather_objects
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.transports.arenas import map_arenas
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.redistribution.compile import compile_plan
from tritondt.redistribution.compiled_step import CompiledStep
from tritondt.redistribution.run import redistribute_local_async, run_step

_NAME = "shared memory of a benchmark"
# Rounds are as many as were asked for, however long they take.
_NO_LIMIT_S = 1e9

_Placements = tuple[T.Placement, T.Placement]


class Move(NamedTuple):
    """A call as a redistribution: this rank's local tensor, its spec, and that of the result."""

    local: torch.Tensor
    source: T.DTensorSpec
    target: T.DTensorSpec


def move_of(call: Call) -> Move:
    """The redistribution that a call is; NotOfferedError where no two layouts say it, and in place."""
    case = call.case
    name = case.kind.name
    if call.in_place:
        raise NotOfferedError("a redistribution makes a new tensor, so that it has no call in place")
    if name not in _PLACEMENTS:
        raise NotOfferedError(f"{name} is no move from one layout to another")
    before, after = _PLACEMENTS[name](case)
    mesh = T.Mesh((case.num_ranks,), device_type=call.x.device.type)
    shape = (case.num_ranks, case.total) if name == "all_to_all" else (case.total,)
    meta = T.TensorMeta.contiguous(shape, call.x.dtype)
    source, target = (T.DTensorSpec(mesh, (placement,), meta) for placement in (before, after))
    # Ranks other than a broadcast's root hold nothing before.
    return Move(call.x[: source.local_numel].view(source.local_shape), source, target)


def issue(call: Call) -> Callable[[], object]:
    """Starts a call by `tritondt.redistribute`, and returns what waits for it; NotOfferedError as `move_of` does."""
    local, source, target = move_of(call)
    result, work = redistribute_local_async(local, source, target)

    def wait() -> torch.Tensor:
        if work is not None:
            work.wait()
        return result

    return wait


def bind(call: Call) -> Run:
    """The function that runs a call by `tritondt.redistribute`; raises NotOfferedError as `move_of` does."""
    local, source, target = move_of(call)

    def run() -> torch.Tensor:
        return T.redistribute(local, source, target).view(-1)

    return run


def run_of(steps: Sequence[CompiledStep], local: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The function that takes `local` through steps, on this rank."""

    def run() -> torch.Tensor:
        current = whole = local
        for step in steps:
            current, whole = run_step(step, current, whole)
        return current

    return run


def bind_shared_memory(call: Call) -> Run:
    """The function that runs a call through shared memory.

    Raises NotOfferedError where the engine has none, or ranks share no memory.
    """
    move = move_of(call)
    if call.x.device.type != "cpu":
        raise NotOfferedError("shared memory is for tensors on the CPU")
    run = redistribution(move.local, move.source, move.target)
    return lambda: run().view(-1)


def redistribution(local: torch.Tensor, source: T.DTensorSpec, target: T.DTensorSpec) -> Callable[[], torch.Tensor]:
    """The function that redistributes `local` through shared memory. Collective.

    Raises NotOfferedError where ranks share no memory.
    """
    of = world.current()
    assert isinstance(of, ProcessWorld), "benchmarks run on processes"
    found = _communicator(of)
    if found is None:
        raise NotOfferedError("these ranks share no memory: they are on several machines, or the arenas were refused")
    plan = compile_plan(source, target, local.stride(), local.device, None)
    return run_of(
        [step if step.communicator is None else step._replace(communicator=found) for step in plan.steps], local
    )


@lru_cache(maxsize=1)
def _communicator(of: ProcessWorld) -> SharedMemoryCommunicator | None:
    """The communicator of all ranks of a world through arenas, made at the first call, which is collective."""
    with of.joining(_NAME, tuple(range(of.identity.size)), of.timeout) as context:
        arenas = map_arenas(context, "shared memory is not measured")
        if arenas is None:
            return None
        made = SharedMemoryCommunicator(context, arenas)
    of.keep(_NAME, made)
    return made


identity.on_end(_communicator.cache_clear)


def parts(call: Call, rounds: int, peak_bytes_per_s: float) -> Breakdown | None:
    """Parts of a call's time, in rounds of the whole; None where no rank sends anything. A collective call."""
    local, source, target = move_of(call)
    explained = T.explain(source, target)
    busiest_bytes = max(gather_objects(max(explained.sent_bytes, explained.received_bytes)))
    if not busiest_bytes:
        return None
    runs = [lambda: T.redistribute(local, source, target), *parts_of(local, source, target)]
    whole, own, messages = time_interleaved(runs, rounds, _NO_LIMIT_S)
    return Breakdown(own, messages, whole, peak_bytes_per_s, busiest_bytes)


def _all_on(case: Case) -> T.Placement:
    return T.Shard(0, sizes=tuple(case.total if rank == case.root else 0 for rank in range(case.num_ranks)))


def _parts(case: Case) -> T.Placement:
    return T.Shard(0, sizes=case.parts())


def _terms(case: Case) -> T.Placement:
    (placement,) = T.parse_placements(f"P({'product' if case.redop == 'prod' else case.redop})")
    return placement


_PLACEMENTS: dict[str, Callable[[Case], _Placements]] = {
    "all_reduce": lambda case: (_terms(case), T.Replicate()),
    "all_gather": lambda case: (T.Shard(0), T.Replicate()),
    "all_gather_v": lambda case: (_parts(case), T.Replicate()),
    "reduce_scatter": lambda case: (_terms(case), T.Shard(0)),
    "reduce_scatter_v": lambda case: (_terms(case), _parts(case)),
    # A rank's row, cut into a part for each rank, becomes its column of parts.
    "all_to_all": lambda _: (T.Shard(0), T.Shard(1)),
    "broadcast": lambda case: (_all_on(case), T.Replicate()),
    "reduce": lambda case: (_terms(case), _all_on(case)),
    "gather": lambda case: (T.Shard(0), _all_on(case)),
    "scatter": lambda case: (_all_on(case), T.Shard(0)),
}
