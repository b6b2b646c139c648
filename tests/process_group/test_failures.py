"""What ranks are told when others fail, stall, leave or do something else, on the double of NCCL."""

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.doubled import doubled
from tests.harness.gloo_ranks import Failure, GlooRanks, UncaughtError
from tests.harness.nccl_on_host import backend_ranks
from tests.process_group.collectives import own

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def started() -> Iterator[GlooRanks]:
    with backend_ranks("nccl", 3, TRITONDT_TIMEOUT="20") as started:
        yield started


@pytest.fixture
def ranks(started: GlooRanks) -> Iterator[GlooRanks]:
    """The same three for all tests: what failed is put away after each."""
    started.run(begin, timeout_s=250)
    yield started
    started.run(abort)


@pytest.fixture
def mortal_ranks() -> Iterator[GlooRanks]:
    started = backend_ranks("nccl", 3, TRITONDT_TIMEOUT="20")
    started.run(begin, timeout_s=250)
    yield started
    started.kill()


def abort(rank: int) -> None:
    T.abort()


def begin(rank: int) -> None:
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=200))  # a test before has shortened it, and ranks come apart on a busy machine
    for _ in range(3):  # from the third on it is one call of the extension
        dist.all_reduce(own(rank))
    group.set_timeout(timedelta(seconds=TIMEOUT_S))


def stall(rank: int) -> list[str]:
    """Rank 1 does not come: the others are told when they wait, and once more by name of the first failure."""
    if rank == 1:
        return []
    x, told = own(rank), []
    with pytest.raises(T.PeerError) as error:
        dist.all_reduce(x)
    told.append(str(error.value))
    with pytest.raises(T.WorldError) as again:
        dist.broadcast(x, src=0)
    return [*told, str(again.value)]


def go_on(rank: int) -> list[float]:
    T.abort()
    x = own(rank)
    dist.all_reduce(x)
    y = own(rank)
    if rank == 0:
        dist.send(y, 1)
    elif rank == 1:
        dist.recv(y, 0)
    return [float(x[0]), float(y[0])]


@pytest.mark.extended
def test_a_rank_that_does_not_come(ranks: GlooRanks) -> None:
    for rank, told in enumerate(ranks.run(stall)):
        if rank != 1:
            assert "for rank 1 in all_reduce (sum) of 6 float32, asked for at" in told[0]
            assert "test_failures.py" in told[0]
            assert f"the timeout is {TIMEOUT_S:g} s (the process group's)" in told[0]
            assert told[1].startswith(
                "broadcast of 6 float32, root 0 was asked of a process group that failed before ("
            )
            assert told[1].endswith("); make a new one, or, after a failure, call tritondt.abort() on every rank")
    assert ranks.run(go_on) == [[6.0, 1.0], [6.0, 1.0], [6.0, 3.0]]  # in the world that follows


def die(rank: int) -> str:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(T.PeerError) as error:
        dist.all_reduce(own(rank))
    return str(error.value)


def test_a_rank_that_is_killed(mortal_ranks: GlooRanks) -> None:
    *told, died = mortal_ranks.outcomes(die)
    assert died.kind == "died"
    for text in told:
        assert "rank 2" in text
        assert "in all_reduce (sum) of 6 float32, asked for at" in text


def raise_uncaught(rank: int) -> str:
    if rank == 2:  # rank 0 holds the store
        raise UncaughtError("no batch left")
    with pytest.raises(T.PeerError) as error:
        dist.all_reduce(own(rank))
    return str(error.value)


@pytest.mark.extended
def test_an_exception_of_one_rank_ends_the_others(mortal_ranks: GlooRanks) -> None:
    for told in mortal_ranks.outcomes(raise_uncaught)[:2]:
        assert "rank 2 failed while rank" in told
        assert "UncaughtError: no batch left" in told


def call_something_else(rank: int) -> str:
    with pytest.raises(T.PeerError) as error:
        dist.all_reduce(own(rank, 6 + (rank == 1)))
    return str(error.value)


def test_ranks_that_do_different_things(ranks: GlooRanks) -> None:
    for told in ranks.run(call_something_else):
        assert "all_reduce (sum) of 7 float32" in told
        assert "all_reduce (sum) of 6 float32" in told
        assert "all ranks must call the same operations with the same sizes in the same order" in told


def refuse_alone(rank: int) -> str:
    with pytest.raises(T.LocalTensorError if rank == 1 else T.PeerError) as error:
        dist.all_gather_into_tensor(torch.empty(18 - (rank == 1)), own(rank))
    return str(error.value)


def test_what_one_rank_refuses_the_others_are_told(ranks: GlooRanks) -> None:
    told = ranks.run(refuse_alone)
    assert (
        told[1]
        == "all_gather_into_tensor of 6 float32 was given an output of 17 elements; 6 on each of 3 ranks makes 18"
    )
    for rank in (0, 2):
        assert f"rank 1 failed while rank {rank} waited for" in told[rank]
        assert told[1] in told[rank]


