"""Ranks connect with those that they have messages for, when they first do; their ends and faults before that."""

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm import world

ALL = (0, 1, 2, 3)
WHOLE = torch.arange(48.0).view(6, 8)


@pytest.fixture(params=["sockets", pytest.param("shared-memory", marks=pytest.mark.extended)])
def ranks(request: pytest.FixtureRequest) -> GlooRanks:
    name = "four_ranks" if request.param == "sockets" else "four_shared_memory_ranks"
    found: GlooRanks = request.getfixturevalue(name)
    return found


def grid() -> T.Mesh:
    return T.Mesh((2, 2))


def cut() -> T.DTensor:
    """Cut along both axes of a grid: no rank has heard of another one."""
    return T.distribute_tensor(WHOLE, grid(), [T.Shard(0), T.Shard(1)], src_data_rank=None)


def peers() -> list[int]:
    """Places to which this rank is connected."""
    communicator: Any = world.current().communicator(ALL)
    return [place for place, found in enumerate(communicator._connections.sockets) if found is not None]


def test_ranks_connect_with_those_that_they_have_messages_for(ranks: GlooRanks) -> None:
    """Along rows of the grid first, then with all: whole tensors come from the nearest that have them."""
    for rank, (first, second, last) in enumerate(ranks.run(connect_along_rows)):
        assert (first, second) == ([], [rank ^ 1])
        assert rank ^ 2 in last


def connect_along_rows(rank: int) -> list[list[int]]:
    T.close()
    x = cut()
    found = [peers()]
    rows = x.redistribute(placements=[T.Shard(0), T.Replicate()])
    found.append(peers())
    dist.barrier()  # whoever is at the next exchange calls, and is let in by those that still connect
    torch.testing.assert_close(rows.full_tensor(), WHOLE, rtol=0, atol=0)
    found.append(peers())
    T.close()
    return found


def test_closing_waits_for_those_that_were_never_connected(ranks: GlooRanks) -> None:
    *early, _ = ranks.run(close_with_a_late_rank)
    assert all(seconds > 0.7 for seconds in early), early


def close_with_a_late_rank(rank: int) -> float:
    T.close()
    cut().redistribute(placements=[T.Shard(0), T.Replicate()])
    assert peers() == [rank ^ 1]
    if rank == 3:
        time.sleep(1)
    started = time.monotonic()
    T.close()
    return time.monotonic() - started


@pytest.mark.extended
def test_a_rank_that_does_not_close_is_named(four_ranks: GlooRanks) -> None:
    """By rank 2, which is connected with it, and by the others, unless they hear of one of these first."""
    for rank, text in enumerate(four_ranks.run(close_without_rank_3)[:3]):
        own = rf"rank {rank} waited( \d\.\d s)? for ranks? (2, )?3 in a barrier"
        heard = (
            rf"rank [0-2] failed while rank {rank} waited for ranks? (2, )?3 in a barrier.*: rank [0-2] waited \d\.\d s"
        )
        assert re.match(own, text) or re.match(heard, text), text


def close_without_rank_3(rank: int) -> str:
    T.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITONDT_TIMEOUT", "2")
        cut().redistribute(placements=[T.Shard(0), T.Replicate()])
    if rank == 3:
        time.sleep(6)
        T.abort()
        return ""
    with pytest.raises(T.PeerError) as error:
        T.close()
    return str(error.value)


def test_a_rank_that_refuses_the_first_exchange_is_known_at_once(ranks: GlooRanks) -> None:
    found = ranks.run(refuse_on_rank_1)
    assert found[1][0].startswith("LocalTensorError")
    for rank in (0, 2, 3):
        text, seconds = found[rank]
        assert f"rank 1 failed while rank {rank} waited for rank" in text, text
        assert "LocalTensorError" in text
        assert seconds < 40, "the timeout is 60 s"


