"""Three processes of which one fails: what the others raise, what they leave behind, and how they train on.

Each case has processes of its own, forked from a server that has imported torch once.
"""

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import tritondt as T
from tests.faults import CULPRIT, SIZE, AwayError, Case, PlantedError, fail, train

TIMEOUT_S = 3.0
# The watch looks once a second; the rest is for a machine that is busy.
SLACK_S = 12.0
_AT_ONCE = 6


class Outcome(NamedTuple):
    """What a rank raised, and how long after the fault."""

    kind: str
    text: str
    seconds: float


class Observation(NamedTuple):
    """What became of the ranks of a case, by rank; `hung` ranks were killed by the test."""

    outcomes: dict[int, Outcome]
    left_behind: dict[int, list[str]]
    trained: dict[int, list[list[float]]]
    statuses: dict[int, int | None]
    hung: tuple[int, ...]


class _Possessions(NamedTuple):
    """What a process has that could be left behind."""

    descriptors: list[str]
    threads: list[str]
    shared_memory: list[str]
    children: str

    @staticmethod
    def now() -> "_Possessions":
        return _Possessions(
            [_target(path) for path in Path("/proc/self/fd").iterdir()],
            [thread.name for thread in threading.enumerate() if thread.name.startswith("tritondt")],
            sorted(path.name for path in Path("/dev/shm").iterdir() if f"{os.getpid()}" in path.name),
            Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text(),
        )

    def beyond(self, before: "_Possessions") -> list[str]:
        found = [f"descriptors {self.descriptors}, before {before.descriptors}"]
        if len(self.descriptors) <= len(before.descriptors):
            found = []
        for name in ("threads", "shared_memory", "children"):
            if getattr(self, name) != getattr(before, name):
                found.append(f"{name} {getattr(self, name)}, before {getattr(before, name)}")
        return found


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # the descriptor with which the folder is read
        return "gone"


def observe(cases: list[tuple[str, Case]]) -> dict[tuple[str, Case], Any]:
    """Futures of observations, by transport and case; a few run at a time, most of which wait for a timeout."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    found = {(transport, case): pool.submit(_observe, case, transport) for transport, case in cases}
    pool.shutdown(wait=False)
    return found


def _observe(case: Case, transport: str) -> Observation:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed.tensor", "tests.fault_ranks"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(SIZE)]
        processes = [
            context.Process(target=_live, args=(case, rank, transport, folder, pipes[rank][1]), daemon=True)
            for rank in range(SIZE)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        try:
            return _Supervisor(case, processes, [ours for ours, _ in pipes]).observation()
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
            for ours, _ in pipes:
                ours.close()


class _Supervisor:
    """Follows the ranks of a case."""

    def __init__(self, case: Case, processes: list[Any], pipes: list[Connection]) -> None:
        self._case, self._processes, self._pipes = case, processes, pipes
        self._deadline = time.monotonic() + 60
        self._hung: list[int] = []

    def observation(self) -> Observation:
        struck = self._next(CULPRIT)
        others = [rank for rank in range(SIZE) if rank != CULPRIT]
        raised = {rank: self._next(rank) for rank in others}
        if self._case.fault == "stopped":
            os.kill(self._processes[CULPRIT].pid, signal.SIGCONT)
        if not self._case.ends_process:
            raised[CULPRIT] = self._next(CULPRIT)
        outcomes = {rank: Outcome(*found[:2], found[2] - struck) for rank, found in raised.items() if found}
        for rank in raised:
            self._tell(rank)
        last = {rank: self._next(rank) for rank in raised}
        statuses = {}
        for rank, process in enumerate(self._processes):
            process.join(max(self._deadline - time.monotonic(), 0))
            statuses[rank] = process.exitcode
        return Observation(
            outcomes,
            {rank: found[0] for rank, found in last.items() if found},
            {rank: found[1] for rank, found in last.items() if found},
            statuses,
            tuple(self._hung),
        )

    def _next(self, rank: int) -> Any:
        """What a rank says next, None where it dies or says nothing."""
        if not self._pipes[rank].poll(max(self._deadline - time.monotonic(), 0)):
            self._hung.append(rank)
            return None
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return None

    def _tell(self, rank: int) -> None:
        try:
            self._pipes[rank].send("go on")
        except BrokenPipeError:
            self._hung.append(rank)


def _live(case: Case, rank: int, transport: str, folder: str, pipe: Connection) -> None:
    """The life of one of the processes."""
    os.environ.update(
        TRITONDT_TRANSPORT=transport, TRITONDT_TIMEOUT=str(TIMEOUT_S), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
    )
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/all", SIZE), rank=rank, world_size=SIZE)
    before = _Possessions.now()
    pipe.send(_raised(case, rank, pipe))
    pipe.recv()
    if case.fault == "stays away":
        T.abort()
    gc.collect()
    left_behind = _Possessions.now().beyond(before)
    survivors = [other for other in range(SIZE) if other != CULPRIT or not case.ends_process]
    if case.ends_process:
        dist.destroy_process_group()
        size, place = len(survivors), survivors.index(rank)
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/new", size), rank=place, world_size=size)
    trained = train(dist.get_rank(), len(survivors))
    T.close()
    dist.destroy_process_group()
    pipe.send((left_behind, trained))


def _raised(case: Case, rank: int, pipe: Connection) -> tuple[str, str, float]:
    """Trains until something is raised, and ends the world as a training loop does; a rank that stays away does not."""
    try:
        fail(case, rank, lambda: pipe.send(time.monotonic()))
    except AwayError:
        return "AwayError", "", time.monotonic()
    except (T.TritondtError, PlantedError, RuntimeError) as error:
        found = type(error).__name__, str(error), time.monotonic()
        T.abort()
        return found
    return "nothing", "", time.monotonic()
