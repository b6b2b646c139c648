"""Date, machine and versions of a measurement."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tritondt as T
from tritondt.cli.launch import num_cores

_CPUINFO, _MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")


def surroundings() -> dict[str, Any]:
    """Date, machine and versions, as fields of a JSON object."""
    return {
        "date": _now(),
        "machine": {"platform": platform.platform(), "processor": _processor(), "cores": num_cores()},
        "versions": versions(),
    }


def free_bytes() -> int | None:
    """Bytes of memory that this machine has free; None where it does not say."""
    if not _MEMORY.exists():
        return None
    lines = (line.split() for line in _MEMORY.read_text(encoding="utf-8").splitlines())
    return next((int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"), None)


def run_fields(before: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a run that nccl-tests' JSON begins and ends with; `before` are the surroundings at its start.

    nccl_version is a number, as NCCL has it (22907 is 2.29.7), and None where torch is built without NCCL. The
    environment, which nccl-tests writes too, is left out, since it may hold secrets.
    """
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    return {
        "version": before["versions"]["tritondt"],
        "start_time": before["date"],
        "args": list(sys.argv),
        "nccl_version": None if nccl is None else nccl[0] * 10000 + nccl[1] * 100 + nccl[2],
        "end_time": _now(),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions that a time or a loss depends on."""
    return {"tritondt": T.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _processor() -> str:
    """Name of the processor where Linux has it, else what Python knows."""
    if _CPUINFO.exists():
        for text in _CPUINFO.read_text(encoding="utf-8").splitlines():
            name, _, value = text.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
