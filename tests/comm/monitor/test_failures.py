"""Processes that disagree, refuse, stall or die: the others say so, by name and step, within the timeout."""

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import Failure, GlooRanks, UncaughtError
from tests.harness.nccl_on_host import ranks_on
from tests.harness.own_transport import pipe_ranks
from tritondt.comm import world
from tritondt.comm.transports import gloo

TIMEOUT_S = 3.0
# The watch looks once a second; the rest is for a machine that is busy.


def abort(rank: int) -> None:
    T.abort()


@pytest.fixture(scope="module", params=["sockets", "gloo", "nccl", "pipes"])
def failing_ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    """Four ranks; each test has communicators of its own, and those that fail are not used again."""
    start = pipe_ranks if request.param == "pipes" else partial(ranks_on, request.param)
    with start(4, TRITONDT_TIMEOUT=str(TIMEOUT_S)) as ranks:
        ranks.transport = request.param  # type: ignore[attr-defined]
        yield ranks
        ranks.outcomes(abort)  # one that failed alone has left the others in a world that cannot be closed together


def spec(ranks: tuple[int, ...], text: str, shape: tuple[int, ...] = (8, 6), dtype: torch.dtype = torch.float32) -> Any:
    mesh = T.Mesh((len(ranks),), ranks=ranks)
    return T.DTensorSpec(mesh, T.parse_placements(text), T.TensorMeta.contiguous(shape, dtype))


def move(ranks: tuple[int, ...], source: str = "S0", target: str = "R", **options: Any) -> torch.Tensor:
    before = spec(ranks, source, **options)
    return T.redistribute(torch.zeros(before.local_shape, dtype=before.dtype), before, spec(ranks, target, **options))


def connect(rank: int, ranks: tuple[int, ...]) -> None:
    if rank in ranks:
        move(ranks)


def run(ranks: GlooRanks, members: tuple[int, ...], body: Any, *arguments: Any) -> list[Any]:
    """Outcomes of the members, after they have connected; a member that waits for good is a failure at `timeout_s`."""
    ranks.run(connect, members)
    outcomes = ranks.outcomes(body, members, *arguments, timeout_s=150)
    return [outcomes[rank] for rank in members]


def assert_failed(outcome: Any, kind: str, *texts: str) -> None:
    assert isinstance(outcome, Failure), f"the rank got {outcome}"
    assert outcome.kind == kind, outcome.trace
    for text in texts:
        assert text in outcome.text


def bring_a_wrong_tensor(rank: int, members: tuple[int, ...], culprit: int) -> None:
    if rank == culprit:
        T.redistribute(torch.zeros(7), spec(members, "S0"), spec(members, "R"))
    elif rank in members:
        move(members)


def test_a_wrong_local_tensor_is_known_to_all(failing_ranks: GlooRanks) -> None:
    first, second, culprit = run(failing_ranks, (0, 1, 2), bring_a_wrong_tensor, 2)
    assert_failed(culprit, "LocalTensorError", "gives rank 2 at coordinate (2,)", "found shape (7,)")
    for rank, outcome in enumerate((first, second)):
        kind = "PeerError" if "call tritondt.abort() on every rank to go on" in outcome.text else "RefusalError"
        assert_failed(outcome, kind, f"rank 2 failed while rank {rank} waited for rank", "step 1 of 1", "(7,)")


def fail_to_pack(rank: int, members: tuple[int, ...], culprit: int) -> None:
    def launch(*arguments: object) -> None:
        raise MemoryError("no room for the table")

    if rank == culprit:
        communicator: Any = world.current().communicator(members)
        communicator._launch = launch  # the first table packs
    if rank in members:
        move(members, "S0", "S1")


@pytest.mark.extended
def test_a_rank_that_cannot_pack_is_not_waited_for(failing_ranks: GlooRanks) -> None:
    """Its messages never go, but those of the others may have come."""
    *others, culprit = run(failing_ranks, (1, 2, 3), fail_to_pack, 3)
    assert_failed(culprit, "MemoryError", "no room for the table")
    for rank, outcome in zip((1, 2), others, strict=True):
        assert_failed(outcome, "PeerError", f"rank 3 failed while rank {rank} waited for rank", "no room for the table")


def fail_to_unpack(rank: int, members: tuple[int, ...], culprit: int) -> None:
    def raises(*arguments: object) -> None:
        raise MemoryError("no room for what has come")

    if rank == culprit:
        communicator: Any = world.current().communicator(members)
        communicator._unpack = raises
        with pytest.raises(MemoryError):  # the program goes on, and into another exchange, or none
            move(members, "S1", "S0")
    elif rank in members:
        for _ in range(2):
            move(members, "S1", "S0")


def test_a_rank_that_cannot_unpack_is_not_waited_for(failing_ranks: GlooRanks) -> None:
    """All messages of its exchange have come, on all ranks, and those of the next never do."""
    *others, culprit = run(failing_ranks, (0, 1, 3), fail_to_unpack, 3)
    assert culprit is None
    for rank, outcome in zip((0, 1), others, strict=True):
        assert_failed(outcome, "PeerError", f"rank 3 failed while rank {rank} waited for rank", "no room for what has")


