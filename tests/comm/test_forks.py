"""Processes that are forked from ranks, and ranks that end without closing: nobody else is disturbed."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tritondt as T
from tests.harness.gloo_ranks import Failure, GlooRanks, UncaughtError
from tests.harness.nccl_on_host import ranks_on
from tests.ops.sharded import distribute
from tritondt.comm import read_guard, world
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding import layout, mesh, spec

FULL = torch.arange(15.0).view(5, 3)
REFUSED = (
    r"process \d+ was forked from rank {rank}, process \d+, and cannot communicate in its place; use plain tensors"
)


@pytest.fixture(scope="module", params=["shared-memory", "sockets", "gloo", "nccl"])
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with ranks_on(request.param, 2, TRITONDT_TIMEOUT="20") as found:
        yield found


def rows() -> Any:
    return distribute(FULL, T.Mesh((2,)), "S0")


def gather(x: Any) -> None:
    torch.testing.assert_close(x.full_tensor(), FULL, rtol=0, atol=0)


def status_of_fork(body: Any, *arguments: Any, timeout_s: float = 20.0) -> int:
    """The exit status of a forked child that runs `body`: 0 where it returns."""
    pid = os.fork()
    if pid == 0:
        _run_and_leave(body, *arguments)
    return status_of(pid, timeout_s)


def status_of(pid: int, timeout_s: float = 20.0) -> int:
    """The exit status of a child, which must end by itself."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the forked child did not end within {timeout_s} s")


def _run_and_leave(body: Any, *arguments: Any) -> NoReturn:
    try:
        body(*arguments)
    except BaseException as error:  # noqa: BLE001  whatever it is, the child must end here
        sys.stderr.write(f"the forked child: {type(error).__name__}: {error}\n")
        os._exit(1)
    os._exit(0)


def use_everything(rank: int, x: Any, moved: Any, done: Any, communicator: Any) -> None:
    """In the child: communication is refused by name, what is there can be used."""
    uses: dict[str, Any] = {
        "redistribute": lambda: x.redistribute(placements=[T.Replicate()]),
        "redistribute, asynchronous": lambda: x.redistribute(placements=[T.Shard(1)], async_op=True),
        "a new tensor": lambda: distribute(FULL, T.Mesh((2,)), "S0").full_tensor(),
        "what is under way": moved.to_local,
        "its work": moved.work.wait,
        "a kept communicator": communicator.barrier,
        "its timeout": lambda: communicator.set_timeout(3),
        "T.set_timeout": lambda: T.set_timeout(x.device_mesh, 3),
        "its end": communicator.close,
        "T.close": T.close,
    }
    for use in uses.values():
        with pytest.raises(T.WorldError, match=REFUSED.format(rank=rank)):
            use()
    communicator.abort()  # ends nothing of the parent's
    T.abort()
    communicator.refuse(ValueError("the loss is not a number"))  # nobody is told
    with pytest.raises(T.WorldError, match=REFUSED.format(rank=rank)):
        x.full_tensor()
    torch.testing.assert_close(done.to_local(), FULL, rtol=0, atol=0)
    x.to_local().add_(1)  # memory of its own, which nobody reads
    assert not read_guard.readers


def fork_and_use(rank: int) -> tuple[int, bool]:
    T.abort()
    x = rows()
    done = x.redistribute(placements=[T.Replicate()])
    communicator = world.current().communicator((0, 1))
    communicator.barrier()
    folder = world.current().flight.path
    assert folder is not None
    # Rank 1 issues its own only later, so that this one is under way.
    moved = x.redistribute(placements=[T.Replicate()], async_op=True) if rank == 0 else None
    status = 0
    if moved is not None:
        status = status_of_fork(use_everything, rank, x, moved, done, communicator)
    communicator_goes_on = x.redistribute(placements=[T.Replicate()]) if moved is None else moved
    gather(communicator_goes_on)
    gather(x)
    return status, folder.parent.exists()


def test_a_fork_is_refused_and_its_parent_goes_on(ranks: GlooRanks) -> None:
    assert ranks.run(fork_and_use) == [(0, True), (0, True)]


@pytest.mark.extended
def test_a_fork_is_refused_by_nccl() -> None:
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="20") as found:
        assert found.run(fork_and_use) == [(0, True), (0, True)]


def fork_before_the_first_use(rank: int) -> int:
    """torch.distributed is initialised, but nothing of tritondt has run."""
    return status_of_fork(_expect_refusal, rank)


def _expect_refusal(rank: int) -> None:
    with pytest.raises(T.WorldError, match=REFUSED.format(rank=rank)):
        rows().full_tensor()


def test_a_fork_before_the_first_use_is_refused() -> None:
    with GlooRanks(2) as found:
        assert found.run(fork_before_the_first_use) == [0, 0]


def fork_and_die(rank: int, folder: Path) -> None:
    """Rank 1 dies while a child of its lives on with copies of its sockets, until rank 0 has been told."""
    x = rows()
    gather(x)
    if rank == 1:
        if os.fork() == 0:
            _outlive(folder / "told")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        gather(x)
    finally:
        (folder / "told").touch()


def _outlive(told: Path) -> NoReturn:
    for path in tuple(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # the folder itself, which is closed again
            if path.readlink().name.startswith("pipe:"):  # by its pipes the test notices who has died
                os.close(int(path.name))
    end = time.monotonic() + 60
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.05)
    os._exit(0)