def refuse_on_rank_1(rank: int) -> tuple[str, float]:
    T.close()
    mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous((8, 8))
    before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "S1"))
    started = time.monotonic()
    with pytest.raises((T.PeerError, T.LocalTensorError)) as error:
        T.redistribute(torch.ones(1 if rank == 1 else 2, 8), before, after)
    seconds = time.monotonic() - started
    T.abort()
    return f"{type(error.value).__name__}: {error.value}", seconds


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["sockets", "shared-memory"])
def test_a_rank_that_dies_before_anybody_is_connected_with_it(transport: str) -> None:
    """Its port refuses whoever calls it; whom it would have called hears of that, or runs out of time."""
    with GlooRanks(4, {"TRITONDT_TRANSPORT": transport, "TRITONDT_TIMEOUT": "8"}) as mortal:
        found = mortal.outcomes(lose_rank_1, timeout_s=60)
    for rank in (0, 2, 3):
        text, seconds = found[rank]
        assert "rank 1" in text, text
        assert seconds < 20, (text, seconds)


def lose_rank_1(rank: int) -> tuple[str, float]:
    mesh = T.Mesh((4,))
    x = T.distribute_tensor(WHOLE, mesh, [T.Shard(0)], src_data_rank=None)
    assert peers() == []
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(T.PeerError) as error:
        x.redistribute(placements=[T.Shard(1)])
    return str(error.value), time.monotonic() - started


def test_two_threads_make_communicators_in_either_order(four_ranks: GlooRanks) -> None:
    """One thread makes the pair's first on rank 0, and on rank 1 last: each waits for the other's second thread."""
    assert four_ranks.run(make_in_two_threads) == [2, 2, 1, 1]


