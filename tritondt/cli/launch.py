"""Execution of one function on several processes of this machine, none of which is left behind.

The launcher holds the store through which the ranks meet, so that it outlives a rank that dies. A rank
ends only when all have finished: one that closed its connections early would look like a dead peer.

Signals end a run, which none of Python's callbacks can swallow: a signal's handler raises wherever the program is just
then. In a destructor, or what a weak reference calls, Python prints that exception and goes on, and so would the run,
for minutes. While ranks are ended it would leave some of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tritondt.cli.user_error import UserError
from tritondt.comm import world
from tritondt.errors import PeerError


class Interrupts:
    """The last error that a handler of SIGINT or SIGTERM has raised."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._is_held = False

    def check(self) -> None:
        """Raises what a handler has raised, which may not have arrived."""
        if self._raised is not None:
            raise self._raised

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which nothing is raised; `check` does it afterwards."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def noting(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        """A handler that remembers what another one raises."""

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                self._raised = error
                if not self._is_held:
                    raise

        return handle


@contextmanager
def noted() -> Iterator[Interrupts]:
    """Context that remembers what handlers of SIGINT and SIGTERM raise; Python has them in the main thread alone."""
    made, before = Interrupts(), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = signal.signal(number, made.noting(handler))
    try:
        yield made
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


# A failing rank drags others down with it; within this time all of them have said so.
_FAILURE_GRACE_SECONDS = 1.0
# For closing connections once all results are here; whoever takes longer is killed.
_ENDING_SECONDS = 10.0
# How often it is looked whether a signal has been swallowed.
_CHECK_SECONDS = 1.0

Body = Callable[..., object]


class RankFailedError(PeerError):
    """A rank that this process started raised or died; holds its number, and its sentence or traceback."""


@dataclass(frozen=True)
class _Finished:
    result: object


@dataclass(frozen=True)
class _Failed:
    seconds: float
    text: str


@dataclass(frozen=True)
class _Rank:
    number: int
    process: BaseProcess
    connection: Connection[Any, Any]


def num_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_on_ranks(
    num_ranks: int,
    body: Body,
    *arguments: object,
    on_message: Callable[[object], None],
    preload: Sequence[str] = (),
) -> list[object]:
    """Call `body(send, *arguments)` on `num_ranks` new processes, inside a Gloo process group.

    Messages that a rank passes to `send` arrive at `on_message` here; everything is pickled, `body` by its name.
    `preload` names modules to be imported once for all ranks. Returns the results in rank order. Raises
    RankFailedError, after ending all ranks, if one fails.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    with noted() as interrupts:
        try:
            with _waiting_threads_sleep():
                for number in range(num_ranks):
                    _start(ranks, number, (num_ranks, store.port, body, arguments), preload)
            results = _listen(ranks, on_message, interrupts)
            for rank in ranks:
                rank.connection.send(None)
            for rank in ranks:
                rank.process.join(_ENDING_SECONDS)
            return results
        finally:
            with interrupts.held():
                _end(ranks)
            interrupts.check()


def _end(ranks: list[_Rank]) -> None:
    """Kills all ranks: Python joins at its exit whom it knows of, and each that lives waits for the launcher's end."""
    started = [rank for rank in ranks if rank.process.pid is not None]
    for rank in started:
        rank.process.kill()
    for rank in started:
        rank.process.join()
    for rank in ranks:
        rank.connection.close()


def _start(ranks: list[_Rank], number: int, arguments: tuple[object, ...], preload: Sequence[str]) -> None:
    """Starts a rank, which is in the list before it runs: a signal in between leaves nobody behind."""
    here, there = multiprocessing.Pipe()
    context = _context(preload)
    process = context.Process(
        target=_run_rank,
        args=(number, there, dict(os.environ), *arguments),
        name=f"tritondt rank {number}",
    )
    ranks.append(_Rank(number, process, here))
    process.start()
    there.close()


