"""Ranks that issue different things are told so by both sides' lines; with TRITONDT_DEBUG=1 before data moves."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import Failure, GlooRanks
from tests.ops.sharded import distribute
from tritondt.comm.monitor.comparison import NOTE_BYTES, Note, difference, read_note, write_note
from tritondt.comm.transports.threads import run_ranks
from tritondt.redistribution.send import distribute_from
from tritondt.sharding.layout import Layout

FULL = torch.arange(24.0).reshape(4, 6)


def move(x: T.DTensor, text: str, **options: Any) -> T.DTensor:
    return x.redistribute(placements=T.parse_placements(text), **options)


def planted(rank: int, size: int, *, async_op: bool, same: str = "S1") -> None:
    """Rank 1 asks for another placement than the others."""
    x = distribute(FULL, T.Mesh((size,)), "S0")
    move(x, same)
    if rank == 1:
        x.redistribute(placements=[T.Shard(1)], async_op=async_op).wait()  # planted: rank 1
    else:
        x.redistribute(placements=[T.Replicate()], async_op=async_op).wait()  # planted: the others


def line_of(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# planted: {mark}"))
    return f"test_desync.py:{number} (planted)"


@pytest.mark.parametrize("async_op", [False, True])
def test_rank_threads_are_told_both_lines(async_op: bool) -> None:
    with pytest.raises(T.MismatchError, match=r"ranks disagree at exchange 2: rank \d runs .* rank \d runs") as found:
        run_ranks(3, lambda rank: planted(rank, 3, async_op=async_op))
    assert line_of("rank 1") in str(found.value)
    assert line_of("the others") in str(found.value)


@pytest.mark.parametrize("async_op", [False, True])
def test_under_debug_all_ranks_are_told_before_data_moves(monkeypatch: pytest.MonkeyPatch, async_op: bool) -> None:
    monkeypatch.setenv("TRITONDT_DEBUG", "1")
    texts = {}

    def body(rank: int) -> None:
        with pytest.raises(T.MismatchError) as found:
            planted(rank, 3, async_op=async_op)
        texts[rank] = str(found.value)
        # Nothing is under way, so that all can go on.
        torch.testing.assert_close(distribute(FULL, T.Mesh((3,)), "S1").full_tensor(), FULL, rtol=0, atol=0)

    run_ranks(3, body)
    assert len(set(texts.values())) == 1
    assert texts[0].startswith("ranks disagree at exchange 3: ranks 0 and 2 run step 1 of 1 (exchange (S0) -> (R))")
    assert "; rank 1 runs step 1 of 1 (exchange (S0) -> (S1)) of (4, 6) float32, asked for at " in texts[0]
    assert line_of("rank 1") in texts[0]
    assert line_of("the others") in texts[0]


def test_debug_finds_what_moves_between_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 exchange one tensor, 2 and 3 another one: no message would tell."""
    monkeypatch.setenv("TRITONDT_DEBUG", "1")

    def body(rank: int) -> None:
        x = distribute(FULL if rank < 2 else FULL[:3].contiguous(), T.Mesh((2, 2)), "R,S0")
        move(x, "R,S1")

    with pytest.raises(T.MismatchError, match=r"ranks 0 and 1 run .*\(4, 6\) float32.*; ranks 2 and 3 run .*\(3, 6\)"):
        run_ranks(4, body)


def test_debug_takes_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONDT_DEBUG", "yes")
    with pytest.raises(T.WorldError, match="TRITONDT_DEBUG='yes' is set; allowed are 0 and 1"):
        run_ranks(2, lambda rank: planted(rank, 2, async_op=False))


