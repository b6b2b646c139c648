"""Faults of ranks that pack into each other's memory: who is told what, and that nobody reads what is wrong."""

import os
import time
from typing import Any

import pytest

pytest.importorskip("triton", reason="cuda.h, which the double of CUDA's driver is compiled against, is Triton's")

import torch
import torch.distributed as dist

import tritondt as T
from tests.doubles.fake_nccl.library import Gate
from tests.harness.gloo_ranks import Failure
from tests.harness.placed_ranks import communicator_of, placed_ranks, whole_tensor


def stop_before_it_is_read(rank: int) -> str:
    """Rank 0 sends three times and gives up, before rank 1 has read the first: what that reads, or that it was told.

    The third would be packed where the first one is.
    """
    mesh = T.Mesh((2,))

    def send(value: float, is_async: bool) -> Any:
        local = torch.full((1 - rank, 8), value)
        x = T.DTensor.from_local(local, mesh, [T.Shard(0)], shape=(1, 8), stride=(8, 1))
        return x.redistribute(placements=[T.Replicate()], async_op=is_async)

    send(0.0, False)
    gate = Gate(communicator_of(mesh)._queue.stream._stream) if rank else None
    first, *later = [send(value, True) for value in (10.0, 20.0, 30.0)]
    if rank == 0:
        first.to_local()
        communicator_of(mesh).begin_abort()
        time.sleep(0.3)  # the third would be packed now
    dist.barrier()
    if gate is None:
        T.abort()
        return "aborted"
    gate.open()
    try:
        found = str(first.to_local().unique().tolist())
    except T.PeerError:
        found = "[10.0]"  # told in time
    with pytest.raises((T.PeerError, T.WorldError)):
        later[-1].to_local()
    T.abort()
    return found


@pytest.mark.extended
def test_a_rank_that_gives_up_overwrites_nothing() -> None:
    with placed_ranks(2, TRITONDT_TIMEOUT="5") as ranks:
        assert ranks.run(stop_before_it_is_read)[1] == "[10.0]"


def stay_away(rank: int) -> tuple[str, str, float]:
    """Rank 1 does not come to the second exchange, and its memory goes with its world; then all go on."""
    mesh = T.Mesh((3,))
    x = T.distribute_tensor(whole_tensor(), mesh, [T.Shard(0)])
    x.redistribute(placements=[T.Replicate()])
    told, kind, began = "", "", time.monotonic()
    if rank != 1:
        with pytest.raises(T.PeerError) as caught:
            x.redistribute(placements=[T.Replicate()], async_op=rank == 2).to_local()
        told, kind = str(caught.value), type(caught.value).__name__
    took = time.monotonic() - began
    os.environ["TRITONDT_TIMEOUT"] = "60"
    T.abort()
    whole = T.distribute_tensor(whole_tensor(), T.Mesh((3,)), [T.Shard(0)]).full_tensor()
    torch.testing.assert_close(whole, whole_tensor(), rtol=0, atol=0)
    return told, kind, took


@pytest.mark.extended
def test_a_rank_that_does_not_come_is_named_and_all_go_on() -> None:
    with placed_ranks(3, TRITONDT_TIMEOUT="3") as ranks:
        for rank, (told, kind, took) in enumerate(ranks.run(stay_away)):
            if rank != 1:
                assert "rank 1" in told
                assert kind == "PeerError"
                assert took < 20


def disagree(rank: int) -> None:
    mesh = T.Mesh((2,))
    x = T.distribute_tensor(whole_tensor(), mesh, [T.Shard(0)])
    x.redistribute(placements=[T.Replicate()])
    x.redistribute(placements=[T.Shard(1) if rank else T.Replicate()])


@pytest.mark.extended
def test_ranks_that_disagree_are_told_so() -> None:
    with placed_ranks(2, TRITONDT_TIMEOUT="10") as ranks:
        for outcome in ranks.outcomes(disagree):
            assert isinstance(outcome, Failure)
            assert outcome.kind == "MismatchError", outcome.trace
            assert "ranks disagree at exchange " in outcome.text
