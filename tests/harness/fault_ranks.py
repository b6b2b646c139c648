"""Three processes of which one fails: what the others raise, what they leave behind, and how they train on.

    with FaultRanks("sockets", fault) as ranks:
        observation = ranks.observe(case)

Processes are forked from a server that has imported torch once, and serve until a fault ends one of them.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.descriptors import kept_targets
from tests.harness.fault_training import AwayError, PlantedError, fail, train
from tests.harness.faults import SIZE, Case, Fault, Observation, Outcome
from tests.harness.nccl_on_host import use_fake_nccl
from tests.harness.stacks import listen, stacks_of

# What nobody hears of is waited for that long; what somebody hears of must come long before the other.
SILENT_TIMEOUT_S, HEARD_TIMEOUT_S = 2.0, 30.0
_DEADLINE_S, _SETTLE_S = 150.0, 60.0
_FREE_PORT = 0
# What the first view of a distributed tensor imports in every process is imported once: it takes 0.3 s, or a second.
PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.tensor",
    "tritondt.ops.families",
    "tests.harness.fault_ranks",
]
# Starting a process polls all others, and of two threads that poll one at a time the later reads 255 for its status.
_polling = threading.Lock()


class FaultRanks:
    """The processes of a transport, for cases of one fault, one after the other."""

    def __init__(self, transport: str, fault: Fault) -> None:
        self._transport, self._fault = transport, fault
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._hung: list[str] = []
        self._deadline = 0.0
        # As with torchrun, whose agent holds the store: a rank that dies does not take it along.
        self._store = dist.TCPStore("127.0.0.1", _FREE_PORT, is_master=True, wait_for_workers=False)
        self._num_started = 0
        self._stacks = tempfile.TemporaryDirectory(prefix="tritondt-stacks-")

    def __enter__(self) -> "FaultRanks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._stacks.cleanup()

    def observe(self, case: Case) -> Observation:
        """Lets the ranks train, one of them fail, and the others train on."""
        self._deadline = time.monotonic() + _DEADLINE_S
        if not self._processes:
            self._start()
        for rank in range(SIZE):
            self._tell(rank, case)
        culprit = self._fault.culprit
        struck = self._struck(culprit)
        survivors = [rank for rank in range(SIZE) if rank != culprit]
        raised: dict[int, tuple[str, str, float]] = {rank: self._raised_by(rank) for rank in survivors}
        if self._fault.name.startswith("stopped"):
            os.kill(self._processes[culprit].pid, signal.SIGCONT)
        if self._fault.ends_process:
            self._end_of(culprit, -signal.SIGKILL if self._fault.name.startswith("killed") else 0)
        else:
            raised[culprit] = self._raised_by(culprit)
        outcomes = {rank: Outcome(kind, text, at - struck) for rank, (kind, text, at) in raised.items()}
        for rank in raised:
            self._tell(rank, "go on")
        last = {rank: self._next(rank) for rank in raised}
        if self._fault.ends_process:
            for rank in survivors:
                self._tell(rank, None)
                self._end_of(rank, 0)
        observation = Observation(
            outcomes,
            {rank: found[0] for rank, found in last.items() if found},
            {rank: found[1] for rank, found in last.items() if found},
            tuple(self._hung),
        )
        if self._hung or self._fault.ends_process:
            self._end()
        return observation

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._num_started += 1
        place = _Place(self._transport, self._fault, self._store.port, f"{self._num_started}")
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            listener = self._stacks_path(rank)
            process = context.Process(target=_live, args=(place, rank, theirs, listener), daemon=True)
            with pytest.MonkeyPatch.context() as patch:
                # Without it c10d takes a second to print the stack of each warning about a store that is gone.
                patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
                with _polling:
                    process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _struck(self, culprit: int) -> float:
        """When the fault did."""
        found = self._next(culprit)
        if isinstance(found, float):
            return found
        self._hung.append(f"rank {culprit} said {found} before the fault")
        return time.monotonic()

    def _raised_by(self, rank: int) -> tuple[str, str, float]:
        found: tuple[str, str, float] | None = self._next(rank)
        return ("silent", "", time.monotonic()) if found is None else found

    def _next(self, rank: int) -> Any:
        """What a rank says next, None where it dies or says nothing."""
        if not self._pipes[rank].poll(max(self._deadline - time.monotonic(), 0)):
            where = stacks_of(self._processes[rank].pid, self._stacks_path(rank))
            self._hung.append(f"rank {rank} says nothing, {where}")
            return None
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):  # a reset, where it left an order unread
            self._hung.append(f"rank {rank} is gone, with exit status {_exit_status(self._processes[rank], 1)}")
            return None

    def _stacks_path(self, rank: int) -> Path:
        return Path(self._stacks.name) / f"{self._num_started}-{rank}"

    def _tell(self, rank: int, order: Any) -> None:
        try:
            self._pipes[rank].send(order)
        except BrokenPipeError:
            self._hung.append(f"rank {rank} is gone")

    def _end_of(self, rank: int, status: int) -> None:
        found = _exit_status(self._processes[rank], max(self._deadline - time.monotonic(), 0))
        if found != status:
            self._hung.append(f"rank {rank} has exit status {found} instead of {status}")

    def _end(self) -> None:
        for process in self._processes:
            if _exit_status(process, 0) is None:
                process.kill()
            _exit_status(process, None)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()
        self._hung.clear()


def _exit_status(process: Any, timeout_s: float | None) -> int | None:
    """The exit status of a process, None where it has not ended in time."""
    wait([process.sentinel], timeout_s)
    with _polling:
        status: int | None = process.exitcode
    return status


class _Place(NamedTuple):
    """Where processes meet: a store of the test's process, and a prefix in it that no other group of ranks has."""

    transport: str
    fault: Fault
    port: int
    prefix: str

    def join(self, generation: int, rank: int, size: int) -> None:
        """Initialises torch.distributed."""
        outer = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        store: dist.Store = dist.PrefixStore(f"{self.prefix}/{generation}", outer)
        if self.fault.hosts_store and generation == 1:
            store = self._hosted(store, rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))

    def _hosted(self, outer: dist.Store, rank: int) -> dist.Store:
        if rank == 0:
            hosted = dist.TCPStore("127.0.0.1", _FREE_PORT, is_master=True, wait_for_workers=False)
            outer.set("port", str(hosted.port))
            return hosted
        return dist.TCPStore("127.0.0.1", int(outer.get("port")), is_master=False)


