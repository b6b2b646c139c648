"""Nothing grows with the number of steps: caches are bounded, and objects go when their step is over."""

import ctypes
import functools
import gc
import sys
from collections import Counter, deque
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.dtensor import dispatch
from tritondt.dtensor.wiring import dispatcher

aten = torch.ops.aten


def counted() -> Counter[str]:
    """Living objects by type: ours and tensors by name, containers and functions together."""
    gc.collect()
    found = Counter[str]()
    for thing in gc.get_objects():
        kind = type(thing)
        if str(kind.__module__).startswith("tritondt") or issubclass(kind, torch.Tensor):
            found[kind.__qualname__] += 1
        elif kind in (list, dict, tuple, set, deque, type(counted), functools.partial):
            found["containers and functions"] += 1
    return found


class _Allocated(ctypes.Structure):
    """What mallinfo2(3) returns: bytes in use in all arenas of the allocator, and bytes mapped for single blocks."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


def held_bytes() -> int:
    """Bytes of C's allocator in use, tensors' among them, and 32 for each of Python's own small blocks.

    What is resident also counts holes between blocks, which came to 8 MB here beside another program.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocated
    found = mallinfo()
    return int(found.uordblks + found.hblkhd) + 32 * sys.getallocatedblocks()


def step(mesh: T.Mesh, length: int) -> None:
    """A small step on a tensor of some length: forward, a redistribution, an update, and one in four times backward."""
    x: Any = T.DTensor.from_local(torch.ones(length, 2), mesh, [T.Shard(0)]).requires_grad_(length % 4 == 0)
    y = (x * 2.0 + length).redistribute(placements=[T.Shard(1)])
    if x.requires_grad:
        y.backward(y.detach())
    with torch.no_grad():
        torch._foreach_add_([x], [x.detach() if x.grad is None else x.grad], alpha=-0.1)
    x.to_local().sum().item()


@pytest.mark.parametrize(
    "num_steps", [pytest.param(2_000, marks=pytest.mark.extended), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_steps_of_changing_shapes_leave_nothing_behind(num_steps):
    num_shapes = 100

    def body(rank):
        mesh, seen = T.Mesh((2,)), []
        for number in range(num_steps):
            if number in (3 * num_shapes, num_steps - 1):
                world = mesh.identity  # both ranks are at most one step apart, and only one of them counts
                assert world.size == 2
                if rank == 0:
                    seen.append((counted(), held_bytes()))
            step(mesh, 1 + number % num_shapes)
        return seen

    (before, bytes_before), (after, bytes_after) = run_ranks(2, body)[0]
    grown = {kind: (before[kind], after[kind]) for kind in after if after[kind] > before[kind] + 20}
    assert not grown, f"objects before and after {num_steps} steps: {grown}"
    # A leaked tensor of the smallest kind, one in each step of both ranks, would be 500 bytes a step and rank.
    assert bytes_after - bytes_before < 100 * num_steps, f"{bytes_after - bytes_before:,} bytes in {num_steps} steps"


@pytest.mark.extended
def test_signatures_of_shapes_that_do_not_come_again_are_dropped(monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_SIGNATURES", 40)

    def body(rank):
        mesh = T.Mesh((1,))
        dispatcher._operators.clear()
        _drop_caches()
        before, entries = counted(), len(FakeTensorMode.cache)
        for length in range(5000, 5400):
            step(mesh, length)
        kept = {op: dispatcher.num_signatures(op) for op in (aten.mul.Tensor, aten.add.Tensor, aten.detach.default)}
        assert set(kept.values()) <= {40, 41}, kept
        assert len(FakeTensorMode.cache) == entries
        assert counted()["DTensorSpec"] > before["DTensorSpec"] + 400  # the caches hold what they may
        _drop_caches()
        # What is left is what 40 signatures of each of a dozen operators hold.
        after = counted()
        for kind in ("DTensorSpec", "Layout"):
            assert after[kind] - before[kind] < 160, (kind, before[kind], after[kind])
        assert after["DTensor"] == before["DTensor"]

    run_ranks(1, body)


def _cached_functions() -> dict[str, Any]:
    """Every lru_cache of the package that has been imported."""
    return {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if name.startswith("tritondt")
        for attribute, value in vars(module).items()
        if isinstance(value, functools._lru_cache_wrapper)
    }


def _drop_caches() -> None:
    for cached in _cached_functions().values():
        cached.cache_clear()


def test_every_cache_says_how_large_it_may_get():
    found = _cached_functions()
    assert len(found) > 5
    assert [name for name, cached in found.items() if cached.cache_info().maxsize is None] == []


@pytest.mark.extended
@pytest.mark.parametrize("make", [T.Layout, T.DTensorSpec])
def test_interning_keeps_nothing_alive(make):
    def body(rank):
        mesh = T.Mesh((1,))
        before = counted()[make.__name__]
        for length in range(100_000, 100_050):
            placements = [T.Shard(0)]
            if make is T.Layout:
                T.Layout((1,), placements, (length,))
            else:
                T.DTensorSpec(mesh, placements, T.TensorMeta.contiguous((length,)))
        assert counted()[make.__name__] - before <= 1

    run_ranks(1, body)
