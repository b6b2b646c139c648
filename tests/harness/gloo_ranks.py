"""Ranks as real processes on Gloo, started once and given many functions to run.

    with GlooRanks(4) as ranks:
        results = ranks.run(body, argument)     # body(rank, argument), a function that its module names

They are forked from a process that has imported torch, because importing it once in each takes most of a minute for
eight ranks on two busy cores. Functions and results travel pickled through pipes, and every wait
for a rank ends after `timeout_s`, with the traceback of each rank that failed.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.harness.fork_server import REPOSITORY, fork_server
from tests.harness.ports import free_port
from tritondt.comm import world


class Failure(NamedTuple):
    """A rank that raised: the class of the error, what it said, and where."""

    kind: str
    text: str
    trace: str


_LENGTH = struct.Struct("<Q")
_LATE = Failure("late", "no answer came in time", "no answer came in time")
_CLONE_NEWUSER, _CLONE_NEWNET, _SIOCSIFFLAGS = 0x10000000, 0x40000000, 0x8914


class RanksError(Exception):
    """One or more ranks raised, died or did not answer."""


class UncaughtError(Exception):
    """Raised in a rank, it ends the process as any uncaught exception does."""


class GlooRanks:
    """`size` processes on this machine, with torch.distributed initialised on Gloo, or another backend.

    With `own_network` the loopback interface carries only what these ranks send, where the system allows that. Each
    calls `prepare`, which its module names, before anything else. `fresh` ones import torch themselves: CUDA does not
    work in a fork of a process that has so much as looked for it.
    """

    def __init__(
        self,
        size: int,
        environment: Mapping[str, str] | None = None,
        *,
        own_network: bool = False,
        prepare: Callable[[], None] | None = None,
        backend: str = "gloo",
        fresh: bool = False,
    ) -> None:
        self.size = size
        preparation = None if prepare is None else (prepare.__module__, prepare.__qualname__)
        orders, answers = [os.pipe() for _ in range(size)], [os.pipe() for _ in range(size)]
        theirs = [end for order, answer in zip(orders, answers, strict=True) for end in (order[0], answer[1])]
        self._orders: list[int | None] = [order[1] for order in orders]
        self._answers = [answer[0] for answer in answers]
        self._statuses: dict[int, int] = {}
        self._ending: list[int] | None = None
        self._reports, reports = os.pipe()
        what = {"own_network": own_network, "fresh": fresh, "preparation": preparation, "backend": backend}
        fork_server().fork(
            "tests.harness.gloo_ranks:fork_ranks", _variables(size, environment or {}), what, [reports, *theirs]
        )
        for end in (reports, *theirs):
            os.close(end)
        self.pids: list[int] = self._report()
        atexit.register(self.kill)

    def __enter__(self) -> "GlooRanks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, body: Callable[..., Any], *arguments: Any, timeout_s: float = 150.0) -> list[Any]:
        """The results of `body(rank, *arguments)` by rank; raises RanksError, with tracebacks, if a rank failed."""
        outcomes = self.outcomes(body, *arguments, timeout_s=timeout_s)
        failed = [f"rank {rank}:\n{found.trace}" for rank, found in enumerate(outcomes) if isinstance(found, Failure)]
        if failed:
            raise RanksError("\n".join(failed))
        return outcomes

    def outcomes(self, body: Callable[..., Any], *arguments: Any, timeout_s: float = 150.0) -> list[Any]:
        """The results by rank, a Failure in place of one where the rank raised or died.

        Raises RanksError where a rank neither answers nor dies in time; all processes are then killed.
        """
        order = pickle.dumps((body.__module__, body.__qualname__, arguments))
        for pipe in self._orders:
            if pipe is not None:
                _write(pipe, order)
        deadline = time.monotonic() + timeout_s
        outcomes = [self._outcome(rank, deadline) for rank in range(self.size)]
        late = [rank for rank, outcome in enumerate(outcomes) if outcome is _LATE]
        if late:
            self.kill()
            raise RanksError(f"ranks {late} did not end {body.__qualname__} within {timeout_s} s; others: {outcomes}")
        return outcomes

    def _outcome(self, rank: int, deadline: float) -> Any:
        try:
            found = _read(self._answers[rank], deadline)
        except EOFError:
            text = f"the process has died with status {self.status(rank)}"
            return Failure("died", text, text)
        return _LATE if found is None else pickle.loads(found)

    def end(self, rank: int) -> None:
        """Lets a rank end by itself; it takes part in nothing any more."""
        pipe, self._orders[rank] = self._orders[rank], None
        if pipe is not None:
            os.close(pipe)

    def begin_close(self) -> None:
        """Lets all processes that are alive end, which `close` waits for: several sets of ranks end side by side."""
        if self._ending is None:
            self._ending = [rank for rank in range(len(self.pids)) if self.status(rank, timeout_s=0) is None]
            for rank in self._ending:
                self.end(rank)

    def close(self) -> None:
        """Ends the processes; raises RanksError where one that was alive does not end well by itself."""
        if not self.pids:
            return
        self.begin_close()
        statuses = {rank: self.status(rank, timeout_s=150) for rank in self._ending or ()}
        self.kill()
        if any(status != 0 for status in statuses.values()):
            raise RanksError(f"ranks ended with these statuses, None being those that did not in 150 s: {statuses}")

    def status(self, rank: int, timeout_s: float = 20.0) -> int | None:
        """The exit status of a rank, negative for a signal, None where it does not end in time."""
        deadline = time.monotonic() + timeout_s
        while rank not in self._statuses:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._reports], [], [], left)[0]:
                return None
            ended, status = self._report()
            self._statuses[ended] = status
        return self._statuses[rank]

    def _report(self) -> list[int]:
        try:
            found = _read(self._reports, None)
        except EOFError:
            raise RanksError("the parent of the ranks has died") from None
        assert found is not None, "a wait without a deadline ended"
        told: list[int] = json.loads(found)
        return told

    def kill(self) -> None:
        """Ends the processes at once."""
        atexit.unregister(self.kill)
        for rank, pid in enumerate(self.pids):
            if rank not in self._statuses:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with suppress(EOFError):
            while True:  # until all have been waited for by their parent, which ends then
                _read(self._reports, None)
        for pipe in (*self._orders, *self._answers, self._reports):
            if pipe is not None:
                os.close(pipe)
        self._orders, self._answers, self.pids = [], [], []


def _variables(size: int, environment: Mapping[str, str]) -> dict[str, str]:
    port = free_port()
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        # The network between the ranks is this machine's loopback, whatever the host name resolves to.
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
    }


def _write(pipe: int, content: bytes) -> None:
    message = _LENGTH.pack(len(content)) + content
    with suppress(BrokenPipeError):  # the rank has died, which reading its answer tells
        while message:
            message = message[os.write(pipe, message) :]


def _read(pipe: int, deadline: float | None) -> bytes | None:
    """One message, or None where it does not come before the deadline; EOFError where the other side is gone."""
    header = _read_bytes(pipe, _LENGTH.size, deadline)
    return None if header is None else _read_bytes(pipe, _LENGTH.unpack(header)[0], deadline)


def _read_bytes(pipe: int, count: int, deadline: float | None) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not select.select([pipe], [], [], left)[0]:
            return None
        found = os.read(pipe, count - len(content))
        if not found:
            raise EOFError
        content += found
    return bytes(content)


def fork_ranks(descriptors: list[int], what: dict[str, Any]) -> None:
    """The parent of the ranks: forks them, says who they are, and how each has ended."""
    reports, *theirs = descriptors
    dist.set_debug_level_from_env()
    if what["own_network"]:
        _leave_network()
    ranks: dict[int, int] = {}
    for rank, (orders, answers) in enumerate(zip(theirs[::2], theirs[1::2], strict=True)):
        pid = os.fork()
        if pid == 0:
            for end in {*descriptors} - {orders, answers}:
                os.close(end)
            os.environ["RANK"] = str(rank)
            served = (rank, orders, answers, what["preparation"], what["backend"])
            if what["fresh"]:
                for end in (orders, answers):
                    os.set_inheritable(end, True)
                program = (
                    "import json, sys; from tests.harness import gloo_ranks; gloo_ranks.serve(*json.loads(sys.argv[1]))"
                )
                os.execv(sys.executable, [sys.executable, "-c", program, json.dumps(served)])
            serve(*served)
            return
        ranks[pid] = rank
    for end in theirs:
        os.close(end)
    _tell(reports, list(ranks))
    while ranks:
        pid, status = os.wait()
        _tell(reports, [ranks.pop(pid), os.waitstatus_to_exitcode(status)])


def _tell(reports: int, numbers: list[int]) -> None:
    _write(reports, json.dumps(numbers).encode())


def _leave_network() -> None:
    """Moves this process to a network of its own that has only a loopback; without the right to, it stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            up_and_running = 0x41
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", up_and_running))


def serve(rank: int, orders: int, answers: int, preparation: tuple[str, str] | None, backend: str) -> None:
    """The life of a rank: runs what comes in, answers, and ends when the pipe does."""
    faulthandler.enable()  # the stacks of one that crashes are in what its test printed
    dist.init_process_group(backend)
    if preparation is not None:
        module, name = preparation
        getattr(importlib.import_module(module), name)()
    failed = False
    while True:
        try:
            order = _read(orders, None)
        except EOFError:
            break
        assert order is not None, "a wait without a deadline ended"
        result = _run(order, rank)
        failed = failed or isinstance(result, Failure)
        _write(answers, pickle.dumps(result))
    if not failed:  # after a failure ranks may disagree about what is left to close, and end as any process does
        world.close()
        dist.destroy_process_group()
        os._exit(0)  # saves the 0.7 s in which the interpreter frees all of torch


def _run(order: bytes, rank: int) -> Any:
    module, name, arguments = pickle.loads(order)
    try:
        body = getattr(importlib.import_module(module), name)
        return body(rank, *arguments)
    except UncaughtError:
        raise
    # Whatever a rank raises is what its test looks at, what pytest.raises raises too, which is no Exception.
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001
        return Failure(type(error).__name__, str(error), traceback.format_exc())
