"""Three ranks in one training after another, of which the middle one is killed at a random moment of each.

    with RandomKills(seed) as kills:
        told = [kills.kill() for _ in range(20)]

The two others are the same processes throughout: each training shows that they go on, and what one has left behind.
"""

import multiprocessing
import os
import random
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.fault_ranks import PRELOADED, Possessions, left_behind
from tests.harness.fault_training import train
from tests.harness.faults import SIZE

VICTIM, SURVIVORS = 1, (0, 2)
# Only a hang reaches the first; the others are long enough for several exchanges, or for none.
_DEADLINE_S, _LONGEST_WAIT_S, _TIMEOUT_S = 150.0, 0.03, 60.0
# Terms of 24 kB that everybody reads, a transpose of 24 kB, a gather of 2 MB, and terms of 64 kB in pieces.
_PAIRS = (("P", "R", (64, 96)), ("S0", "S1", (96, 64)), ("S0", "R", (640, 800)), ("P", "S1", (128, 128)))


class Told(NamedTuple):
    """What a survivor raised, how its training before that differed, and what it had afterwards that it had not."""

    kind: str
    text: str
    wrong: str
    left: list[str]


class RandomKills:
    """Two processes that survive, and a third one for each kill; moments follow from the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, "tests.harness.killed.at_random"])
        self._survivors: list[tuple[Any, Connection]] = []
        self._generation = 0

    def __enter__(self) -> "RandomKills":
        self._survivors = [self._start(_survive, rank) for rank in SURVIVORS]
        self.kill()  # what starts once, starts now
        for _, pipe in self._survivors:
            pipe.send("count from here")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in self._survivors:
            process.kill()
            process.join()
            pipe.close()

    def _start(self, live: Any, rank: int) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=live, args=(self._store.port, rank, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def kill(self) -> list[Told]:
        """What the survivors were told when the other was killed in a training of all."""
        self._generation += 1
        process, pipe = self._start(_train_until_killed, VICTIM)
        for each in (pipe, *(pipe for _, pipe in self._survivors)):
            each.send(self._generation)
        assert _next(pipe) == "ready"
        time.sleep(self._random.uniform(0, _LONGEST_WAIT_S))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        pipe.close()
        return [Told(*_next(pipe)) for _, pipe in self._survivors]


def _next(pipe: Connection) -> Any:
    assert pipe.poll(_DEADLINE_S), "a rank says nothing"
    return pipe.recv()


def _join(port: int, generation: int, rank: int) -> None:
    store = dist.PrefixStore(f"{generation}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=_TIMEOUT_S))


def _set_up() -> None:
    os.environ.update(TRITONDT_TRANSPORT="shared-memory", TRITONDT_TIMEOUT=f"{_TIMEOUT_S:g}", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)


def _train_until_killed(port: int, rank: int, pipe: Connection) -> None:
    _set_up()
    _join(port, pipe.recv(), rank)
    train(T.Mesh((SIZE,)))
    pipe.send("ready")
    _exchange()


def _survive(port: int, rank: int, pipe: Connection) -> None:
    _set_up()
    before = None
    while True:
        order = pipe.recv()
        if order == "count from here":
            before = Possessions.now()
            continue
        _join(port, order, rank)
        wrong = train(T.Mesh((SIZE,)))
        try:
            _exchange()
        except T.PeerError as error:
            kind, text = type(error).__name__, str(error)
        T.abort()
        dist.destroy_process_group()
        pipe.send((kind, text, wrong, [] if before is None else left_behind(before)))


def _exchange() -> None:
    """Exchanges of several sizes, at once and issued, until one fails."""
    mesh = T.Mesh((SIZE,))
    specs = [
        [T.DTensorSpec(mesh, T.parse_placements(side), T.TensorMeta.contiguous(shape)) for side in sides]
        for *sides, shape in _PAIRS
    ]
    locals_ = [torch.ones(source.local_shape) for source, _ in specs]
    while True:
        for local, (source, target) in zip(locals_, specs, strict=True):
            T.redistribute(local, source, target)
