"""Ranks that the system refuses shared memory, by real limits: one warning, then sockets on all ranks alike.

Everything happens in the middle of a program whose communicators so far share memory, and in a new world.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.limits import become_ordinary, in_thread, limited
from tritondt.comm import world
from tritondt.process_group import group_on_cpu

RANKS = 3
# Stacks of 8 MB of an ended world's threads leave room while a limit on memory holds, so an arena is larger than those
# of all of them; a file of it is empty until it is written.
ENVIRONMENT = {"TRITONDT_TIMEOUT": "60", "TRITONDT_ARENA_MB": "512"}
# What the system says.
REASONS = {
    "memory files are forbidden": "[Errno 1] memfd_create: Operation not permitted",
    "memory files are unknown": "[Errno 38] memfd_create: Function not implemented",
    "no length can be set": "[Errno 28] ftruncate: No space left on device",
    "seals are refused": "[Errno 1] F_ADD_SEALS: Operation not permitted",
    "mappings are refused": "[Errno 12] mmap: Cannot allocate memory",
    "MADV_DONTFORK is refused": "[Errno 22] MADV_DONTFORK: Invalid argument",
    "files of others are refused": "Permission denied",
    "short files": "[Errno 27] ftruncate: File too large",
    "little address space": "[Errno 12] mmap: Cannot allocate memory",
}


class Seen(NamedTuple):
    """A rank's communicator and values, and what it warned of, in each part of a program."""

    communicators: list[str]
    values: list[list[float]]
    warned: list[str]


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(RANKS, ENVIRONMENT, backend="tritondt") as started:
        yield started


@pytest.fixture(scope="module")
def ordinary_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(RANKS, ENVIRONMENT, backend="tritondt", prepare=become_ordinary) as started:
        yield started


@pytest.mark.in_core(3)
@pytest.mark.parametrize("who", [(1,), (0, 1, 2)], ids=["one", "all"])
@pytest.mark.parametrize("kind", REASONS)
def test_what_the_system_refuses_is_said_once_and_sockets_are_taken(
    ranks: GlooRanks, kind: str, who: tuple[int, ...]
) -> None:
    check_fallback(ranks.run(under_limit, kind, who), REASONS[kind], who)


