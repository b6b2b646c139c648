"""Findings on what a machine offers to ranks, each with the remedy where it is not well."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import tritondt as T
from tritondt import environment
from tritondt.cli.launch import num_cores
from tritondt.comm.nccl.library import nccl_library
from tritondt.comm.transports.interfaces import asked_filter, no_address, outer_addresses
from tritondt.errors import WorldError

# NCCL takes some MB for each connection within a host, and Docker gives 64 MB where nobody asks for more.
LEAST_SHARED_BYTES = 1 << 30
# A rank has a connection to each of its peers, and a store's; programs have files beside.
LEAST_FILES = 4096
_SHARED_MEMORY = Path("/dev/shm")
_WHY_NCCL = {
    "explicit": "named by TRITONDT_NCCL_SO",
    "loaded": "the one that torch has loaded",
    "installed": "of an installed nvidia-nccl package; torch has loaded none",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; a "problem" ends the command with status 1, a "note" may matter."""

    name: str
    value: Any
    level: Literal["ok", "note", "problem"] = "ok"
    advice: str = ""


def machine_findings() -> list[Finding]:
    """Findings of this machine and process, without starting another."""
    return [*_versions(), _cores(), *_gpus(), _nccl(), _interfaces(), _host_name(), _shared_memory(), *_limits()]


def _versions() -> list[Finding]:
    triton = _installed_version("triton")
    gpu = torch.cuda.is_available()
    advice = "pip install triton: the kernels for GPUs need it" if gpu and triton is None else ""
    return [
        Finding("tritondt", T.__version__),
        Finding("python", f"{platform.python_version()} ({sys.executable})"),
        Finding("torch", str(torch.__version__)),
        Finding("triton", triton or "not installed", "problem" if advice else "ok", advice),
        Finding("extension", str(importlib.import_module("tritondt._C").__file__)),
    ]


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> Finding:
    return Finding("cores", f"{num_cores()}, and {torch.get_num_threads()} threads of torch")


def _gpus() -> list[Finding]:
    rocm = getattr(torch.version, "hip", None)
    if rocm is not None:
        advice = "kernels and transports for GPUs take CUDA's driver and NCCL; install a torch for CUDA or the CPU"
        return [Finding("gpus", f"torch is built for ROCm {rocm}, which is not supported", "problem", advice)]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return [
            Finding("gpus", "none" + (", torch is built without CUDA" if built is None else f", torch has {built}"))
        ]
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    found = [Finding("gpus", f"CUDA {torch.version.cuda}: {names}")]
    if count > 1:
        apart = [
            f"{one}-{other}"
            for one in range(count)
            for other in range(count)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ]
        advice = "" if not apart else "these go through the host's memory; see nvidia-smi topo -m, and IOMMU or ACS"
        value = "all pairs" if not apart else f"not {', '.join(apart)}"
        found.append(Finding("peer access", value, "note" if apart else "ok", advice))
    return found


def _nccl() -> Finding:
    """NCCL as this process would use it, and why that one."""
    try:
        library = nccl_library()
    except RuntimeError as error:
        needed = torch.cuda.is_available() or environment.nccl_path() is not None
        advice = "pip install nvidia-nccl-cu12 (or -cu13), or name a library by TRITONDT_NCCL_SO" if needed else ""
        return Finding("nccl", f"none: {error}", "problem" if needed else "ok", advice)
    return Finding("nccl", f"{library.version}, {_WHY_NCCL[library.origin]}: {library.path}")


def _interfaces() -> Finding:
    try:
        addresses, asked = outer_addresses(), asked_filter()
    except WorldError as error:
        return Finding("interfaces", str(error), "problem", "unset the variable, or name interfaces that are there")
    except OSError as error:
        advice = "ranks of this host reach each other; ranks of several need what lists interfaces (netlink sockets)"
        return Finding("interfaces", f"the system lists none ({error})", "problem", advice)
    if not addresses:
        level: Literal["note", "problem"] = "note" if asked is None else "problem"
        advice = "ranks of this host reach each other; for several hosts, set TRITONDT_SOCKET_IFNAME to their network"
        return Finding("interfaces", no_address(), level, advice)
    chosen = "" if asked is None else f" (chosen by {asked[0]}={asked[1]})"
    return Finding("interfaces", ", ".join(addresses) + chosen)


def _host_name() -> Finding:
    """Address of the host's name, which Gloo listens on unless GLOO_SOCKET_IFNAME names an interface."""
    host = socket.gethostname()
    try:
        return Finding("gloo", f"{socket.gethostbyname(host)}, for the host name {host}")
    except OSError as error:
        advice = f"add {host} to /etc/hosts, or set GLOO_SOCKET_IFNAME: other hosts cannot reach 127.0.0.1"
        return Finding("gloo", f"127.0.0.1, since the host name {host} has no address ({error})", "note", advice)


def _shared_memory() -> Finding:
    if not _SHARED_MEMORY.exists():
        return Finding("shared memory", f"no {_SHARED_MEMORY}", "note", "NCCL uses it between GPUs of a host: mount it")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    value = f"{free / 2**20:,.0f} MiB free in {_SHARED_MEMORY}"
    if free < LEAST_SHARED_BYTES:
        return Finding(
            "shared memory", value, "note", "NCCL may run out of it: docker run --shm-size=1g, or --ipc=host"
        )
    return Finding("shared memory", value)


def _limits() -> list[Finding]:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = files != resource.RLIM_INFINITY and files < LEAST_FILES
    advice = f"ulimit -n {LEAST_FILES} (or more, up to {hard}): a rank has a connection to each of its peers"
    found = [Finding("open files", _limit_text(files), "note" if is_low else "ok", advice if is_low else "")]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if torch.cuda.is_available():
        is_low = locked != resource.RLIM_INFINITY
        advice = "ulimit -l unlimited: InfiniBand and RoCE lock the memory that they read" if is_low else ""
        found.append(Finding("locked memory", _limit_text(locked), "note" if is_low else "ok", advice))
    return found


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit:,}"