@pytest.fixture(scope="module", params=["0", "1"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooRanks]:
    directory = str(tmp_path_factory.mktemp("flight"))
    settings = {"TRITONDT_TIMEOUT": "20", "TRITONDT_DEBUG": request.param, "TRITONDT_FLIGHT_DIR": directory}
    with GlooRanks(3, settings) as found:
        yield found


def plant(rank: int, async_op: bool) -> None:
    T.abort()  # what the test before has left
    planted(rank, 3, async_op=async_op)


@pytest.mark.extended
@pytest.mark.parametrize("async_op", [False, True])
def test_processes_are_told_both_lines(ranks: GlooRanks, async_op: bool) -> None:
    outcomes = ranks.outcomes(plant, async_op)
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    told = [outcome.text for outcome in outcomes if outcome.kind == "MismatchError"]
    assert told
    for text in told:
        assert line_of("rank 1") in text
        assert line_of("the others") in text


def test_notes_that_are_too_long_are_cut() -> None:
    note = Note(2**56 - 1, "step 1 é" * 200)
    content = write_note(note)
    assert len(content) == NOTE_BYTES
    found = read_note(content)
    assert found.fingerprint == note.fingerprint
    assert note.description.startswith(found.description)
    assert len(found.description) > 400


def test_equal_notes_do_not_differ() -> None:
    assert difference(1, {0: Note(1, "a"), 1: Note(1, "a, asked for elsewhere")}) is None


def swapped(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two equal redistributions, which rank 1 asks for in the other order."""
    one, other = (distribute(values, T.Mesh((3,)), "S0") for values in (FULL, -FULL))
    if rank == 1:
        second = other.redistribute(placements=[T.Replicate()])  # planted: the second first
        return one.redistribute(placements=[T.Replicate()]).to_local(), second.to_local()
    first = one.redistribute(placements=[T.Replicate()])  # planted: the first first
    return first.to_local(), other.redistribute(placements=[T.Replicate()]).to_local()


def test_under_debug_equal_redistributions_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONDT_DEBUG", "1")

    def body(rank: int) -> str:
        with pytest.raises(T.MismatchError) as found:
            swapped(rank)
        return str(found.value)

    first, second = (line_of(mark).replace("planted", "swapped") for mark in ("the first first", "the second first"))
    for text in run_ranks(3, body):
        assert re.search(rf"ranks 0 and 2 run .*{re.escape(first)}; rank 1 runs .*{re.escape(second)}; nothing", text)
        assert text.endswith("all ranks must redistribute the same tensors in the same order, from the same lines")


def test_under_debug_meshes_may_redistribute_from_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONDT_DEBUG", "1")

    def body(rank: int) -> torch.Tensor:
        left, right = T.Mesh((2,), ranks=(0, 1)), T.Mesh((2,), ranks=(2, 3))
        meta = T.TensorMeta.contiguous(FULL.shape)
        source, target = (T.DTensorSpec(mesh, [T.Shard(0)], meta) for mesh in (left, right))
        if rank < 2:
            return T.redistribute(FULL[2 * rank :][:2].clone(), source, target)
        return T.redistribute(torch.empty(0), source, target)

    *_, third, fourth = run_ranks(4, body)
    torch.testing.assert_close(torch.cat([third, fourth]), FULL, rtol=0, atol=0)


def swapped_between_meshes(rank: int) -> None:
    """The ranks that receive ask for two equal redistributions in the other order than those that send."""
    left, right = T.Mesh((2,), ranks=(0, 1)), T.Mesh((2,), ranks=(2, 3))
    meta = T.TensorMeta.contiguous(FULL.shape)
    source, target = (T.DTensorSpec(mesh, [T.Shard(0)], meta) for mesh in (left, right))
    one, other = (part if rank < 2 else torch.empty(0) for part in (FULL[:2], -FULL[:2]))
    if rank < 2:
        first(one, source, target)
        second(other, source, target)
    else:
        second(other, source, target)
        first(one, source, target)


def first(local: torch.Tensor, source: T.DTensorSpec, target: T.DTensorSpec) -> None:
    T.redistribute(local, source, target)


def second(local: torch.Tensor, source: T.DTensorSpec, target: T.DTensorSpec) -> None:
    T.redistribute(local, source, target)


def told_of_swapped(rank: int) -> str:
    os.environ["TRITONDT_DEBUG"] = "1"
    T.abort()
    try:
        swapped_between_meshes(rank)
    except T.MismatchError as error:
        return str(error)
    finally:
        del os.environ["TRITONDT_DEBUG"]
        T.abort()
    return "no error"


def check_swapped(texts: list[str]) -> None:
    for text in texts:
        assert text.startswith("ranks disagree at exchange 3: ranks 0 and 1 run step 1 of 1"), text
        assert re.search(r"\(second\); ranks 2 and 3 run .*\(first\); in exchange 1 it was the other way round", text)
        assert text.endswith("all ranks must redistribute the same tensors in the same order")


def test_under_debug_redistributions_between_meshes_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONDT_DEBUG", "1")

    def body(rank: int) -> str:
        with pytest.raises(T.MismatchError) as found:
            swapped_between_meshes(rank)
        return str(found.value)

    check_swapped(run_ranks(4, body))


def test_under_debug_ranks_of_one_mesh_share_a_line_between_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONDT_DEBUG", "1")

    def body(rank: int) -> str:
        left, right = T.Mesh((2,), ranks=(0, 1)), T.Mesh((2,), ranks=(2, 3))
        meta = T.TensorMeta.contiguous(FULL.shape)
        source, target = (T.DTensorSpec(mesh, [T.Shard(0)], meta) for mesh in (left, right))
        with pytest.raises(T.MismatchError) as found:
            (second if rank == 3 else first)(FULL[:2] if rank < 2 else torch.empty(0), source, target)
        return str(found.value)

    for text in run_ranks(4, body):
        assert re.search(r"ranks 0, 1 and 2 run .*\(first\); rank 3 runs .*\(second\); nothing was moved", text)


def receive_from_other_sources(rank: int) -> str:
    """Ranks 0 and 3 take 0 and 1 for the senders, ranks 1 and 2 take 1 and 2; then all go on."""
    T.abort()  # what the test before has left
    senders = T.Mesh((2,), ranks=(0, 1) if rank in (0, 3) else (1, 2))
    meta = T.TensorMeta.contiguous(FULL.shape)
    source, target = (T.DTensorSpec(mesh, [T.Shard(0)], meta) for mesh in (senders, T.Mesh((4,))))
    try:
        T.redistribute(torch.full(source.local_shape, float(rank)), source, target)
        distribute(FULL, T.Mesh((4,)), "S0").full_tensor()
    except T.PeerError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module", params=["shared-memory", "sockets", "gloo"])
def four_ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(4, {"TRITONDT_TIMEOUT": "60", "TRITONDT_TRANSPORT": request.param}) as found:
        yield found


@pytest.mark.extended
def test_sources_that_differ_between_two_meshes_are_found(four_ranks: GlooRanks) -> None:
    texts = four_ranks.run(receive_from_other_sources)
    told = [text for text in texts if "ranks disagree at exchange 1: " in text]
    assert len(told) >= 3, texts  # one may hear of the others' end alone
    for text in told:
        assert "from ranks 0..1 to 0..3" in text
        assert "from ranks 1..2 to 0..3" in text


@pytest.mark.in_core(1)
def test_under_debug_swapped_redistributions_between_meshes_are_found(four_ranks: GlooRanks) -> None:
    check_swapped(four_ranks.run(told_of_swapped))


def name_other_sources(rank: int) -> None:
    """Each rank takes another one for the source, and nobody waits."""
    mesh = T.Mesh((3,))
    target = T.DTensorSpec(mesh, [T.Shard(0)], T.TensorMeta.contiguous((6, 4)))
    source = Layout((1,), [T.Replicate()], (6, 4))
    distribute_from(torch.full((6, 4), float(rank)), source, (rank,), target)


def go_on_from_other_sources(rank: int) -> None:
    name_other_sources(rank)
    distribute(FULL, T.Mesh((3,)), "S0").full_tensor()


def cross_between_meshes(rank: int) -> None:
    """Ranks 0 and 1 go from one mesh to the other, rank 2 the other way."""
    left, right = T.Mesh((2,), ranks=(0, 1)), T.Mesh((1,), ranks=(2,))
    if rank == 2:
        left, right = right, left
    meta = T.TensorMeta.contiguous((4,))
    source, target = (T.DTensorSpec(mesh, [T.Shard(0)], meta) for mesh in (left, right))
    T.redistribute(torch.full(source.local_shape, float(rank)), source, target)


@pytest.mark.parametrize("call", [name_other_sources, cross_between_meshes])
@pytest.mark.parametrize("goes_on", [True, False], ids=["then more", "the last one"])
def test_rank_threads_find_messages_that_they_do_not_expect(call: Callable[[int], None], goes_on: bool) -> None:
    told: dict[int, str] = {}

    def body(rank: int) -> None:
        try:
            call(rank)
            if goes_on:
                distribute(FULL.T, T.Mesh((3,)), "S0").full_tensor()  # every rank has a part
        except T.PeerError as error:
            told[rank] = str(error)
            raise

    with pytest.raises(T.MismatchError, match="ranks disagree at exchange 1: ") as found:
        run_ranks(3, body)
    assert "which it does not expect" in str(found.value) or "rank 2 runs" in str(found.value)
    assert len(told) == 3 or not goes_on
    assert all("ranks disagree at exchange 1: " in text for text in told.values()), told


def test_rank_threads_go_on_after_an_abort_of_messages_that_nobody_expected() -> None:
    def body(rank: int) -> torch.Tensor:
        distribute(FULL, T.Mesh((3,)), "S0").full_tensor()
        with pytest.raises(T.MismatchError):
            go_on_from_other_sources(rank)
        T.abort()
        return distribute(FULL, T.Mesh((3,)), "S0").full_tensor()

    for found in run_ranks(3, body):
        torch.testing.assert_close(found, FULL, rtol=0, atol=0)