def disagree(rank: int, members: tuple[int, ...], options: list[dict[str, Any]]) -> None:
    if rank in members:
        move(members, **options[members.index(rank)])


@pytest.mark.extended
@pytest.mark.parametrize(
    ("members", "options", "texts"),
    [
        ((0, 1), [{"shape": (4, 6)}, {"shape": (4, 8)}], ("of (4, 6) float32", "of (4, 8) float32")),
        ((0, 2), [{"dtype": torch.float32}, {"dtype": torch.int64}], ("(8, 6) float32", "(8, 6) int64")),
        ((0, 3), [{"target": "R"}, {"target": "S1"}], ("(S0) -> (R)", "(S0) -> (S1)")),
    ],
)
def test_ranks_that_disagree_are_told_both_values(
    failing_ranks: GlooRanks, members: tuple[int, ...], options: list[dict[str, Any]], texts: tuple[str, str]
) -> None:
    if failing_ranks.transport == "nccl" and "target" in options[0]:  # type: ignore[attr-defined]
        pytest.skip("NCCL takes the beginning of a message for the whole; TRITONDT_DEBUG=1 compares before")
    outcomes = run(failing_ranks, members, disagree, options)
    # One may hear of it only by the other one's leaving; who says so names both ranks and both values.
    kinds = [outcome.kind for outcome in outcomes if isinstance(outcome, Failure)]
    assert len(kinds) == 2
    assert set(kinds) <= {"MismatchError", "PeerError"}
    assert "MismatchError" in kinds
    for outcome in outcomes:
        assert_failed(outcome, outcome.kind, "step 1 of 1", *(f"rank {rank}" for rank in members))
        if outcome.kind == "MismatchError":
            assert_failed(outcome, "MismatchError", *texts)


def assert_waited(text: str) -> None:
    """The watch ends a wait at the timeout; how long after it, the machine's load decides."""
    told = re.search(r"rank 1 waited ([\d.]+) s", text)
    assert told is not None, text
    assert float(told[1]) >= TIMEOUT_S


def stay_away(rank: int, members: tuple[int, ...]) -> None:
    if rank == members[0]:
        move(members)


@pytest.mark.extended
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout(failing_ranks: GlooRanks) -> None:
    waiting, away = run(failing_ranks, (1, 2), stay_away)
    assert away is None
    assert_failed(waiting, "PeerError", "for rank 2 in step 1 of 1 (exchange (S0) -> (R))", "(TRITONDT_TIMEOUT)")
    assert_waited(waiting.text)
    again, _ = failing_ranks.outcomes(stay_away, (1, 2))[1:3]
    assert_failed(again, "WorldError", "communicator that failed before", "s for rank 2 in step", "make a new world")


def raise_its_own(rank: int, members: tuple[int, ...]) -> None:
    if rank == members[-1]:
        raise ZeroDivisionError("the model divided by zero")
    if rank in members:
        move(members)


@pytest.mark.extended
def test_a_rank_that_raises_elsewhere_is_not_waited_for_forever(failing_ranks: GlooRanks) -> None:
    """Its exception was caught, so nobody knows: the others stop at the timeout and name it."""
    waiting, raised = run(failing_ranks, (1, 3), raise_its_own)
    assert_failed(raised, "ZeroDivisionError", "divided by zero")
    assert_failed(waiting, "PeerError", "for rank 3 in step 1 of 1", "the timeout is 3 s")
    assert_waited(waiting.text)


def wait_elsewhere(rank: int, folder: Path) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2; that one comes when rank 0 has been told."""
    pair = (0, 1) if rank == 0 else (1, 2)
    if rank < 3:
        T.set_timeout(T.Mesh((2,), ranks=pair), 6.0 if rank == 0 else 90.0)
    if rank == 1:
        (folder / "waits").touch()
    awaited = {0: "waits", 2: "told"}.get(rank)
    while awaited is not None and not (folder / awaited).exists():
        time.sleep(0.02)
    try:
        if rank < 3:
            move(pair)
    finally:
        if rank == 0:
            (folder / "told").touch()


@pytest.mark.extended
def test_a_rank_that_waits_elsewhere_says_for_whom(failing_ranks: GlooRanks, tmp_path: Path) -> None:
    if failing_ranks.transport not in ("sockets", "gloo"):  # type: ignore[attr-defined]
        pytest.skip("what ranks wait for is one thing for all transports")
    failing_ranks.outcomes(abort)  # tests before this one have left communicators of such members failed
    for pair in ((0, 1), (1, 2)):
        failing_ranks.run(connect, pair)
    waiting, *others = failing_ranks.outcomes(wait_elsewhere, tmp_path)
    assert others == [None] * 3
    assert_failed(
        waiting, "PeerError", "for rank 1 in step 1 of 1", "; rank 1 has said that it waits for rank 2 in step 1"
    )
    failing_ranks.outcomes(abort)


class ForgetfulGroup:
    """A double of Gloo's group that sends, and forgets that anybody waits for it: only a wait's own limit ends that."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._under_way: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "ForgetfulGroup":
        self._under_way.append(self._group.send(tensors, peer, tag))
        return self

    def wait(self, limit: timedelta = timedelta(hours=1)) -> None:
        time.sleep(limit.total_seconds())
        raise RuntimeError("Timed out waiting for send operation to complete")


