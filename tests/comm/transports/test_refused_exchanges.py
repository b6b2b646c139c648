"""An exchange that one rank refuses alone: the others are told, all count it as run, and the same world goes on."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.transports.threads import run_ranks
from tritondt.redistribution.many import redistribute_locals
from tritondt.redistribution.run import redistribute_local_async

SIZE = 3
Call = Callable[[int, bool], object]


def spec(placements: str, rows: int = 7, columns: int = 5, mesh: T.Mesh | None = None) -> T.DTensorSpec:
    meta = T.TensorMeta.contiguous((rows, columns))
    return T.DTensorSpec(T.Mesh((SIZE,)) if mesh is None else mesh, T.parse_placements(placements), meta)


def full_of(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) % 251 + seed


def part_of(found: T.DTensorSpec, rank: int, seed: int) -> torch.Tensor:
    rows, columns = found.shape
    return full_of(rows, columns, seed).chunk(SIZE)[rank].clone()


def go_on(rank: int, rows: int = 7, columns: int = 5) -> None:
    """Redistributions on the world as it is, compared exactly: several in turn, so that nothing old comes in."""
    for seed in range(3):
        source = spec("S0", rows, columns)
        whole = T.redistribute(part_of(source, rank, seed), source, spec("R", rows, columns))
        torch.testing.assert_close(whole, full_of(rows, columns, seed), rtol=0, atol=0)
        term = full_of(rows, columns, rank)
        total = T.redistribute(term, spec("P", rows, columns), spec("R", rows, columns))
        torch.testing.assert_close(total, full_of(rows, columns, 0) * 3 + 3, rtol=0, atol=0)


def shape(rank: int, is_refused: bool) -> object:
    local = torch.zeros(9, 9) if is_refused else part_of(spec("S0"), rank, 9)
    return T.redistribute(local, spec("S0"), spec("R"))


def sparse(rank: int, is_refused: bool) -> object:
    local = part_of(spec("S0"), rank, 9)
    return T.redistribute(local.to_sparse() if is_refused else local, spec("S0"), spec("S1"))


def device(rank: int, is_refused: bool) -> object:
    local = torch.zeros(9, device="meta") if is_refused else part_of(spec("S0"), rank, 9)
    return T.redistribute(local, spec("S0"), spec("R"))


def freed(rank: int, is_refused: bool) -> object:
    local = part_of(spec("S0"), rank, 9)
    if is_refused:
        local.untyped_storage().resize_(0)
    return T.redistribute(local, spec("S0"), spec("R"))


def long(rank: int, is_refused: bool) -> object:
    """Messages of 8 MB: half of one has gone when its sender hears of the refusal."""
    source = spec("S0", 4096 * SIZE, 512)
    local = torch.zeros(9) if is_refused else torch.full(source.local_shape, 7.0)
    return T.redistribute(local, source, spec("R", 4096 * SIZE, 512))


def two_steps(rank: int, is_refused: bool) -> object:
    source = spec("P", 600, 512)
    local = torch.zeros(9) if is_refused else torch.full(source.local_shape, 7.0)
    return T.redistribute(local, source, spec("R", 600, 512))


def asynchronous(rank: int, is_refused: bool) -> object:
    local = torch.zeros(9, 9) if is_refused else part_of(spec("S0"), rank, 9)
    _, work = redistribute_local_async(local, spec("S0"), spec("R"))
    assert work is not None
    work.wait()
    return work


def many(rank: int, is_refused: bool) -> object:
    locals_ = [part_of(spec("S0"), rank, 9), torch.zeros(9, 9) if is_refused else part_of(spec("S0"), rank, 8)]
    return redistribute_locals(locals_, ((spec("S0"), spec("R")),) * 2, None)


def across(rank: int, is_refused: bool) -> object:
    left = T.Mesh((2,), ranks=(0, 1))
    source = spec("S0", 7, 5, left)
    local = torch.zeros(9, 9) if is_refused else torch.zeros(source.local_shape if rank < 2 else (0,))
    return T.redistribute(local, source, spec("R"))


CASES: dict[str, Call] = {
    "shape": shape,
    "long": long,
    "across": across,
    "sparse": sparse,
    "device": device,
    "freed": freed,
    "two steps": two_steps,
    "async": asynchronous,
    "many": many,
}


def refuse(rank: int, name: str, refusing: tuple[int, ...], late: int = -1, times: int = 1) -> list[str]:
    """The error of each call; then all go on."""
    told = []
    for _ in range(times):
        if rank == late:
            time.sleep(2.5)  # the others have been told, and are at what follows
        try:
            CASES[name](rank, rank in refusing)
            told.append("no error")
        except T.TritondtError as error:
            told.append(f"{type(error).__name__}: {error}")
    go_on(rank)
    go_on(rank, 900, 700)
    return told


def check(told: list[list[str]], refusing: tuple[int, ...], must_hear: bool = True) -> None:
    for rank, found in enumerate(told):
        for text in found:
            if rank in refusing:
                assert text.startswith(("LocalTensorError", "TransportError")), text
            elif must_hear:
                assert text.startswith("RefusalError: rank "), text
                assert any(f"rank {other} failed while rank {rank} waited for" in text for other in refusing), text
            else:
                assert text == "no error" or text.startswith("RefusalError: "), text


@pytest.fixture(scope="module", params=["shared-memory", "sockets"])
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(SIZE, {"TRITONDT_TIMEOUT": "100", "TRITONDT_TRANSPORT": request.param}) as found:
        yield found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("refusing", [(1,), (0,), (0, 2)], ids=str)
def test_rank_threads_go_on(name: str, refusing: tuple[int, ...]) -> None:
    if name == "across" and 2 in refusing:
        refusing = (0, 1)  # rank 2 has no part to be wrong
    told = run_ranks(SIZE, lambda rank: refuse(rank, name, refusing, times=2))
    check(told, refusing, must_hear=name != "across")


@pytest.mark.in_core(3)
@pytest.mark.parametrize("name", CASES)
def test_processes_go_on(ranks: GlooRanks, name: str) -> None:
    told = ranks.run(refuse, name, (1,))
    check(told, (1,), must_hear=name != "across")


@pytest.mark.extended
@pytest.mark.parametrize("name", ["shape", "long", "two steps", "async", "many"])
@pytest.mark.parametrize(
    ("refusing", "late", "times"), [((1,), -1, 2), ((0, 2), -1, 1), ((1,), 2, 1), ((0,), 1, 2), ((2,), 2, 1)], ids=str
)
def test_processes_go_on_after_several(
    ranks: GlooRanks, name: str, refusing: tuple[int, ...], late: int, times: int
) -> None:
    check(ranks.run(refuse, name, refusing, late, times, timeout_s=300), refusing)


def refuse_first(rank: int, name: str, refusing: tuple[int, ...], late: int) -> list[str]:
    T.abort()  # nobody is connected
    return refuse(rank, name, refusing, late)


@pytest.mark.parametrize("late", [-1, 2, 0])
@pytest.mark.parametrize("name", ["shape", "two steps"])
def test_the_first_exchange_of_a_world_may_be_refused(ranks: GlooRanks, name: str, late: int) -> None:
    check(ranks.run(refuse_first, name, (1,), late), (1,))


def refuse_under_debug(rank: int, name: str) -> list[str]:
    T.abort()
    os.environ["TRITONDT_DEBUG"] = "1"
    try:
        return refuse(rank, name, (1,), times=2)
    finally:
        del os.environ["TRITONDT_DEBUG"]
        T.abort()


@pytest.mark.parametrize("name", ["shape", "async"])
def test_under_debug_too(ranks: GlooRanks, name: str) -> None:
    check(ranks.run(refuse_under_debug, name), (1,))


def gloo_refuses(rank: int) -> Any:
    T.abort()
    try:
        shape(rank, rank == 1)
    except T.TritondtError as error:
        text = str(error)
    T.abort()
    go_on(rank)
    return text


def test_over_gloo_the_error_says_what_to_do() -> None:
    with GlooRanks(SIZE, {"TRITONDT_TIMEOUT": "100", "TRITONDT_TRANSPORT": "gloo"}) as found:
        first, _, third = found.run(gloo_refuses)
    for text in (first, third):
        assert "messages of it are under way that this transport cannot take back: call tritondt.abort()" in text
