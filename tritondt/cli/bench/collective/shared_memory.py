"""Collectives by redistributions through shared memory, whatever transport the engine takes otherwise.

The plans are those of the engine; the messages of their steps lie in arenas that the ranks of a machine have mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

import tritondt as T
from tritondt import identity
from tritondt.cli.bench.collective import engine
from tritondt.cli.bench.collective.sides import Call, NotOfferedError, Run
from tritondt.comm import world
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.transports.arenas import map_arenas
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.redistribution.compile import compile_plan
from tritondt.redistribution.run import run_step

_NAME = "shared memory of a benchmark"


def bind(call: Call) -> Run:
    """The function that runs a call through shared memory.

    Raises NotOfferedError where the engine has none, or ranks share no memory.
    """
    move = engine.move_of(call)
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
    steps = [step if step.communicator is None else step._replace(communicator=found) for step in plan.steps]

    def run() -> torch.Tensor:
        current = whole = local
        for step in steps:
            current, whole = run_step(step, current, whole)
        return current

    return run


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
