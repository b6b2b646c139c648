"""The program of a test of faults between two hosts: how each rank hears of them, and that all go on afterwards.

    python -m tests.harness.faults_on_hosts OPERATION FOLDER

It is one host, HOST_NUMBER, of two ranks, which it forks once torch is imported. Each fault of FAULTS befalls ranks
that run OPERATION again and again in a process group of their own. Ranks that it ends are forked anew, and all go on:
in the same group after `tritondt.abort()`, or in the next one. A rank writes a line of JSON for each error; the hosts
know by files in FOLDER who has heard.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.two_hosts import ADDRESSES
from tritondt.fsdp import fully_shard

RANKS_PER_HOST = 2
SIZE = 2 * RANKS_PER_HOST
LAST = SIZE - 1
# Of the last rank, but for the link of its host, and for that host, which no longer answers and says nothing.
FAULTS = ("stopped", "late", "unplugged", "killed", "vanished")
TIMEOUT_S = 6
_SHAPE = (256, 520)
_OPEN = ("01", "0A")  # states: established, and listening


class Operation:
    """A collective of the backend, redistributions, or a step of training, of which each rank knows the result."""

    def __init__(self, name: str) -> None:
        self._name = name
        dist.init_process_group("gloo" if name != "collective" else "tritondt", timeout=timedelta(seconds=90))
        self._mesh = T.Mesh((SIZE,))
        if name in ("fsdp", "hsdp"):
            self._mesh = self._mesh if name == "fsdp" else T.Mesh((SIZE // RANKS_PER_HOST, RANKS_PER_HOST))
            self._layer = torch.nn.Linear(_SHAPE[1], _SHAPE[0], bias=False)
            fully_shard(self._layer, mesh=self._mesh)

    def run(self) -> None:
        """Runs it once; AssertionError for another result."""
        rank = dist.get_rank()
        if self._name in ("fsdp", "hsdp"):
            self._layer.zero_grad()
            self._layer(torch.full((SIZE, _SHAPE[1]), float(rank))).sum().backward()
            assert bool((self._layer.weight.grad.to_local() == sum(range(SIZE))).all())  # type: ignore[union-attr]
            return
        if self._name == "collective":
            total = torch.full((50_000,), float(rank))
            dist.all_reduce(total)
            assert bool((total == sum(range(SIZE))).all())
            return
        whole = torch.arange(float(_SHAPE[0] * _SHAPE[1])).view(_SHAPE)
        terms = T.DTensor.from_local(whole * rank, self._mesh, [T.Partial()])
        rows = T.DTensor.from_local(whole.chunk(SIZE)[rank], self._mesh, [T.Shard(0)])
        everywhere = [T.Replicate()]
        if self._name == "list":
            summed, gathered = T.redistribute_many([(terms, everywhere), (rows, everywhere)])
            torch.testing.assert_close(gathered.to_local(), whole, rtol=0, atol=0)
        else:
            summed = terms.redistribute(placements=everywhere, async_op=self._name == "asynchronous")
        torch.testing.assert_close(summed.to_local(), whole * sum(range(SIZE)), rtol=0, atol=0)

    def set_timeout(self) -> None:
        """Sets the timeout of a fault."""
        if self._name == "collective":
            dist.group.WORLD.set_timeout(timedelta(seconds=TIMEOUT_S))  # type: ignore[union-attr]
        else:
            T.set_timeout(self._mesh, TIMEOUT_S)


class Told:
    """Who has come to where, by files that both hosts see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tell(self, what: str, rank: int) -> None:
        """Says that a rank has come there."""
        (self._folder / f"{what}-{rank}").touch()

    def has(self, what: str, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` have."""
        return all((self._folder / f"{what}-{rank}").exists() for rank in ranks)

    def wait(self, what: str, ranks: Sequence[int]) -> None:
        """Returns when they have."""
        while not self.has(what, ranks):
            time.sleep(0.02)


def survivors(fault: str) -> range:
    """The ranks that hear of a fault from others."""
    return range(RANKS_PER_HOST) if fault == "vanished" else range(SIZE) if fault == "unplugged" else range(LAST)


def _set_link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "wire", state], check=True)


def _befall(fault: str, told: Told) -> None:
    """Brings a fault about, on the last rank."""
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "late":
        told.wait(fault, survivors(fault))
    elif fault == "unplugged":
        _set_link("down")
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:  # the host's first process sets its link down, and kills its ranks
        told.tell("vanishing", LAST)
        time.sleep(600)


def _meet(fault: str, operation: Operation, told: Told) -> None:
    rank = dist.get_rank()
    for _ in range(2):
        operation.run()
    operation.set_timeout()
    told.tell(f"before-{fault}", rank)
    told.wait(f"before-{fault}", range(SIZE))
    if rank == LAST:
        _befall(fault, told)
    began, text = time.monotonic(), "no error"
    try:
        for _ in range(3):  # all that a rank lacks of the first may have come before
            operation.run()
    except T.PeerError as error:
        text = f"{type(error).__name__}: {error}"
    line = {"rank": rank, "fault": fault, "text": text, "seconds": time.monotonic() - began}
    os.write(1, (json.dumps(line) + "\n").encode())
    told.tell(fault, rank)
    told.wait(fault, survivors(fault))
    if fault == "unplugged" and rank == LAST:
        _set_link("up")
    T.abort()
    if fault in ("stopped", "late", "unplugged"):
        operation.run()
        T.close()


def run_rank(rank: int, first: int, name: str, told: Told) -> None:
    """Meets the faults from number `first` on, as one rank, and runs the operation once more at the end."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    for number, fault in enumerate(FAULTS[first:], first):
        os.environ["MASTER_PORT"] = str(29501 + number)
        _meet(fault, Operation(name), told)
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(29501 + len(FAULTS))
    operation = Operation(name)
    operation.run()
    T.close()
    dist.destroy_process_group()


class Host:
    """The ranks of this host, as processes, which come again where a fault has ended them."""

    def __init__(self, name: str, told: Told) -> None:
        self._name, self._told = name, told
        self._own = [int(os.environ["HOST_NUMBER"]) * RANKS_PER_HOST + place for place in range(RANKS_PER_HOST)]
        self._running: dict[int, int] = {}  # ranks by process

    def start(self, rank: int, first: int) -> None:
        """Forks a rank that meets the faults from number `first` on."""
        child = os.fork()
        if child:
            self._running[child] = rank
            return
        try:
            run_rank(rank, first, self._name, self._told)
        except BaseException:  # noqa: BLE001  its parent sees how it ends
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)

    def run(self) -> None:
        """Runs the ranks to their end; AssertionError where one fails, or leaves something."""
        for rank in self._own:
            self.start(rank, 0)
        is_last, has_vanished = LAST in self._own, False
        while self._running:
            if is_last and not has_vanished and self._told.has("vanishing", [LAST]):
                has_vanished = True
                self._vanish()
            child, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if child == 0:
                time.sleep(0.02)
            elif os.WIFSTOPPED(status):
                self._told.wait("stopped", survivors("stopped"))
                os.kill(child, signal.SIGCONT)
            else:
                rank = self._running.pop(child)
                code = os.waitstatus_to_exitcode(status)
                if code == -signal.SIGKILL and rank == LAST and not has_vanished:
                    self._told.wait("killed", survivors("killed"))
                    self.start(rank, FAULTS.index("killed") + 1)
                else:
                    assert code == 0, f"rank {rank} has ended with {code}"
        left = [*map(str, Path("/dev/shm").iterdir()), *_sockets()]
        assert not left, f"left on the host of ranks {self._own}: {left}"

    def _vanish(self) -> None:
        """The end of all ranks at once, of which nothing comes through the link."""
        _set_link("down")
        for child in self._running:
            os.kill(child, signal.SIGKILL)
        for child in tuple(self._running):
            os.waitpid(child, 0)
        self._running.clear()
        self._told.wait("vanished", survivors("vanished"))
        _set_link("up")
        for rank in self._own:
            self.start(rank, FAULTS.index("vanished") + 1)


def _sockets() -> list[str]:
    """Connections of this host that no process has closed, and ports at which one listens."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [f"{line[1]} to {line[2]}" for line in lines if line[3] in _OPEN]


def main() -> None:
    """All ranks of this host."""
    os.environ.update(WORLD_SIZE=str(SIZE), MASTER_ADDR=ADDRESSES[0], LOCAL_WORLD_SIZE=str(RANKS_PER_HOST))
    Host(sys.argv[1], Told(Path(sys.argv[2]))).run()


if __name__ == "__main__":
    main()
