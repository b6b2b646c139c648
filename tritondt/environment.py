"""The environment variables that tritondt reads, all of them, and nowhere else."""

import json
import os
from datetime import timedelta
from typing import Literal, cast

from tritondt.errors import WorldError


def timeout() -> timedelta:
    """Time that a rank waits for another: TRITONDT_TIMEOUT seconds, 300 by default."""
    return timedelta(seconds=_positive("TRITONDT_TIMEOUT", 300.0))


def ranks_per_host() -> int | None:
    """Number of ranks that the launcher started on each host, None where the launcher does not say (torchrun does)."""
    return int(_positive("LOCAL_WORLD_SIZE", 1)) if "LOCAL_WORLD_SIZE" in os.environ else None


def master_address() -> str | None:
    """Host of the job's first rank, MASTER_ADDR, or None where the launcher does not say."""
    return os.environ.get("MASTER_ADDR")


def transport() -> Literal["sockets", "gloo"]:
    """Transport of messages between processes: TRITONDT_TRANSPORT, sockets (the default) or gloo."""
    text = os.environ.get("TRITONDT_TRANSPORT", "sockets")
    if text not in ("sockets", "gloo"):
        raise WorldError(f"TRITONDT_TRANSPORT={text!r} is set; allowed are sockets and gloo")
    return cast(Literal["sockets", "gloo"], text)


def socket_interfaces() -> list[tuple[str, str]]:
    """Variables set to interfaces for sockets between hosts, with their values; the first one counts."""
    names = ("TRITONDT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return [(name, os.environ[name]) for name in names if os.environ.get(name)]


def costs() -> str | None:
    """Prices that differ from the built-in table's: TRITONDT_COSTS as a JSON object, None where that is not set."""
    return os.environ.get("TRITONDT_COSTS") or None


def nccl_path() -> str | None:
    """Path of the NCCL library to load: TRITONDT_NCCL_SO, None where torch's own is to be used."""
    return os.environ.get("TRITONDT_NCCL_SO") or None


def nccl_options() -> dict[str, int | str]:
    """Options of NCCL's communicators, such as max_ctas: TRITONDT_NCCL_OPTIONS, a JSON object."""
    text = os.environ.get("TRITONDT_NCCL_OPTIONS", "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, int | str) for value in found.values()):
        raise WorldError(
            f"TRITONDT_NCCL_OPTIONS={text!r} is set; allowed is a JSON object of whole numbers and texts, such as "
            '{"max_ctas": 4}'
        )
    return found


def flight_directory() -> str | None:
    """Folder of flight records: TRITONDT_FLIGHT_DIR, None where that is not set."""
    return os.environ.get("TRITONDT_FLIGHT_DIR") or None


def compares() -> bool:
    """Whether ranks compare their next exchange before they run it: TRITONDT_DEBUG=1."""
    return _switch("TRITONDT_DEBUG")


def logs() -> bool:
    """Whether every redistribution that nobody asked for by name is logged: TRITONDT_LOG=1."""
    return _switch("TRITONDT_LOG")


def _switch(name: str) -> bool:
    text = os.environ.get(name, "0")
    if text not in ("0", "1"):
        raise WorldError(f"{name}={text!r} is set; allowed are 0 and 1")
    return text == "1"


def _positive(name: str, default: float) -> float:
    text = os.environ.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise WorldError(f"{name}={text!r} is set; allowed is a number above 0")
    return value
