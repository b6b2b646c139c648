"""What is refused on every kind of ranks: after close, after an error, from two threads, in another world."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import ranks_on
from tests.ops.sharded import distribute
from tritondt import identity
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks

FULL = torch.arange(15.0).view(5, 3)
Everywhere = Callable[..., Any]


@pytest.fixture(scope="module", params=["threads", "sockets", "shared-memory", "gloo", "nccl"])
def everywhere(request: pytest.FixtureRequest) -> Iterator[Everywhere]:
    """Runs a body on two ranks, in a world of its own."""
    if request.param == "threads":
        yield lambda body, *arguments: run_ranks(2, lambda rank: body(rank, *arguments))
        return
    with ranks_on(request.param, 2, TRITONDT_TIMEOUT="20") as ranks:
        yield lambda body, *arguments: ranks.run(in_own_world, body, *arguments)


def in_own_world(rank: int, body: Callable[..., Any], *arguments: Any) -> Any:
    T.abort()
    return body(rank, *arguments)


def rows() -> Any:
    return distribute(FULL, T.Mesh((2,)), "S0")


def to(x: Any, *placements: T.Placement, **options: Any) -> Any:
    return x.redistribute(placements=placements, **options)


def gather(x: Any) -> None:
    torch.testing.assert_close(x.full_tensor(), FULL, rtol=0, atol=0)


USES: dict[str, Callable[[Any, Any], object]] = {
    "redistribute": lambda x, communicator: to(x, T.Replicate()),
    "redistribute, asynchronous": lambda x, communicator: to(x, T.Replicate(), async_op=True),
    "a barrier": lambda x, communicator: communicator.barrier(),
    "a timeout": lambda x, communicator: communicator.set_timeout(3),
}


def use_after(rank: int, end: str, use: str, how: str) -> None:
    x = rows()
    gather(x)
    communicator = world.current().communicator((0, 1))
    if end == "a failure" and rank == 1:
        try:
            raise ValueError("the loss is not a number")
        except ValueError:
            T.abort()
        return
    if end == "a failure":
        with pytest.raises(T.PeerError, match="the loss is not a number"):
            gather(x)
    else:
        getattr(communicator, end)()
    with pytest.raises(T.WorldError, match=how):
        USES[use](x, communicator)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("close", r"was asked of a communicator that ended \(the communicator was closed\); make a new world: call"),
        ("abort", r"was asked of a communicator that ended \(the communicator was aborted\); make a new world: call"),
        (
            "a failure",
            r"was asked of a communicator that failed before \(rank 1 failed while rank 0 waited for rank 1 in step 1 "
            r".*ValueError: the loss is not a number.*\); make a new world",
        ),
    ],
    ids=["close", "abort", "a failure"],
)
def test_use_after_the_end(everywhere: Everywhere, end: str, how: str, use: str) -> None:
    everywhere(use_after, end, use, how)


def use_world_after(rank: int, end: str) -> None:
    gather(rows())
    kept = world.current()
    getattr(T, end)()
    with pytest.raises(T.WorldError, match=r"this world is closed; tritondt\.comm\.world\.current\(\) is the one that"):
        kept.communicator((0, 1))
    gather(rows())  # in a new world


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_world_that_has_ended_is_refused_and_another_follows(everywhere: Everywhere, end: str) -> None:
    everywhere(use_world_after, end)


def end_twice(rank: int, ends: list[str]) -> None:
    for _ in range(2):
        gather(rows())
        for end in ends:
            if rank == 0 or end != "abort":  # one rank may abort more often
                getattr(T, end)()
        if rank == 1:
            T.abort()
    gather(rows())


@pytest.mark.parametrize(
    "ends", [["close", "close"], ["abort", "abort"], ["close", "abort"], ["abort", "abort", "abort", "abort"]], ids=str
)
def test_ending_again_changes_nothing(everywhere: Everywhere, ends: list[str]) -> None:
    everywhere(end_twice, ends)


def wait_twice(rank: int) -> None:
    moved = to(rows(), T.Replicate(), async_op=True)
    work = moved.work
    for _ in range(2):
        work.wait()
    gather(moved)
    work.wait()
    assert (work.is_completed(), work.exception(), moved.work) == (True, None, None)


@pytest.mark.extended
def test_waiting_again_returns_the_same(everywhere: Everywhere) -> None:
    everywhere(wait_twice)


def wait_for_a_failure_twice(rank: int) -> list[str]:
    x = rows()
    gather(x)
    if rank == 1:
        T.abort()
        return []
    moved = to(x, T.Replicate(), async_op=True)
    texts = []
    for use in (moved.work.wait, moved.work.wait, moved.to_local, lambda: moved + 1):
        with pytest.raises(T.PeerError, match=r"rank 1 failed while rank 0 waited for rank 1 in step 1 of 1") as told:
            use()
        texts.append(str(told.value))
    T.abort()
    return texts


def test_waiting_again_raises_the_same(everywhere: Everywhere) -> None:
    texts, _ = everywhere(wait_for_a_failure_twice)
    assert len(set(texts)) == 1
    assert "WorldError: tritondt.abort() was called" in texts[0]


def wait_after_abort(rank: int) -> None:
    x = rows()
    gather(x)
    moved = to(x, T.Replicate(), async_op=True)
    done = to(x, T.Shard(1), async_op=True)
    done.wait()
    unfinished = to(x, T.Shard(1), async_op=True) if rank == 0 else None
    T.abort()
    if unfinished is not None:
        for use in (unfinished.work.wait, unfinished.to_local):
            # The other rank may have been faster: it tells why it ends, or its connection alone is found closed.
            told = r"was aborted|tritondt\.abort\(\) was called|rank 1 closed its connection"
            with pytest.raises((T.WorldError, T.PeerError), match=told):
                use()
    gather(moved)  # what had arrived stays, and can be used in the next world
    gather(done)


def test_what_was_under_way_at_an_abort_says_so(everywhere: Everywhere) -> None:
    everywhere(wait_after_abort)


def issue_from_two_threads(rank: int) -> str:
    """Rank 0's loader waits for rank 1 in an exchange while its main thread asks for another."""
    x = rows()
    gather(x)
    if rank == 1:
        dist.barrier()
        gather(x)
        gather(x)
        return ""
    loader = threading.Thread(target=gather, args=(x,), name="loader")
    loader.start()
    turn = world.current().communicator((0, 1))._turn  # type: ignore[attr-defined]
    end = time.monotonic() + 10
    while turn.acquire(False):
        turn.release()
        assert time.monotonic() < end, "the loader does not come to its exchange"
        time.sleep(0.01)
    texts = []
    for options in ({}, {"async_op": True}):
        with pytest.raises(T.WorldError, match="was asked for by thread 'MainThread' while another thread") as told:
            to(x, T.Replicate(), **options)
        texts.append(str(told.value))
    dist.barrier()
    loader.join()
    gather(x)  # nothing is lost
    return texts[0]


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["sockets", "shared-memory", "gloo"])
def test_two_threads_cannot_exchange_at_once(transport: str) -> None:
    with GlooRanks(2, {"TRITONDT_TIMEOUT": "20", "TRITONDT_TRANSPORT": transport}) as ranks:
        text, _ = ranks.run(issue_from_two_threads)
        assert (
            "while another thread issues on the communicator of ranks (0, 1), and which of the two came first" in text
        )
        assert text.endswith("may differ among the ranks; issue from one thread, or from one after the other")
        ranks.run(live_on)


