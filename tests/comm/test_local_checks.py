"""One rank of three refuses by a check of its own, before an exchange: the two others hear of it at once.

A table of public collective calls whose arguments, or state, only one rank may have wrong; then all go on in it.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.errors import CheckpointError
from tritondt.interop.checkpoint_folder import CheckpointFolder
from tritondt.parallel import ColwiseParallel, parallelize_module
from tritondt.parallel.context.ring_attention import ring_attention
from tritondt.parallel.context.sequence_cut import context_parallel_shard

SIZE, WRONG = 3, 1
# Only a hang reaches it: ranks hear within some 2 s, on a machine that does nothing else.
TIMEOUT_S = 100


def mesh() -> T.Mesh:
    return T.Mesh((SIZE,))


def sharded(rank: int) -> T.DTensor:
    return T.DTensor.from_local(torch.full((2, 6), float(rank)), mesh(), [T.Shard(0)])


def freed(rank: int, is_wrong: bool) -> T.DTensor:
    found = sharded(rank)
    if is_wrong:
        found.to_local().untyped_storage().resize_(0)
    return found


def wrong_distribute(rank: int, is_wrong: bool) -> object:
    x = torch.ones(6, 6)
    return T.distribute_tensor(x.to_sparse() if is_wrong else x, mesh(), [T.Shard(0)])


def wrong_source(rank: int, is_wrong: bool) -> object:
    return T.distribute_tensor(torch.ones(6, 6), mesh(), [T.Shard(0)], src_data_rank=9 if is_wrong else 0)


def wrong_full_tensor(rank: int, is_wrong: bool) -> object:
    return freed(rank, is_wrong).full_tensor()


def wrong_redistribute(rank: int, is_wrong: bool) -> object:
    return freed(rank, is_wrong).redistribute(placements=[T.Shard(1)])


def wrong_async(rank: int, is_wrong: bool) -> object:
    return freed(rank, is_wrong).redistribute(placements=[T.Shard(1)], async_op=True).to_local()


def wrong_many(rank: int, is_wrong: bool) -> object:
    moves = [(x, [T.Replicate()]) for x in (sharded(rank), freed(rank, is_wrong))]
    return [x.to_local() for x in T.redistribute_many(moves)]


def wrong_from_local(rank: int, is_wrong: bool) -> object:
    local = torch.ones(2, 6)
    return T.DTensor.from_local(local.to_sparse() if is_wrong else local, mesh(), [T.Shard(0)], run_check=True)


def wrong_shape_of_from_local(rank: int, is_wrong: bool) -> object:
    return T.DTensor.from_local(torch.ones(2, 7 if is_wrong else 6), mesh(), [T.Shard(0)], run_check=True)


def wrong_ring(rank: int, is_wrong: bool) -> object:
    part = context_parallel_shard(torch.ones(1, 1, 6, 4), mesh(), 2)
    key = torch.ones(1, 1, 5, 4) if is_wrong else part
    return ring_attention(part, key, key, mesh(), length=6)


class Broken:
    """An object whose state one rank cannot give."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("no state")


def folder_of(rank: int) -> CheckpointFolder:
    path = Path(tempfile.gettempdir()) / f"tritondt-local-checks-{T.Mesh((SIZE,)).identity.generation}"
    return CheckpointFolder(path)


def wrong_save(rank: int, is_wrong: bool) -> object:
    return folder_of(rank).save({"x": torch.ones(2), "broken": Broken() if is_wrong else torch.ones(1)}, 1)


def wrong_load(rank: int, is_wrong: bool) -> object:
    checkpoints = folder_of(rank)
    checkpoints.save({"x": torch.ones(2)}, 2)
    return checkpoints.load({"x": torch.ones(3 if is_wrong else 2)}, 2)


def wrong_module(rank: int, is_wrong: bool) -> object:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU() if is_wrong else nn.Linear(6, 6))
    return parallelize_module(model, mesh(), {"0": ColwiseParallel(), "1": ColwiseParallel()})


def wrong_plan(rank: int, is_wrong: bool) -> object:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return parallelize_module(model, mesh(), {"7" if is_wrong else "0": ColwiseParallel()})


CASES: dict[str, Callable[[int, bool], object]] = {
    name.removeprefix("wrong_"): call for name, call in list(globals().items()) if name.startswith("wrong_")
}


def refuse(rank: int, name: str) -> str:
    T.ones(SIZE, device_mesh=mesh(), placements=[T.Shard(0)]).full_tensor()  # all are connected
    try:
        CASES[name](rank, rank == WRONG)
        text = "no error"
    except (T.TritondtError, CheckpointError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    for seed in range(3):  # and the same world goes on
        found = T.DTensor.from_local(torch.full((1,), 1.0 * rank + seed), mesh(), [T.Shard(0)]).full_tensor()
        torch.testing.assert_close(found, torch.arange(3.0) + seed, rtol=0, atol=0)
    return text


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(SIZE, {"TRITONDT_TIMEOUT": str(TIMEOUT_S)}) as found:
        yield found


@pytest.mark.in_core(4)
@pytest.mark.parametrize("name", CASES)
def test_the_others_hear_of_it(ranks: GlooRanks, name: str) -> None:
    told = ranks.run(refuse, name, timeout_s=2 * TIMEOUT_S)
    assert told[WRONG] != "no error"
    for rank in (0, 2):
        assert told[rank] != "no error"
        assert "the timeout is" not in told[rank]
        # The reason is that of the rank at fault, or names what it gave.
        assert f"rank {WRONG}" in told[rank], told