def forget_a_send(rank: int, members: tuple[int, ...], behind_s: float) -> float | None:
    """Seconds until the first of the members is told."""
    if rank != members[0]:
        connect(rank, members)
        return None
    communicator: Any = world.current().communicator(members)
    communicator._group = ForgetfulGroup(communicator._group)
    T.set_timeout(T.Mesh((len(members),), ranks=members), 1.0)
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "_LIMIT_BEHIND_S", behind_s)
        with pytest.raises(T.PeerError, match=rf"rank {rank} waited [123]\.\d s for rank \d in step 1 of 1 .* answer"):
            move(members)
    return time.monotonic() - started


@pytest.mark.extended
@pytest.mark.parametrize(("members", "behind_s"), [((0, 1, 3), 2.0), ((0, 2, 3), 0.0)])
def test_a_send_that_gloo_forgets_ends_a_little_behind_the_timeout(
    failing_ranks: GlooRanks, members: tuple[int, ...], behind_s: float
) -> None:
    """The watch has interrupted it, or is later than the limit."""
    if failing_ranks.transport != "gloo":  # type: ignore[attr-defined]
        pytest.skip("only Gloo forgets one")
    failing_ranks.outcomes(abort)  # tests before this one have left communicators of such members failed
    seconds, *_ = run(failing_ranks, members, forget_a_send, behind_s)
    failing_ranks.run(abort)  # the others know of nothing, and would close what they share with a rank that has failed
    assert isinstance(seconds, float), seconds
    assert seconds >= 1.0 + behind_s


def ask_for_a_large_mesh(rank: int) -> list[str]:
    found = []
    for make in (lambda: T.init_device_mesh("cpu", (2, 3)), lambda: T.Mesh((5,))):
        with pytest.raises(T.MeshError) as told:
            make()
        found.append(str(told.value))
    return found


def test_fewer_ranks_than_the_mesh_needs(four_ranks: GlooRanks) -> None:
    for large, line in four_ranks.run(ask_for_a_large_mesh):
        assert "a mesh of shape (2, 3) needs rank 5, but the world has 4 ranks (0..3); start 6 or make" in large
        assert "a mesh of shape (5,) needs rank 4, but the world has 4 ranks" in line


def be_called_away(rank: int, members: tuple[int, ...]) -> str:
    """The error of a signal's handler, which ends a wait for a rank that does not come."""
    if rank != members[0]:
        return ""

    def handler(number: int, frame: object) -> None:
        raise InterruptedError("called away")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(InterruptedError, match="called away") as error:
        move(members)
    return str(error.value)


def test_a_rank_that_waits_answers_signals(failing_ranks: GlooRanks, request: pytest.FixtureRequest) -> None:
    """Ctrl-C among them. Gloo looks at none until a message comes, and the double of NCCL waits as CUDA does."""
    if request.node.callspec.params["failing_ranks"] != "sockets":
        pytest.skip("it waits where no signal reaches it")
    assert run(failing_ranks, (2, 3), be_called_away) == ["called away", ""]


def die(rank: int, members: tuple[int, ...], culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank in members:
        move(members)


def end_uncaught(rank: int, members: tuple[int, ...], culprit: int) -> None:
    if rank == culprit:
        raise UncaughtError("out of luck")
    if rank in members:
        move(members)


def test_ranks_hear_of_those_that_die() -> None:
    """Rank 3 is killed, rank 2 ends by an uncaught exception, and with rank 0 the store goes.

    The timeout is a minute: the others must hear of it, not wait for it.
    """
    with GlooRanks(4, {"TRITONDT_TIMEOUT": "60"}) as ranks:
        for members in ((0, 1, 2), (0, 1)):
            ranks.run(connect, members)
        *others, dead = run(ranks, (0, 1, 2, 3), die, 3)
        assert dead.kind == "died"
        assert ranks.status(3) == -signal.SIGKILL
        assert_heard(others)
        assert any("rank 3" in outcome.text for outcome in others)

        *others, dead, _ = ranks.outcomes(end_uncaught, (0, 1, 2), 2, timeout_s=150)
        assert dead.kind == "died"
        assert ranks.status(2) == 1
        assert_heard(others)
        assert any("rank 2 failed" in outcome.text for outcome in others)
        assert any("UncaughtError: out of luck" in outcome.text for outcome in others)

        dead, other, *_ = ranks.outcomes(die, (0, 1), 0, timeout_s=150)
        assert dead.kind == "died"
        assert_heard([other])
        ranks.end(1)
        assert ranks.status(1) == 0, "the last rank does not end by itself"


def assert_heard(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert_failed(outcome, "PeerError", "rank ", "in step 1 of 1 (exchange (S0) -> (R))")