def refuse_and_go_on(rank: int, is_first: bool, culprits: tuple[int, ...]) -> list[Any]:
    """A sum of ones and one of tens, or what they raised; the culprits give the first a tensor that it refuses."""
    group = dist.new_group(list(range(3)))
    if not is_first:
        dist.all_reduce(torch.ones(1), group=group)
    found: list[Any] = []
    for number, value in enumerate((1.0, 10.0)):
        x = torch.full((6, 2), value)
        try:
            dist.all_reduce(x[:, :1] if number == 0 and rank in culprits else x[0], group=group)
            found.append(x[0].tolist())
        except T.TritondtError as error:
            found.append(str(error))
    return found


@pytest.mark.extended
@pytest.mark.parametrize("is_first", [False, True])
def test_nobody_sums_what_belongs_to_a_refused_operation(ranks: GlooRanks, is_first: bool) -> None:
    told = ranks.run(refuse_and_go_on, is_first, (1,))
    refused, then = told[1]
    assert "was given a tensor of shape (6, 1) with strides (2, 1), which is not contiguous" in refused
    assert then.startswith(f"rank 1 refused operation {1 if is_first else 2} of process group ")
    assert " did not: it waits in all_reduce (sum) of 2 float32" in then
    for rank in (0, 2):
        assert f"rank 1 failed while rank {rank} waited for" in told[rank][0]
        assert refused in told[rank][0]
        assert "was asked of a process group that failed before" in told[rank][1]


@pytest.mark.extended
def test_ranks_that_refuse_their_first_operation_alike_go_on(ranks: GlooRanks) -> None:
    for _, sums in ranks.run(refuse_and_go_on, True, (0, 1, 2)):
        assert sums == [30.0, 30.0]


def wait_for_a_message(rank: int) -> str:
    if rank != 0:
        return ""
    with pytest.raises(T.PeerError) as error:
        dist.recv(own(rank), 1)
    return str(error.value)


def test_a_message_that_does_not_come(ranks: GlooRanks) -> None:
    assert ranks.run(wait_for_a_message)[0].startswith(f"rank 0 waited {TIMEOUT_S:g} s for ranks [1] to connect")


def end(rank: int, how: str) -> list[str]:
    group: Any = dist.new_group()
    held = own(rank)
    dist.all_reduce(held, group=group)
    work = dist.all_reduce(held, group=group, async_op=True) if how == "abort" and rank == 0 else None
    getattr(group, how)()
    told = []
    if work is not None:
        with pytest.raises(T.WorldError) as error:
            work.wait()
        assert isinstance(work.exception(), T.WorldError)
    for ask in (lambda: group.allreduce([held]), lambda: group.send([held], (rank + 1) % 3, 0)):
        with pytest.raises(T.WorldError) as error:
            ask()
        told.append(str(error.value))
    dist.all_reduce(held)  # other groups go on
    return told


@pytest.mark.parametrize(("how", "ended"), [("abort", "aborted"), ("shutdown", "destroyed")])
def test_use_after_the_end(ranks: GlooRanks, how: str, ended: str) -> None:
    for told in ranks.run(end, how):
        assert told[0].startswith("all_reduce (sum) of 6 float32 was asked of a process group that ended (")
        assert "a message of 6 float32 from rank" in told[1]
        assert all(f"was {ended})" in text for text in told)


_comparing: dict[str, Any] = {}


def compare(rank: int, over: str) -> None:
    """Makes the group that compares."""
    os.environ["TRITONDT_DEBUG"] = "1"
    stack = _comparing["doubles"] = ExitStack()
    if over == "sockets":
        stack.enter_context(doubled("cpu", nccl_device=None))
    _comparing["group"] = dist.new_group()
    dist.all_reduce(torch.ones(1), group=_comparing["group"])
    _comparing["group"].set_timeout(timedelta(seconds=TIMEOUT_S))
    del os.environ["TRITONDT_DEBUG"]


def compare_no_more(rank: int) -> None:
    _comparing.pop("doubles").close()


@pytest.fixture(params=["nccl", "sockets"])
def comparing_ranks(request: pytest.FixtureRequest, ranks: GlooRanks) -> Iterator[GlooRanks]:
    ranks.run(compare, request.param)
    yield ranks
    ranks.run(compare_no_more)


def disagree(rank: int) -> list[str]:
    told, group = [], _comparing["group"]
    x, number = own(rank), int(rank == 1)
    asked = [
        lambda: dist.all_reduce(own(rank, 6 + number), group=group),
        lambda: dist.all_reduce(x.double() if number else x, group=group),
        lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX if number else dist.ReduceOp.SUM, group=group),
        lambda: dist.broadcast(x, src=number, group=group),
        lambda: dist.barrier(group) if number else dist.all_reduce(x, group=group),
        lambda: dist.all_to_all_single(torch.empty(6), x, [2, 2, 2], [3, 2, 1] if number else [2, 2, 2], group=group),
    ]
    for ask in asked:
        with pytest.raises(T.MismatchError) as error:
            ask()
        told.append(str(error.value))
    torch.testing.assert_close(x, own(rank), rtol=0, atol=0)
    dist.all_reduce(x, group=group)
    torch.testing.assert_close(x, own(0) * 6, rtol=0, atol=0)
    return told


