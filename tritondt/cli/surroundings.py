"""Date, machine and versions of a measurement."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path
from typing import Any

import torch

import tritondt as T
from tritondt.cli.launch import num_cores

_CPUINFO = Path("/proc/cpuinfo")


def surroundings() -> dict[str, Any]:
    """Date, machine and versions, as fields of a JSON object."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "processor": _processor(), "cores": num_cores()},
        "versions": versions(),
    }


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