def make_in_two_threads(rank: int) -> int:
    T.close()
    found = [ranks for ranks in ((0, 1), ALL) if rank in ranks]
    threads = [
        threading.Thread(target=world.current().communicator, args=(each,), daemon=True)
        for each in (found if rank == 0 else found[::-1])
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(20)
    done = sum(not thread.is_alive() for thread in threads)
    T.abort()
    return done


def test_a_refusal_comes_behind_what_another_thread_exchanges(ranks: GlooRanks) -> None:
    for rank, text in enumerate(ranks.run(refuse_in_a_second_thread)):
        assert text == "" if rank == 0 else f"rank 0 failed while rank {rank} waited for rank" in text, text


def refuse_in_a_second_thread(rank: int) -> str:
    """Rank 0 refuses the second exchange while the first is under way; the error that the others get."""
    T.close()
    mesh = T.Mesh((4,))
    x = T.distribute_tensor(WHOLE, mesh, [T.Shard(0)], src_data_rank=None)
    communicator: Any = world.current().communicator(ALL)
    if rank == 0:
        ended: list[str] = []

        def refuse() -> None:
            communicator.refuse(T.LocalTensorError("no second one"))
            ended.append("refusal")

        second = threading.Timer(0.3, refuse)
        second.start()
        moved = x.redistribute(placements=[T.Shard(1)])
        ended.append("exchange")
        second.join()
        assert ended == ["exchange", "refusal"]
        text = ""
    else:
        time.sleep(1)
        moved = x.redistribute(placements=[T.Shard(1)])
        with pytest.raises(T.PeerError) as error:
            moved.redistribute(placements=[T.Replicate()])
        text = str(error.value)
    torch.testing.assert_close(moved.to_local(), WHOLE.tensor_split(4, 1)[rank], rtol=0, atol=0)
    T.abort()
    return text


def test_barriers_of_ranks_that_are_not_connected_are_met_one_by_one(ranks: GlooRanks) -> None:
    for waited in ranks.run(meet_twice):
        assert waited > 0.7, "the second barrier was taken for the first"


def meet_twice(rank: int) -> float:
    """Seconds of this rank at the second barrier, to which the last rank comes late; it waits for nobody."""
    T.close()
    communicator: Any = world.current().communicator(ALL)
    communicator.barrier()
    assert peers() == []
    if rank == 3:
        time.sleep(1)
    started = time.monotonic()
    communicator.barrier()
    waited = time.monotonic() - started
    T.close()
    return 1 if rank == 3 else waited


def test_ranks_that_wait_without_end_connect(ranks: GlooRanks) -> None:
    assert ranks.run(connect_without_a_timeout) == ["done"] * 4


def connect_without_a_timeout(rank: int) -> str:
    T.close()
    x = cut()
    world.current().communicator(ALL).set_timeout(float("inf"))
    torch.testing.assert_close(x.full_tensor(), WHOLE, rtol=0, atol=0)
    T.close()
    return "done"


def test_a_rank_with_all_connections_is_met_by_those_without(ranks: GlooRanks) -> None:
    """The middle of three is connected with both others, which are not with each other."""
    found = ranks.run(move_along_a_chain)
    assert [places for places, _ in found] == [[1], [0, 2], [1], []]
    assert all(seconds < 40 for _, seconds in found), found


def move_along_a_chain(rank: int) -> tuple[list[int], float]:
    T.close()
    left, right = T.Mesh((2,), ranks=(0, 1)), T.Mesh((2,), ranks=(1, 2))
    places: list[int] = []
    if rank < 3:
        x = T.distribute_tensor(WHOLE, left, [T.Shard(0)], src_data_rank=None)
        moved = x.redistribute(right, [T.Shard(0)])
        if rank > 0:
            torch.testing.assert_close(moved.to_local(), WHOLE.tensor_split(2)[rank - 1], rtol=0, atol=0)
        communicator: Any = world.current().communicator((0, 1, 2))
        places = [place for place, found in enumerate(communicator._connections.sockets) if found is not None]
    started = time.monotonic()
    T.close()
    return places, time.monotonic() - started


def test_an_abort_ends_the_wait_for_ranks_that_are_not_connected(four_ranks: GlooRanks) -> None:
    text, seconds = four_ranks.run(abort_while_closing)[0]
    assert re.match(r"a barrier, asked for at .* was asked of a communicator that ended \(.* was aborted\)", text), text
    assert seconds < 60, "the timeout is 300 s"


def abort_while_closing(rank: int) -> tuple[str, float]:
    T.close()
    communicator: Any = world.current().communicator(ALL)
    text, started = "", time.monotonic()
    if rank == 0:
        threading.Timer(0.5, communicator.abort).start()
        with pytest.raises(T.WorldError) as error:
            communicator.barrier()
        text = str(error.value)
    seconds = time.monotonic() - started
    T.abort()
    return text, seconds


def test_ranks_that_close_and_ranks_that_exchange_are_told_at_once(ranks: GlooRanks) -> None:
    for text, seconds in ranks.run(close_on_rank_1):
        assert "ranks disagree at exchange 1: rank" in text, text
        assert "a barrier" in text
        assert seconds < 40, "the timeout is 60 s, or 300"


def close_on_rank_1(rank: int) -> tuple[str, float]:
    T.close()
    x = T.distribute_tensor(WHOLE, T.Mesh((4,)), [T.Shard(0)], src_data_rank=None)
    peers()
    started = time.monotonic()
    with pytest.raises(T.PeerError) as error:
        T.close() if rank == 1 else x.full_tensor()
    seconds = time.monotonic() - started
    T.abort()
    return str(error.value), seconds


def test_connecting_asks_nothing_of_the_store(ranks: GlooRanks) -> None:
    """Its process may have stopped, or ended with its rank, when two ranks have their first messages."""
    assert ranks.run(connect_without_the_store) == ["done"] * 4


def connect_without_the_store(rank: int) -> str:
    T.close()
    x = cut()
    communicator: Any = world.current().communicator(ALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator._connections, "_answers", None)
        torch.testing.assert_close(x.full_tensor(), WHOLE, rtol=0, atol=0)
    T.close()
    return "done"