def add_one(x: torch.Tensor) -> None:
    dist.all_reduce(x, group=_comparing["group"])


def add_other(x: torch.Tensor) -> None:
    dist.all_reduce(x, group=_comparing["group"])


def send_one(x: torch.Tensor) -> None:
    dist.broadcast(x, 0, group=_comparing["group"])


def send_other(x: torch.Tensor) -> None:
    dist.broadcast(x, 0, group=_comparing["group"])


def call_both(calls: Iterable[Callable[[torch.Tensor], None]], rank: int) -> None:
    for call in calls:
        call(own(rank))


def swap(rank: int) -> list[str]:
    """Rank 1 asks for two equal collectives in the other order."""
    told = []
    for calls in ((add_one, add_other), (send_one, send_other)):
        with pytest.raises(T.MismatchError) as error:
            call_both(reversed(calls) if rank == 1 else calls, rank)
        told.append(str(error.value))
    x = own(rank)  # a barrier, or a branch of the root's, from lines of their own are right
    if rank == 0:
        dist.barrier(_comparing["group"])
        dist.broadcast(x, 0, group=_comparing["group"])
    else:
        dist.barrier(_comparing["group"])
        dist.broadcast(x, 0, group=_comparing["group"])
    torch.testing.assert_close(x, own(0), rtol=0, atol=0)
    return told


def come_late(rank: int) -> str:
    if rank == 2:
        return ""
    with pytest.raises(T.PeerError) as error:
        dist.barrier(_comparing["group"])
    return str(error.value)


def test_under_debug_equal_collectives_in_another_order_are_named(comparing_ranks: GlooRanks) -> None:
    for added, sent in comparing_ranks.run(swap):
        assert re.search(r"ranks 0 and 2 run all_reduce .*\(add_one\); rank 1 runs .*\(add_other\); nothing was", added)
        assert "in the same order, from the same lines" in added
        assert re.search(r"ranks 0 and 2 run broadcast .*\(send_one\); rank 1 runs .*\(send_other\); ", sent)


@pytest.mark.extended
def test_in_debug_mode_nothing_runs_before_all_agree(comparing_ranks: GlooRanks) -> None:
    told = comparing_ranks.run(disagree)
    assert told[0] == told[1] == told[2]
    differing = [
        ("all_reduce (sum) of 6 float32", "all_reduce (sum) of 7 float32"),
        ("of 6 float32", "of 6 float64"),
        ("all_reduce (sum)", "all_reduce (max)"),
        ("root 0", "root 1"),
        ("all_reduce (sum)", "barrier"),
    ]
    for text, (most, other) in zip(told[0], differing, strict=False):
        before, _, after = text.partition("; rank 1 runs ")
        assert before.startswith("ranks disagree at exchange ")
        assert ": ranks 0 and 2 run " in before
        assert most in before
        assert other in after
        assert after.endswith(
            "; nothing was moved, and all ranks must call the same operations with the same sizes in the same order"
        )
        assert "test_failures.py" in after
    assert told[0][-1].startswith(
        "rank 1 sends 3 elements to rank 0 in all_to_all_single of float32 on cpu, which expects 2"
    )
    late = comparing_ranks.run(come_late)
    assert late[0].startswith(f"rank 0 waited {TIMEOUT_S:g} s for ranks [2] to come to barrier on cpu")


def refuse_while_comparing(rank: int) -> str:
    compare(rank, "nccl")
    group = _comparing["group"]
    with pytest.raises(T.LocalTensorError if rank == 1 else T.PeerError) as error:
        dist.all_gather_into_tensor(torch.empty(18 - (rank == 1)), own(rank), group=group)
    dist.all_reduce(torch.ones(1), group=group)
    return str(error.value)


def test_in_debug_mode_a_refusal_costs_nothing(ranks: GlooRanks) -> None:
    told = ranks.run(refuse_while_comparing)
    assert told[0] == told[2] == f"rank 1 refused all_gather_into_tensor of 6 float32: {told[1]}"


def fork_and_use(rank: int) -> str:
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except BaseException as error:  # noqa: BLE001  the child only tells
            os._exit(7 if "by a process forked from the one that made it" in str(error) else 8)
        os._exit(9)
    return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_a_forked_child_is_refused(ranks: GlooRanks) -> None:
    outcomes = ranks.outcomes(fork_and_use)
    assert not any(isinstance(found, Failure) for found in outcomes)
    assert outcomes == ["7"] * 3