def _context(preload: Sequence[str]) -> SpawnContext | ForkServerContext:
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    # Importing torch takes 2.5 s of a core; its optimizers import torch._dynamo, another 2.4 s. The server does it
    # once and forks each rank from there, before any thread exists.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    # Ctrl-C reaches the server, too, which ignores it once it has imported, and prints a traceback before. It inherits
    # the mask, and so do ranks, which ignore it anyway; here it arrives as soon as the server has been started.
    resource_tracker.ensure_running()  # unblocks it where it starts
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return context


@contextmanager
def _waiting_threads_sleep() -> Iterator[None]:
    """Context in which OpenMP threads of new processes sleep while they wait, unless the user has said otherwise.

    OpenMP reads this once, when torch is loaded. On 2 cores with a load of 6 to 8 a step of the demo on 2
    threads took 0.9 to 1.2 s this way, and 1.7 to 5.2 s when waiting threads kept their core.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def _listen(ranks: list[_Rank], on_message: Callable[[object], None], interrupts: Interrupts) -> list[object]:
    """Results of all ranks; raises once a rank has failed and the others had time to say why."""
    results: dict[int, object] = {}
    failures: dict[int, _Failed | None] = {}
    deadline = float("inf")
    while len(results) + len(failures) < len(ranks) and time.monotonic() < deadline:
        open_ranks = {rank.connection: rank for rank in ranks if rank.number not in results | failures}
        interrupts.check()
        timeout = min(_CHECK_SECONDS, max(0.0, deadline - time.monotonic()))
        for connection in wait(list(open_ranks), timeout):
            rank = open_ranks[connection]  # type: ignore[index]  # wait returns what it was given
            message = _receive(rank.connection)
            if isinstance(message, _Finished):
                results[rank.number] = message.result
            elif message is None or isinstance(message, _Failed):
                failures[rank.number] = message
                deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)
            else:
                on_message(message)
    if failures:
        raise _first_failure(ranks, failures)
    return [results[rank.number] for rank in ranks]


def _receive(connection: Connection[Any, Any]) -> object:
    """Next message, or None once the rank has gone without a last word."""
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return None


def _first_failure(ranks: list[_Rank], failures: dict[int, _Failed | None]) -> RankFailedError:
    """Failure that caused the others: a death without a word, else the earliest to be raised."""
    for number, failure in failures.items():
        if failure is None:
            process = ranks[number].process
            process.join()
            code = process.exitcode or 0
            ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            return RankFailedError(f"rank {number} of {len(ranks)} {ending} before it was done")
    raised = {number: failure for number, failure in failures.items() if failure is not None}
    number = min(raised, key=lambda number: raised[number].seconds)
    return RankFailedError(f"rank {number} of {len(ranks)} failed:{raised[number].text}")


def _run_rank(
    number: int,
    connection: Connection[Any, Any],
    environment: dict[str, str],
    num_ranks: int,
    port: int,
    body: Body,
    arguments: tuple[object, ...],
) -> None:
    # Ctrl-C reaches every process of a terminal; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    # The server that forked this process may be older than a change of the launcher's environment.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(max(1, num_cores() // num_ranks))
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=number, world_size=num_ranks)
        result = body(connection.send, *arguments)
    except UserError as error:
        connection.send(_Failed(time.time(), f" {error}"))
        raise SystemExit(1) from None
    except Exception:  # noqa: BLE001 - whatever it is, the launcher reports it
        connection.send(_Failed(time.time(), f"\n{traceback.format_exc()}"))
        raise SystemExit(1) from None
    connection.send(_Finished(result))
    connection.recv()
    world.close()
    dist.destroy_process_group()


def _end_with_launcher() -> None:
    """End this process when the launcher is gone, even if it was killed and could say nothing."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "ranks are started by multiprocessing"
    wait([launcher.sentinel])
    os._exit(1)