@pytest.mark.in_core(1)
@pytest.mark.parametrize("who", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_a_process_whose_descriptors_others_may_not_open(ordinary_ranks: GlooRanks, who: tuple[int, ...]) -> None:
    seen = ordinary_ranks.run(under_limit, "not dumpable", who)
    # The others cannot map what is rank 1's; it maps theirs.
    check_fallback(seen, "Permission denied", (0, 2) if who == (1,) else who)


def check_fallback(seen: list[Seen], reason: str, warning: tuple[int, ...]) -> None:
    for rank, (communicators, values, warned) in enumerate(seen):
        assert communicators == [
            "SharedMemoryCommunicator",  # before
            *("SocketCommunicator", "SocketCommunicator"),  # in the middle of the program
            "SharedMemoryCommunicator",  # the group of before
            *("SocketCommunicator", "SocketCommunicator"),  # in a world of its own
            *("SharedMemoryCommunicator", "SharedMemoryCommunicator"),  # when the limit has gone
        ], (rank, communicators)
        assert all(value == [10.0, 11.0, 12.0] for value in values), (rank, values)
        if rank not in warning:
            assert warned == [], (rank, warned)
            continue
        expected = ("messages go over sockets", "collectives go over sockets") * 2
        for text, otherwise in zip(warned, expected, strict=True):
            assert text.startswith(f"rank {rank} cannot share memory with ranks [0, 1, 2] ("), text
            assert text.endswith(f"{reason}); their {otherwise}"), text


def under_limit(rank: int, kind: str, who: tuple[int, ...]) -> Seen:
    T.close()
    seen = Seen([], [], [])
    groups = [dist.new_group(list(range(RANKS)), backend="tritondt") for _ in range(3)]

    def limited_run(run: Callable[..., None], *arguments: Any) -> None:
        # Each anew: of a limit on memory, threads that have ended leave room.
        with limited(kind if rank in who else None):
            run(seen, *arguments)

    def part() -> None:
        limited_run(moved)
        limited_run(gathered, groups[1])
        limited_run(gathered, groups[0])
        T.close()
        limited_run(moved)
        limited_run(gathered, groups[1])

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gathered(seen, groups[0])
        in_thread(part)
        T.close()
        moved(seen)
        gathered(seen, groups[2])
    T.close()
    for group in groups:
        dist.destroy_process_group(group)
    seen.warned.extend(str(each.message) for each in said if "share memory" in str(each.message))
    return seen


def moved(seen: Seen) -> None:
    """Redistributes, and notes the class of the communicator."""
    own = torch.full((1,), 10.0 + dist.get_rank())
    seen.values.append(T.DTensor.from_local(own, T.Mesh((RANKS,)), [T.Shard(0)]).full_tensor().tolist())
    seen.communicators.append(type(world.current().communicator(range(RANKS))).__name__)


def gathered(seen: Seen, group: Any) -> None:
    """Gathers by the backend, and notes what carries the group's collectives."""
    found = torch.zeros(RANKS)
    dist.all_gather_into_tensor(found, torch.full((1,), 10.0 + dist.get_rank()), group=group)
    seen.values.append(found.tolist())
    name = f"process group {group.group_name}"
    (made,) = [each for each in group_on_cpu._groups if each._name == name]
    assert made._carrier is not None
    seen.communicators.append(type(made._carrier.whole).__name__)


@pytest.mark.in_core(1)
@pytest.mark.parametrize("num_spare", [0, 1, 2, 3])
@pytest.mark.parametrize("is_of_backend", [False, True])
def test_a_rank_without_descriptors_for_sockets_is_named_on_all_ranks(
    ranks: GlooRanks, num_spare: int, is_of_backend: bool
) -> None:
    """Sockets need them, too: nothing is left to fall back to."""
    texts = ranks.run(exchange_with_few_descriptors, num_spare, is_of_backend)
    assert texts[1].startswith("rank 1 could not "), texts
    assert "Too many open files" in texts[1], texts
    assert all(text.startswith(("rank 1 failed while", "rank 1 closed its connection")) for text in texts[::2]), texts


def exchange_with_few_descriptors(rank: int, num_spare: int, is_of_backend: bool) -> str:
    used, group = (dist.new_group(list(range(RANKS)), backend="tritondt") for _ in range(2))
    seen = Seen([], [], [])

    def run(carrier: Any) -> None:
        gathered(seen, carrier) if is_of_backend else moved(seen)

    run(used)  # modules are files, too, and are read when they are first used
    T.close()
    dist.destroy_process_group(used)
    world.current()
    dist.barrier()
    gc.collect()  # garbage may hold descriptors, and those that were closed below the limit would be enough
    if rank != 1 and num_spare == 0:
        time.sleep(1.5)  # so that rank 1 looks meanwhile why nobody comes
    with warnings.catch_warnings(), limited("no descriptors" if rank == 1 else None, num_spare):
        warnings.simplefilter("ignore")
        with pytest.raises(T.PeerError) as caught:
            run(group)
    T.abort()
    dist.destroy_process_group(group)
    return str(caught.value)


@pytest.mark.in_core(1)
@pytest.mark.parametrize("who", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_a_process_without_threads_runs_at_once_what_is_issued(ordinary_ranks: GlooRanks, who: tuple[int, ...]) -> None:
    for rank, (_, values, warned) in enumerate(ordinary_ranks.run(issue_without_threads, who)):
        assert all(value == [10.0, 11.0, 12.0] for value in values), values
        assert len(values) == 3, values
        if rank not in who:
            assert warned == []
            continue
        assert len(warned) == 2, warned  # of a communicator of redistributions, and of one of the backend
        for text in warned:
            assert text.startswith(f"rank {rank} runs "), text
            assert "and what follows on its communicator, when it is issued and not beside the program: " in text, text
            assert "the thread tritondt-queue could not be started (can't start new thread): " in text, text


@pytest.mark.in_core(1)
@pytest.mark.parametrize("who", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_a_process_without_a_thread_for_its_watch_looks_itself(ordinary_ranks: GlooRanks, who: tuple[int, ...]) -> None:
    """It exchanges, and hears at once of a rank that fails."""
    for rank, (texts, values, warned) in enumerate(ordinary_ranks.run(exchange_and_fail_without_threads, who)):
        assert values == [[10.0, 11.0, 12.0]]
        assert len(warned) == (rank in who), warned
        for text in warned:
            assert text.startswith(
                f"rank {rank} looks between its own messages what others have said, not beside them: "
            )
        if rank < 2:
            assert texts[0].startswith(f"rank 2 failed while rank {rank} waited for "), texts
            assert "LocalTensorError" in texts[0], texts
            assert float(texts[1]) < 30, "it waited for the timeout"


def exchange_and_fail_without_threads(rank: int, who: tuple[int, ...]) -> Seen:
    T.close()
    made: Any = world.current()
    made._store_client.call(lambda store: store.check(["anything"]))  # the store has its thread, the watch has none
    seen, texts, mesh = Seen([], [], []), [], T.Mesh((RANKS,))
    with warnings.catch_warnings(record=True) as said, limited("no threads" if rank in who else None):
        warnings.simplefilter("always")
        time.sleep(0.5 * rank)  # so that others wait, and watch
        x = T.DTensor.from_local(torch.full((1,), 10.0 + rank), mesh, [T.Shard(0)])
        seen.values.append(x.full_tensor().tolist())
        time.sleep(1.0 * (rank == 2))
        spec = T.DTensorSpec(mesh, (T.Shard(0),), T.TensorMeta.contiguous((3,)))
        whole = T.DTensorSpec(mesh, (T.Replicate(),), T.TensorMeta.contiguous((3,)))
        started = time.monotonic()
        try:
            T.redistribute(torch.ones(2 if rank == 2 else 1), spec, whole)
        except T.TritondtError as error:
            texts += [str(error), str(time.monotonic() - started)]
    T.abort()
    return Seen(texts, seen.values, [str(each.message) for each in said if "looks" in str(each.message)])


def issue_without_threads(rank: int, who: tuple[int, ...]) -> Seen:
    T.close()
    seen, group = Seen([], [], []), dist.new_group(list(range(RANKS)), backend="tritondt")
    mesh, own = T.Mesh((RANKS,)), torch.full((1,), 10.0 + rank)
    x = T.DTensor.from_local(own, mesh, [T.Shard(0)])
    x.full_tensor()  # the world, its watch and its store have their threads
    time.sleep(1.5 if rank == 0 else 0)
    dist.barrier(group)
    x.full_tensor()
    with warnings.catch_warnings(record=True) as said, limited("no threads" if rank in who else None):
        warnings.simplefilter("always")
        for _ in range(2):
            seen.values.append(x.redistribute(placements=[T.Replicate()], async_op=True).to_local().tolist())
        found = torch.zeros(RANKS)
        work = dist.all_gather_into_tensor(found, own, group=group, async_op=True)
        work.wait()
        seen.values.append(found.tolist())
    T.close()
    dist.destroy_process_group(group)
    seen.warned.extend(str(each.message) for each in said if "runs" in str(each.message))
    return seen
