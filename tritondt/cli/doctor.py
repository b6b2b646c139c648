"""`doctor`: what a machine offers to tritondt, and whether two processes can exchange tensors on it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import socket
import sys
from collections.abc import Callable

import click
import torch
import torch.distributed as dist

import tritondt as T
from tritondt.cli.flight.command import flight
from tritondt.cli.launch import RankFailedError, num_cores, run_on_ranks

_NUM_RANKS = 2


@click.group(invoke_without_command=True, short_help="Print versions and devices, and try an exchange.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Print versions and devices, and exchange a tensor between two processes.

    Ends with status 1 if the exchange fails, and says why. With a command, runs that instead.
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(f"--json goes behind the command: doctor {context.invoked_subcommand} --json")
        return
    failure = exchange_failure()
    found: dict[str, object] = {
        "tritondt": T.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": str(torch.__version__),
        "triton": _installed_version("triton"),
        "extension": _extension(),
        "cores": num_cores(),
        "torch threads": torch.get_num_threads(),
        "cuda": _cuda(),
        "nccl": _nccl(),
        "gloo": _gloo(),
        "exchange": "OK" if failure is None else failure,
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            click.echo(f"{name:<14} {value}")
    if failure is not None:
        raise click.exceptions.Exit(1)


doctor.add_command(flight)


def exchange_failure() -> str | None:
    """Reason why two new processes could not redistribute a tensor over Gloo; None when they could."""
    try:
        run_on_ranks(_NUM_RANKS, _exchange_and_check, on_message=_refuse_message)
    except RankFailedError as error:
        return str(error)
    return None


def _exchange_and_check(send: Callable[[object], None]) -> None:
    """Redistributes rows of a 5 x 3 tensor to columns, compared with torch.chunk."""
    mesh = T.init_device_mesh("cpu", (_NUM_RANKS,), mesh_dim_names=("ranks",))
    whole = torch.arange(15.0).reshape(5, 3)
    meta = T.TensorMeta.contiguous((5, 3))
    rows, columns = (T.DTensorSpec(mesh, (T.Shard(dim),), meta) for dim in (0, 1))
    rank = dist.get_rank()
    own_columns = T.redistribute(whole.chunk(_NUM_RANKS, 0)[rank], rows, columns)
    torch.testing.assert_close(own_columns, whole.chunk(_NUM_RANKS, 1)[rank], rtol=0, atol=0)


def _refuse_message(message: object) -> None:
    raise AssertionError(f"the ranks of the exchange send no messages, but one sent {message!r}")


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _extension() -> str:
    """Path from which `tritondt._C` was loaded; `import tritondt` has failed already if it is not built."""
    return str(importlib.import_module("tritondt._C").__file__)


def _cuda() -> str:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "no device" + (" (torch is built without CUDA)" if built is None else f" (torch has {built})")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}: {', '.join(names)}"


def _nccl() -> str:
    if not dist.is_nccl_available():
        return "not in this torch"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _gloo() -> str:
    """Address that Gloo listens on unless GLOO_SOCKET_IFNAME names an interface."""
    host = socket.gethostname()
    try:
        return f"{socket.gethostbyname(host)}, for the host name {host}"
    except OSError as error:
        return f"127.0.0.1, since the host name {host} has no address ({error})"
