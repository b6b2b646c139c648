"""Bytes that the kernel counted on the loopback interface, headers and acknowledgements included."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tritondt.cli.bench.harness import Run

_SENT_BYTES = Path("/sys/class/net/lo/statistics/tx_bytes")
_GAP_S = 0.3


@dataclass(frozen=True)
class Loopback:
    """Bytes over `num_calls` calls in a row, and in a gap of 0.3 s before them: what others send."""

    num_calls: int
    sent_bytes: int
    gap_bytes: int


def is_readable() -> bool:
    """Whether this system counts what it sends to itself where Linux does."""
    return _SENT_BYTES.exists()


def count_loopback(run: Run, num_calls: int = 20) -> Loopback:
    """Counter's difference around calls of `run` on all ranks; true of ranks on one machine.

    The two barriers inside add a few hundred bytes.
    """
    dist.barrier()
    time.sleep(_GAP_S)
    before_gap = _read()
    time.sleep(_GAP_S)
    before = _read()
    dist.barrier()
    for _ in range(num_calls):
        run()
    dist.barrier()
    time.sleep(_GAP_S)
    return Loopback(num_calls, _read() - before, before - before_gap)


def _read() -> int:
    return int(_SENT_BYTES.read_text())
