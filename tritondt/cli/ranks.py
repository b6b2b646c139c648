"""Ranks of a benchmark: processes of this machine that it starts, or those that torchrun, MPI or Slurm has started."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click
import torch.distributed as dist

from tritondt import environment
from tritondt.cli.launch import num_cores, run_on_ranks
from tritondt.cli.outputs import INTERRUPTED, is_first
from tritondt.comm import world
from tritondt.errors import TritondtError

# More only take turns: 16 ranks on a core are no measurement, and a thousand would end the machine.
_MOST_PER_CORE = 16

Send = Callable[[object], None]
Body = Callable[..., object]


def join(asked: int | None, default: int) -> int:
    """Number of ranks: of those that a launcher has started, which are joined here, else as asked for.

    UsageError where the two differ, and for more ranks than this machine can be asked to run.
    """
    found = environment.launched()
    if found is None:
        if asked is None:
            return default
        check_started_here(asked, "torchrun, mpirun or srun")
        return asked
    if asked not in (None, found.num_ranks):
        raise click.UsageError(f"--ranks {asked} was asked for, but the launcher has started {found.num_ranks}")
    if found.launcher == "torchrun":  # whose own store they meet in
        dist.init_process_group("gloo")
    else:
        store = dist.TCPStore(found.address, found.port, is_master=found.rank == 0)
        dist.init_process_group("gloo", store=store, rank=found.rank, world_size=found.num_ranks)
    return found.num_ranks


def check_started_here(num_ranks: int, launchers: str) -> None:
    """UsageError for more ranks than this machine can be asked to run; `launchers` start them on several."""
    most = _MOST_PER_CORE * num_cores()
    if num_ranks > most:
        raise click.UsageError(
            f"--ranks {num_ranks}: at most {most} processes are started on {num_cores()} cores, {_MOST_PER_CORE} each; "
            f"on several machines start them with {launchers}"
        )


def num_launched() -> int | None:
    """Number of processes that a launcher has started; None for a process started alone."""
    found = environment.launched()
    return None if found is None else found.num_ranks


def run(num_ranks: int, body: Body, request: object, on_message: Send) -> tuple[int, list[str]]:
    """Exit status, and what went wrong, of `body(send, request)` on all ranks; what rank 0 sends goes to `on_message`.

    Ctrl-C, SIGTERM and a rank that fails end the ranks that were started here, and are told, not raised.
    """
    try:
        with _terminated_like_interrupted():
            if dist.is_initialized():
                body(on_message if is_first() else _drop, request)
            else:
                run_on_ranks(num_ranks, body, request, on_message=on_message)
    except KeyboardInterrupt as error:
        return INTERRUPTED, ["terminated" if isinstance(error, Terminated) else "interrupted"]
    except (TritondtError, RuntimeError) as error:  # a rank that failed; Gloo's, where a rank of a launcher has
        return 1, [str(error)]
    return 0, []


def leave() -> None:
    """Ends this process's part among ranks that were joined; nothing otherwise."""
    if dist.is_initialized():
        world.close()
        dist.destroy_process_group()


def _drop(_: object) -> None:
    """Ignores a message, on ranks other than 0."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def raise_terminated(_: int, __: FrameType | None) -> None:
        raise Terminated

    before: Any = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
