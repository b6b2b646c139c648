"""A rank that refuses an exchange over NCCL and goes on: nobody sums numbers of another exchange."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import ranks_on

TIMEOUT_S = 60.0  # all hear of a refusal long before
SHAPE = (6, 4)


@pytest.fixture(scope="module")
def started() -> Iterator[GlooRanks]:
    with ranks_on("nccl", 3, TRITONDT_TIMEOUT=f"{TIMEOUT_S}") as ranks:
        yield ranks


@pytest.fixture
def ranks(started: GlooRanks) -> Iterator[GlooRanks]:
    """The same three for all tests: what failed is put away after each."""
    yield started
    started.run(abort)


def abort(rank: int) -> None:
    T.abort()


def reduced(value: float, shape: tuple[int, int] = SHAPE) -> list[float]:
    """Values in the sum over all ranks of a tensor full of `value`; one that is not of SHAPE is refused."""
    mesh = T.Mesh((3,))
    terms = T.DTensorSpec(mesh, [T.Partial("sum")], T.TensorMeta.contiguous(SHAPE, torch.float32))
    whole = T.redistribute(torch.full(shape, value), terms, terms.with_placements([T.Replicate()]))
    values: list[float] = whole.unique().tolist()
    return values


def refuse_and_go_on(rank: int, culprits: tuple[int, ...]) -> list[Any]:
    """Each of three sums, or what it raised; the culprits bring a wrong tensor to the first, and go on."""
    reduced(1.0)
    found: list[Any] = []
    for number, value in enumerate((1.0, 10.0, 100.0)):
        try:
            found.append(reduced(value, (5, 4) if number == 0 and rank in culprits else SHAPE))
        except T.TritondtError as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_nobody_sums_what_belongs_to_a_refused_exchange(ranks: GlooRanks) -> None:
    told = ranks.run(refuse_and_go_on, (1,))
    for rank, ((kind, text), (next_kind, next_text), (last_kind, last_text)) in enumerate(told):
        assert last_kind == "WorldError"
        assert "was asked of a communicator that failed before" in last_text
        if rank == 1:
            assert kind == "LocalTensorError"
            assert next_kind == "PeerError"
            assert next_text.startswith(f"rank 1 refused operation 3 of ranks 0,1,2 ({kind}: ")
            assert " did not: it waits in step 1 of 2 (reduce (P(sum)) -> (R) in 3 pieces) of (6, 4)" in next_text
            assert next_text.endswith("no tags, so nothing may follow what only some ranks refused")
        else:
            assert kind == "PeerError"
            assert f"rank 1 failed while rank {rank} waited for rank" in text
            assert "LocalTensorError: (P(sum)) of (6, 4) float32 gives rank 1" in text
            assert next_kind == "WorldError"


def test_ranks_that_refuse_alike_go_on(ranks: GlooRanks) -> None:
    for (kind, _), *sums in ranks.run(refuse_and_go_on, (0, 1, 2)):
        assert kind == "LocalTensorError"
        assert sums == [[30.0], [300.0]]