@pytest.mark.extended
def test_peers_notice_that_a_rank_dies_though_its_child_lives(tmp_path: Path) -> None:
    with GlooRanks(2, {"TRITONDT_TIMEOUT": "20", "TRITONDT_TRANSPORT": "sockets"}) as found:
        heard, dead = found.outcomes(fork_and_die, tmp_path)
        assert (dead.kind, found.status(1)) == ("died", -signal.SIGKILL)
        assert heard.kind == "PeerError"
        assert "rank 1 closed its connection" in heard.text


def fork_and_end(rank: int, end: str) -> int:
    """A child of rank 0 ends as processes do, with all that Python does then, while something is under way."""
    T.abort()
    x = rows()
    gather(x)
    status = 0
    if rank == 0:
        moved = x.redistribute(placements=[T.Replicate()], async_op=True)
        pid = os.fork()
        if pid == 0:
            _end(end)
        status = status_of(pid)
        gather(moved)
    else:
        gather(x)
    gather(x)
    world.current().communicator((0, 1)).barrier()
    return status


def _end(end: str) -> NoReturn:
    if end == "exits":
        sys.exit(3)
    raise UncaughtError("planned: what the child raises is no failure of its parent's")


@pytest.mark.extended
@pytest.mark.parametrize(("end", "status"), [("exits", 3), ("raises", 1)])
def test_the_end_of_a_fork_disturbs_nobody(ranks: GlooRanks, end: str, status: int) -> None:
    assert ranks.run(fork_and_end, end) == [status, 0]


@pytest.mark.parametrize("module", [layout, spec, mesh], ids=lambda module: module.__name__)
def test_a_fork_finds_no_lock_taken(module: Any) -> None:
    """That of another thread, which is not there to give it back."""
    taken = threading.Event()

    def hold() -> None:
        with module._interning:
            taken.set()
            time.sleep(0.3)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    assert status_of_fork(_take, module._interning) == 0
    holder.join()
    assert not module._interning.locked()


def _take(lock: threading.Lock) -> None:
    assert lock.acquire(timeout=1)


class Numbers(Dataset[torch.Tensor]):
    """Plain tensors, as a loader reads them from files; `also` is looked at on the way."""

    def __init__(self, also: Any = None) -> None:
        self.also = also

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.also is not None:
            self.also.full_tensor()
        return torch.full((2,), float(index))


def load(rank: int) -> None:
    """Trains from workers that are forked while something is under way."""
    T.abort()
    x = rows()
    gather(x)
    sums = []
    for _ in range(2):
        moved = x.redistribute(placements=[T.Replicate()], async_op=True)
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            gather(x)
            sums.append(batch.sum().item())
        gather(moved)
    assert sums == [12.0, 44.0, 76.0] * 2


def load_what_communicates(rank: int) -> None:
    T.abort()
    x = rows()
    gather(x)
    loader = DataLoader(Numbers(x), num_workers=2, multiprocessing_context="fork")
    with pytest.raises(T.WorldError, match=REFUSED.format(rank=rank)):
        next(iter(loader))
    gather(x)


@pytest.mark.extended
def test_workers_of_a_loader_are_forked(ranks: GlooRanks) -> None:
    ranks.run(load)


def test_a_loader_whose_workers_communicate_says_so(ranks: GlooRanks) -> None:
    ranks.run(load_what_communicates)


def test_a_fork_of_rank_threads_is_refused() -> None:
    def body(rank: int) -> int:
        x = rows()
        done = x.redistribute(placements=[T.Replicate()])
        moved = x.redistribute(placements=[T.Replicate()], async_op=True)
        communicator = world.current().communicator((0, 1))
        status = status_of_fork(use_everything, rank, x, moved, done, communicator)
        gather(moved)
        return status

    assert run_ranks(2, body) == [0, 0]


def leave_work_behind(rank: int) -> None:
    """Rank 0 ends by itself while something it has issued waits for rank 1."""
    x = rows()
    gather(x)
    if rank == 0:
        x.redistribute(placements=[T.Replicate()], async_op=True)
        raise AssertionError("planned: the harness lets the process end as any does after a failure")


def wait_for_who_has_left(rank: int) -> None:
    gather(rows())  # which may be there: rank 0 had sent its rows
    gather(rows())


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["sockets", "gloo"])
def test_a_process_may_end_without_close(transport: str, tmp_path: Path) -> None:
    settings = {"TRITONDT_TIMEOUT": "60", "TRITONDT_TRANSPORT": transport, "TMPDIR": str(tmp_path)}
    with GlooRanks(2, settings) as found:
        left, _ = found.outcomes(leave_work_behind)
        assert isinstance(left, Failure)
        assert "planned" in left.text
        started = time.monotonic()
        found.end(0)
        assert found.status(0) == 0
        waiting = found.outcomes(wait_for_who_has_left, timeout_s=30)[1]
        assert time.monotonic() - started < 30
        assert isinstance(waiting, Failure)
        assert "rank 0" in waiting.text
        found.end(1)
        assert found.status(1) == 0
    kept = [path.name for path in tmp_path.glob("tritondt-flight-*/*/*")]
    assert kept == ["rank-1.json"], "only the rank that was told of a failure has written"
