"""The same operation in several ways, in a rank: by our communicator, by our backend, by torch's own, all checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as torchs
from torch.distributed.device_mesh import DeviceMesh

import tritondt as T
from benchmarks.nccl.judging import TORCH
from benchmarks.nccl.slots import redistribution_in_slots
from tests.nccl.devices import device_of
from tests.nccl.here import Here, connect

Run = Callable[[], object]
Sides = dict[str, Run]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")


@cache
def here_of(rank: int, where: str) -> Here:
    """A communicator of our own, with NCCL's options as they are."""
    return connect(rank, where)


@cache
def torchs_group(where: str) -> Any:
    """The group to compare with: torch's NCCL; over the double, where there is none, Gloo."""
    return dist.new_group(backend="nccl" if where == "gpu" else "gloo")


@cache
def _group_on_the_host() -> Any:
    return dist.new_group(backend="gloo")


def meet() -> None:
    """A barrier that gives the device nothing to do."""
    dist.barrier(group=_group_on_the_host())


def collective(rank: int, where: str, name: str, num_bytes: int) -> Sides:
    """A collective of float32, `num_bytes` of it the larger of what a rank gives and gets."""
    here = here_of(rank, where)
    small, large, sent = _tensors(here, num_bytes)
    groups: dict[str, Any] = {"backend": dist.group.WORLD, TORCH: torchs_group(where)}
    sides = {"communicator": _native(here, name, small, large, sent)}
    sides |= {side: _of_group(group, name, small, large, sent) for side, group in groups.items()}
    written = small if name == "reduce_scatter" else large
    expected: torch.Tensor | None = None
    for side, run in sides.items():
        _fill(here, small, large, sent)
        run()
        here.device.synchronize()
        found = written.clone() if name != "reduce" or rank == 0 else torch.empty(0)
        if expected is not None and not torch.equal(found, expected):
            raise AssertionError(f"{name} of {num_bytes} bytes: {side} gives something else than the communicator")
        expected = found
    small.zero_()  # sums of sums of sums stay what they are
    large.zero_()
    here.device.synchronize()
    return sides


def _tensors(here: Here, num_bytes: int) -> list[torch.Tensor]:
    """One of a rank's part, and two of all, the second to be sent where it must not be overwritten."""
    length = max(num_bytes // 4 // here.size, 1)
    return [torch.empty(each, device=here.device.kind) for each in (length, length * here.size, length * here.size)]


def _fill(here: Here, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.copy_(torch.arange(len(tensor)) % 5 + here.rank)
    here.device.synchronize()


def _native(here: Here, name: str, small: torch.Tensor, large: torch.Tensor, sent: torch.Tensor) -> Run:
    """Straight into the current stream, as a program does that orders its streams itself."""
    native, each, total, streams = here.native, len(small), len(large), here.device.streams
    by_name: dict[str, Callable[[int], None]] = {
        "all_reduce": lambda stream: native.all_reduce(
            large.data_ptr(), large.data_ptr(), total, "float32", "sum", stream
        ),
        "all_gather": lambda stream: native.all_gather(small.data_ptr(), large.data_ptr(), each, "float32", stream),
        "reduce_scatter": lambda stream: native.reduce_scatter(
            large.data_ptr(), small.data_ptr(), each, "float32", "sum", stream
        ),
        "broadcast": lambda stream: native.broadcast(large.data_ptr(), large.data_ptr(), total, "float32", 0, stream),
        "reduce": lambda stream: native.reduce(large.data_ptr(), large.data_ptr(), total, "float32", "sum", 0, stream),
        "all_to_all": lambda stream: native.all_to_all(sent.data_ptr(), large.data_ptr(), each, "float32", stream),
    }
    call = by_name[name]
    if here.device.kind == "cpu":  # the host's operators are in no stream: the double needs one, and a wait

        def run_and_wait() -> None:
            call(here.stream.cuda_stream)
            here.stream.synchronize()

        return run_and_wait
    return lambda: call(streams.current().cuda_stream)


def _of_group(group: Any, name: str, small: torch.Tensor, large: torch.Tensor, sent: torch.Tensor) -> Run:
    by_name: dict[str, Run] = {
        "all_reduce": lambda: dist.all_reduce(large, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(large, small, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(small, large, group=group),
        "broadcast": lambda: dist.broadcast(large, group=group, group_src=0),
        "reduce": lambda: dist.reduce(large, group=group, group_dst=0),
        "all_to_all": lambda: dist.all_to_all_single(large, sent, group=group),
    }
    return by_name[name]


def redistribution(rank: int, where: str, shape: tuple[int, int], source: str, target: str) -> Sides:
    """A redistribution of distributed tensors, ours and torch's."""
    device, size = device_of(where), dist.get_world_size()
    mesh = T.Mesh((size,), device_type=device.kind)
    theirs = DeviceMesh.from_group(torchs_group(where), device.kind)
    whole = (torch.arange(float(shape[0] * shape[1])) % 1009).reshape(shape)
    is_term = source.startswith("P")
    local = whole * (rank + 1) if is_term else whole.chunk(size, int(source[1]))[rank]
    local = local.contiguous().to(device.kind)
    placed, wanted = T.parse_placements(source), T.parse_placements(target)
    ours: Any = T.DTensor.from_local(local, mesh, placed, shape=shape, stride=(shape[1], 1))
    before, after = ([_torchs(text)] for text in (source, target))
    other: Any = torchs.DTensor.from_local(
        local, theirs, before, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.redistribute(placements=wanted),
        TORCH: lambda: other.redistribute(theirs, after),
    }
    found, expected = (run().to_local() for run in sides.values())
    if not torch.equal(found, expected):
        raise AssertionError(f"{source} -> {target} of {shape}: ours and torch's differ")
    return dict(sides)


def slots(rank: int, where: str, shape: tuple[int, int], source: str, target: str) -> Sides:
    """A redistribution through slots in peers' memory, and by messages of NCCL."""
    return redistribution_in_slots(rank, where, shape, source, target)


def _torchs(text: str) -> Any:
    """torch's placement of a text such as S1 or P."""
    return {"P": torchs.Partial(), "R": torchs.Replicate()}.get(text) or torchs.Shard(int(text[1]))


def issued(rank: int, where: str, side: int) -> Sides:
    """An asynchronous redistribution that is cached, and NCCL's calls of it alone: one message each way."""
    device, size = device_of(where), dist.get_world_size()
    here, peer = here_of(rank, where), 1 - rank
    mesh = T.Mesh((size,), device_type=device.kind)
    x: Any = T.distribute_tensor(torch.ones(side, side, device=device.kind), mesh, [T.Shard(0)])
    num_bytes = (side // size) ** 2 * 4
    sent, arrived = (torch.zeros(num_bytes, dtype=torch.uint8, device=device.kind) for _ in range(2))
    sends, receives = ([(peer, tensor.data_ptr(), num_bytes)] for tensor in (sent, arrived))
    held = (sent, arrived)

    def exchange() -> object:
        here.native.exchange(sends, receives, here.stream.cuda_stream)
        return held

    return {
        "redistribution": lambda: x.redistribute(placements=[T.Shard(1)], async_op=True),
        "nccl": exchange,
    }
