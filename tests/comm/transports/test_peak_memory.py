"""Temporary memory while a redistribution runs, measured on processes, against what explain says and the bound.

Besides source and target a rank may hold what it packs and what it receives.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.kernels import memory

pytestmark = pytest.mark.usefixtures("alone")

_M_MMAP_THRESHOLD = -3


class Peak(NamedTuple):
    """Bytes at the highest point above what was there before; explain's numbers are without the target."""

    tensors: int
    resident: int
    target: int
    sent: int
    received: int
    packed: int
    explained: int


class LiveTensors(TorchDispatchMode):
    """Follows the memory of all tensors made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage_id(x) for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and _storage_id(result) not in given:
            storage = result.untyped_storage()
            self._made[_storage_id(result)] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._made.values()))
        return result


def _storage_id(x: torch.Tensor) -> int:
    found: int = x.untyped_storage()._cdata
    return found


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


# What is kept for later results is neither in use nor new to the process.
@mock.patch.object(memory.pool, "most_bytes", 0)
def measure(
    rank: int,
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    source: str,
    target: str,
    wire_dtype: torch.dtype | None = None,
) -> Peak:
    """Runs a redistribution, once to connect, once to follow tensors and once to watch the process."""
    mesh, meta = T.Mesh(mesh_shape), T.TensorMeta.contiguous(shape)
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
    local = torch.full(before.local_shape, 1.0)
    explanation = T.explain(before, after, wire_dtype=wire_dtype)
    T.redistribute(local, before, after, wire_dtype=wire_dtype)
    with LiveTensors() as live:
        result = T.redistribute(local, before, after, wire_dtype=wire_dtype)
    target_bytes = result.numel() * 4
    del result
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back at once, so that only what is in use counts
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    at_rest = _status_bytes("VmRSS")
    result = T.redistribute(local, before, after, wire_dtype=wire_dtype)
    resident = _status_bytes("VmHWM") - at_rest
    assert result.numel() * 4 == target_bytes
    return Peak(
        live.peak,
        resident,
        target_bytes,
        explanation.sent_bytes,
        explanation.received_bytes,
        sum(step.packed_bytes for step in explanation.steps),
        explanation.peak_bytes,
    )


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "source", "target"),
    [
        ((2, 2), (4096, 4096), "R, S0", "S0, S0"),
        ((2, 2), (4096, 4096), "S0, S0", "S1, S1"),
        ((4,), (4096, 4096), "S0", "S1"),
        ((4,), (4095, 4097), "S1", "R"),
        ((4,), (4096, 4096), "P", "S0"),
        ((4,), (4095, 4097), "P", "R"),
        ((2, 2), (4096, 4096), "P, S0", "S0, S0"),
        ((2, 2), (4096, 4096), "S0, P", "S1, R"),
        ((4,), (2047, 2049), "P(max)", "P(sum)"),
        ((2, 2), (2048, 2048), "P(avg), S0", "P(sum), R"),
    ],
)
def test_peak_is_at_most_what_is_packed_and_received(
    four_ranks: GlooRanks, mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: str, target: str
) -> None:
    for rank, peak in enumerate(four_ranks.run(measure, mesh_shape, shape, source, target)):
        text = f"rank {rank}: {peak}"
        assert peak.packed <= peak.sent, text
        # Both buffers lie in one block, the second at a multiple of 512 bytes.
        assert 0 <= peak.tensors - peak.target - peak.explained < (512 if peak.packed else 1), text
        assert peak.explained <= peak.packed + peak.received, text
        # The rest of the process, and pages of 2 MB at the ends of three large tensors, take a few MB.
        assert peak.resident <= peak.target + peak.packed + peak.received + (8 << 20), text


@pytest.mark.parametrize(
    ("source", "target"), [("S0, S0", "S1, S1"), ("R, S1", "R, R"), ("P, S0", "S0, S0"), ("P, P", "R, R")]
)
def test_peak_with_a_wire_dtype_is_what_explain_says(four_ranks: GlooRanks, source: str, target: str) -> None:
    for rank, peak in enumerate(four_ranks.run(measure, (2, 2), (511, 513), source, target, torch.bfloat16)):
        # Three buffers in one block, the second and the third at multiples of 512 bytes.
        assert 0 <= peak.tensors - peak.target - peak.explained < 2 * 512, f"rank {rank}: {peak}"