def ask_from_a_thread_beside(rank: int) -> list[str]:
    """A thread that a rank thread has started is no rank."""
    x = rows()
    said = []

    def use() -> None:
        for options in ({}, {"async_op": True}):
            with pytest.raises(T.WorldError) as told:
                to(x, T.Replicate(), **options)
            said.append(str(told.value))

    beside = threading.Thread(target=use)
    beside.start()
    beside.join()
    gather(x)  # nothing is lost
    return said


def test_a_thread_beside_a_rank_thread_has_no_world() -> None:
    for said in run_ranks(2, ask_from_a_thread_beside):
        assert len(said) == 2
        for text in said:
            assert text.startswith("there is no world: torch.distributed is not initialised; start the program with")


def live_on(rank: int) -> None:
    """A new process group in place of one whose world was not ended; its work is of the world before."""
    x = rows()
    gather(x)
    moved = to(x, T.Replicate(), async_op=True) if rank == 0 else None
    before = identity.current().generation
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=2)
    if moved is not None:
        told = rf"was issued by rank 0 of world {before} and is waited for by rank 0 of world {before + 1}; only who"
        for use in (moved.work.wait, moved.to_local):
            with pytest.raises(T.WorldError, match=told):
                use()
    with pytest.raises(T.MeshError, match="was made in another world"):
        to(x, T.Shard(1))
    dist.barrier()  # until here nobody has made a world, which ends the one before
    gather(rows())
    names = [thread.name for thread in threading.enumerate()]
    assert "tritondt-queue" not in names, "the world before is still there"
