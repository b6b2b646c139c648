"""A redistribution whose messages go through slots in peers' GPU memory, and through NCCL, on the same ranks."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

import tritondt as T
from tests.doubles.fake_cuda.library import build
from tests.nccl.devices import device_of
from tritondt.comm import world
from tritondt.comm.device_memory.driver import CudaDriver
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.transports.device_arenas import share_device_arenas
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.redistribution.compile import compile_plan
from tritondt.redistribution.run import _run_steps

MESSAGES = "messages"


@cache
def communicators(where: str) -> dict[str, NcclCommunicator]:
    """One with slots and one without, of all ranks; collective."""
    device, here, ranks = device_of(where), world.current(), tuple(range(dist.get_world_size()))
    assert isinstance(here, ProcessWorld), "a rank is a process"
    os.environ["TRITONDT_SLOTS"] = "1"
    driver = CudaDriver if where == "gpu" else lambda: CudaDriver(str(build()))
    with here.joining("slots, for the benchmark", ranks, here.timeout) as context:
        arenas = share_device_arenas(context, 0, torch.device(device.kind), driver)
        assert arenas is not None, "the ranks share no memory of a GPU"
        in_slots = NcclCommunicator(context, device.library, device.streams, arenas)
    with here.joining("messages, for the benchmark", ranks, here.timeout) as alone:
        return {"slots": in_slots, MESSAGES: NcclCommunicator(alone, device.library, device.streams)}


def redistribution_in_slots(rank: int, where: str, shape: tuple[int, int], source: str, target: str) -> dict[str, Any]:
    """The same messages of the same redistribution, whatever prices would choose."""
    device, size = device_of(where), dist.get_world_size()
    mesh = T.Mesh((size,), device_type=device.kind)
    whole = (torch.arange(float(shape[0] * shape[1])) % 1009).reshape(shape)
    local = whole * (rank + 1) if source == "P" else whole.chunk(size, int(source[1]))[rank]
    local = local.contiguous().to(device.kind)
    meta = T.TensorMeta.contiguous(shape)
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
    compiled = compile_plan(before, after, local.stride(), local.device, None)
    sides: dict[str, Any] = {}
    for name, communicator in communicators(where).items():
        steps = [step._replace(communicator=step.communicator and communicator) for step in compiled.steps]
        sides[name] = lambda steps=steps: _run_steps(steps, local)
    found, expected = (run() for run in sides.values())
    if not torch.equal(found, expected):
        raise AssertionError(f"{source} -> {target} of {shape}: slots and messages differ")
    return sides
