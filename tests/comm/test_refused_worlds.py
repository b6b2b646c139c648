"""Ranks that cannot make a world, a communicator or a group, or are killed before: the others hear why at once.

The timeout is long: where nobody is told, a test takes all of it and finds another error.
"""

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import Failure, GlooRanks

FULL = torch.arange(12.0).view(6, 2)
TIMEOUT_S = 100
_REFUSED = 1


def variable(name: str, value: str) -> Callable[[], None]:
    """Sets a variable of the environment, until the result is called."""
    before = os.environ.get(name)
    os.environ[name] = value

    def undo() -> None:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

    return undo


def limit(what: int, value: int) -> Callable[[], None]:
    """Lowers a limit of this process, until the result is called."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (value, before[1]))
    return lambda: resource.setrlimit(what, before)


def leave_no_descriptors() -> Callable[[], None]:
    used = {int(found.name) for found in Path("/proc/self/fd").iterdir()}
    return limit(resource.RLIMIT_NOFILE, min(set(range(len(used) + 1)) - used))


FAULTS: dict[str, tuple[Callable[[], Callable[[], None]], str]] = {
    "costs": (lambda: variable("TRITONDT_COSTS", "{"), r"WorldError: TRITONDT_COSTS='\{' is set, but "),
    "other costs": (
        lambda: variable("TRITONDT_COSTS", '{"max_peers": 9}'),
        r'WorldError: rank 1 on \S+ has TRITONDT_COSTS=\{"max_peers": 9\}, and rank \d came first with no '
        "TRITONDT_COSTS; all ranks must plan alike until the process group ends: set TRITONDT_COSTS alike on all "
        "hosts, or on none",
    ),
    "timeout": (lambda: variable("TRITONDT_TIMEOUT", "soon"), "WorldError: TRITONDT_TIMEOUT='soon' is set; allowed is"),
    "arena": (lambda: variable("TRITONDT_ARENA_MB", "-1"), "WorldError: TRITONDT_ARENA_MB='-1' is set; allowed is a"),
    "descriptors": (leave_no_descriptors, "Too many open files"),
}


def whole(rank: int) -> torch.Tensor:
    return T.distribute_tensor(FULL + rank, T.Mesh((3,)), [T.Shard(0)]).full_tensor()


def refuse_alone(rank: int, fault: str) -> str:
    """The error of a call that is the first in a world, which one rank cannot make; then all go on, without a word."""
    whole(rank)
    T.close()
    undo = FAULTS[fault][0]() if rank == _REFUSED else lambda: None
    try:
        whole(rank)
    except (RuntimeError, OSError) as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = "no error"
    finally:
        undo()
    dist.barrier()
    torch.testing.assert_close(whole(rank), FULL, rtol=0, atol=0)
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(3, {"TRITONDT_TIMEOUT": f"{TIMEOUT_S}"}) as found:
        yield found


@pytest.mark.parametrize(
    "fault", ["other costs", *(pytest.param(it, marks=pytest.mark.extended) for it in FAULTS if it != "other costs")]
)
def test_the_others_hear_why_one_has_no_world_and_all_go_on(ranks: GlooRanks, fault: str) -> None:
    told = ranks.run(refuse_alone, fault)
    assert "no error" not in told
    for rank in (0, 2):
        begin = rf"PeerError: rank {_REFUSED} failed while rank {rank} waited for ranks \[[0-2, ]+\] to connect: .*"
        assert re.match(begin + FAULTS[fault][1], told[rank]), told


def name_gloo_alone(rank: int) -> str:
    T.abort()
    undo = variable("TRITONDT_TRANSPORT", "gloo") if rank == _REFUSED else lambda: None
    try:
        with pytest.raises((T.PeerError, T.WorldError)) as error:
            whole(rank)
    finally:
        undo()
        T.abort()
    return str(error.value)


@pytest.mark.extended
def test_transports_that_cannot_meet_are_named(ranks: GlooRanks) -> None:
    for text in ranks.run(name_gloo_alone):
        assert "messages of ranks 0,1,2 over " in text
        assert "set TRITONDT_TRANSPORT alike on all ranks" in text


def reduce_in_new_group() -> None:
    group = dist.new_group(backend="tritondt")
    dist.all_reduce(torch.ones(1), group=group)  # connects ranks, who hear here of those that made no group


def make_group(rank: int) -> str:
    undo = variable("TRITONDT_TRANSPORT", "carrier pigeon") if rank == _REFUSED else lambda: None
    try:
        with pytest.raises((T.PeerError, T.WorldError)) as error:
            reduce_in_new_group()
    finally:
        undo()
    return str(error.value)


@pytest.mark.extended
def test_the_others_hear_why_one_cannot_make_a_group() -> None:
    with GlooRanks(3, {"TRITONDT_TIMEOUT": f"{TIMEOUT_S}"}) as ranks:
        told = ranks.run(make_group)
    names = "gloo, nccl, shared-memory, sockets and MODULE:NAME of your own"
    why = f"TRITONDT_TRANSPORT='carrier pigeon' is set; allowed are {names}"
    assert told[_REFUSED] == why
    for rank in (0, 2):
        begin = rf"rank {_REFUSED} failed while rank {rank} waited for ranks \[[0-2, ]+\] to connect"
        assert re.match(begin, told[rank]), told
        assert told[rank].endswith(f": WorldError: {why}"), told


def die_in(where: str) -> None:
    """Ends this process: now, or where it begins to set Gloo up."""
    if where != "Gloo":
        os.kill(os.getpid(), signal.SIGKILL)
    gloo: Any = dist
    gloo.ProcessGroupGloo = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def wait_for_the_dead(rank: int, where: str) -> str:
    group = dist.new_group(backend="tritondt") if where == "a group" else None  # its first collective connects it
    if rank == _REFUSED:
        die_in(where)
    with pytest.raises(T.PeerError) as error:
        whole(rank) if group is None else dist.all_reduce(torch.ones(1), group=group)
    return str(error.value)


@pytest.mark.parametrize("where", ["before", pytest.param("Gloo", marks=pytest.mark.extended), "a group"])
def test_a_rank_that_is_killed_before_it_is_connected(where: str) -> None:
    transport = "gloo" if where == "Gloo" else "shared-memory"
    ranks = GlooRanks(3, {"TRITONDT_TIMEOUT": f"{TIMEOUT_S}", "TRITONDT_TRANSPORT": transport})
    process = ranks.pids[_REFUSED]
    try:
        outcomes = ranks.outcomes(wait_for_the_dead, where)
    finally:
        ranks.kill()
    assert isinstance(outcomes[_REFUSED], Failure)
    for rank in (0, 2):
        assert f"rank {_REFUSED} " in outcomes[rank], outcomes
        assert outcomes[rank].endswith(f": its process {process} has ended"), outcomes