class Possessions(NamedTuple):
    """What a process has that could be left behind; of what has no name of its own, how many."""

    descriptors: Counter[str]
    threads: Counter[str]
    shared_memory: Counter[str]
    children: Counter[str]

    @staticmethod
    def now() -> "Possessions":
        gc.collect()
        tasks = sorted(Path("/proc/self/task").iterdir())
        return Possessions(
            Counter(kept_targets()),
            Counter(_text(task / "comm").strip() for task in tasks),
            Counter(
                line
                for line in Path("/proc/self/maps").read_text().splitlines()
                if "/dev/shm" in line or "memfd:" in line
            ),
            Counter(child for task in tasks for child in _text(task / "children").split()),
        )

    def beyond(self, before: "Possessions") -> list[str]:
        """What has come since."""
        pairs = zip(self._fields, self, before, strict=True)
        return [f"{name}: {dict(now - then)}" for name, now, then in pairs if now - then]


def _text(of_task: Path) -> str:
    try:
        return of_task.read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
        return ""


def _live(place: _Place, rank: int, pipe: Connection, stacks: Path) -> None:
    """The life of one of the processes."""
    listen(stacks)
    gc.freeze()  # what the server has imported is shared memory until a collection looks at it, for 0.2 s
    is_double = place.transport in ("nccl", "slots")
    transport = "sockets" if is_double else place.transport
    os.environ.update(TRITONDT_TRANSPORT=transport, GLOO_SOCKET_IFNAME="lo")
    os.environ["TRITONDT_SLOTS"] = str(int(place.transport == "slots"))
    torch.set_num_threads(1)  # the server may have imported torch with more, which wait for each other on busy cores
    try:
        _serve(place, rank, pipe)
    except SystemExit as leaving:  # as a program does: multiprocessing would not let Python end
        ctypes.pythonapi.Py_Exit(leaving.code or 0)
    except BaseException as error:
        pipe.send((type(error).__name__, f"unexpected: {error}", time.monotonic()))
        raise
    os._exit(0)  # saves the second in which the interpreter frees all of torch


def _serve(place: _Place, rank: int, pipe: Connection) -> None:
    place.join(1, rank, SIZE)
    if place.transport in ("nccl", "slots"):
        use_fake_nccl()
    train(T.Mesh((SIZE,)))  # starts what starts once: autograd's threads, imports
    T.close()
    before = Possessions.now()
    while (case := pipe.recv()) is not None:
        pipe.send(_raised(case, rank, pipe))
        pipe.recv()
        T.abort()  # for those that have not raised
        left = left_behind(before)
        size = SIZE
        if place.fault.ends_process:
            dist.destroy_process_group()
            size -= 1
            place.join(2, rank - (rank > place.fault.culprit), size)
        wrong = train(T.Mesh((size,)))
        T.close()
        pipe.send((left, wrong))
    dist.destroy_process_group()


def left_behind(before: Possessions) -> list[str]:
    """What has come since and stays; a thread in a call on a store that is gone ends with the call."""
    end = time.monotonic() + _SETTLE_S
    while (found := Possessions.now().beyond(before)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _raised(case: Case, rank: int, pipe: Connection) -> tuple[str, str, float]:
    """Trains until something is raised, and ends the world as a program would; who returns early does not."""
    timeout_s = SILENT_TIMEOUT_S if case.fault.is_silent else HEARD_TIMEOUT_S
    try:
        fail(case, rank, timeout_s, lambda: pipe.send(time.monotonic()))
    except AwayError:
        return "AwayError", "", time.monotonic()
    except (T.TritondtError, PlantedError, RuntimeError) as error:
        found = type(error).__name__, str(error), time.monotonic()
        T.abort()
        return found
    return "nothing", "", time.monotonic()
