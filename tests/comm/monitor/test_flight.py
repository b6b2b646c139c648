"""Flight records of real processes: on error, on a signal and on demand; and what `doctor flight` makes of them."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tritondt as T
from tests.harness.gloo_ranks import Failure, GlooRanks
from tests.ops.sharded import distribute
from tritondt.cli.main import main
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import write_flight_record
from tritondt.errors import ArgumentError

FULL = torch.arange(36.0).reshape(6, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flight")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[GlooRanks]:
    with GlooRanks(3, {"TRITONDT_TIMEOUT": "60", "TRITONDT_FLIGHT_DIR": str(folder)}) as found:
        yield found


def exchange(rank: int) -> None:
    T.abort()  # what the test before has left
    x = distribute(FULL, T.Mesh((3,)), "S0")
    x.redistribute(placements=[T.Replicate()], async_op=True).wait()
    x.redistribute(placements=[T.Shard(1)])


def exchange_and_signal(rank: int) -> None:
    exchange(rank)
    os.kill(os.getpid(), signal.SIGUSR1)


def wait_for_somebody_who_does_not_come(rank: int, seconds: float) -> None:
    exchange(rank)
    mesh = T.Mesh((3,))
    T.set_timeout(mesh, seconds)
    if rank != 1:
        distribute(FULL, mesh, "S1").redistribute(placements=[T.Replicate()])


def read(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank-{rank}.json"
    end = time.monotonic() + 10
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def doctor(folder: Path) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["doctor", "flight", str(folder)])
    return found.exit_code, found.output


def test_a_signal_writes_what_every_rank_did(ranks: GlooRanks, folder: Path) -> None:
    ranks.run(exchange_and_signal)
    for rank in range(3):
        found = read(folder, rank)
        assert (found["rank"], found["world_size"], found["reason"]) == (rank, 3, "signal")
        moved = [entry for entry in found["entries"] if entry["operation"].startswith("step 1 of 1 (exchange (S0) ->")]
        assert [entry["state"] for entry in moved] == ["done", "done"]
        assert all(entry["site"].endswith("(exchange)") for entry in moved)
        assert all(entry["sent_bytes"] > 0 and entry["ended_at"] >= entry["started_at"] for entry in moved)
        assert found["entries"][-1]["communicator"] == "ranks 0,1,2"
    status, text = doctor(folder)
    assert status == 0, text


def test_a_timeout_writes_who_waits_for_whom(ranks: GlooRanks, folder: Path) -> None:
    started = time.monotonic()
    outcomes = ranks.outcomes(wait_for_somebody_who_does_not_come, 1.5)
    assert time.monotonic() - started < 20
    assert outcomes[1] is None
    for rank in (0, 2):
        assert isinstance(outcomes[rank], Failure)
        assert f"flight records: {folder}" in outcomes[rank].text
    assert any("got no answer; the timeout is 1.5 s" in outcomes[rank].text for rank in (0, 2))
    (folder / "rank-1.json").unlink()
    ranks.run(write_on_demand, str(folder), 1)
    ranks.run(abort)
    status, text = doctor(folder)
    assert status == 1
    verdict = text.splitlines()[0]
    assert verdict.startswith("rank 1 never issued exchange 3 of ranks 0,1,2"), text
    assert "(wait_for_somebody_who_does_not_come)" in text


def abort(rank: int) -> None:
    T.abort()


def write_on_demand(rank: int, folder: str, which: int) -> None:
    if rank == which:
        write_flight_record(f"{folder}/rank-{rank}.json")


@pytest.mark.parametrize("path", [None, 2.5, [0, 1], T.Mesh])
def test_a_record_is_written_to_a_path_alone(path, tmp_path, monkeypatch):
    """`str` makes a text of everything: `None` was the name of a file in the folder of the program."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"^write_flight_record got path=.*; allowed is str or PathLike"):
        run_ranks(1, lambda rank: write_flight_record(path))
    assert not list(tmp_path.iterdir())


def test_timeouts_above_0_only() -> None:
    def body(rank: int) -> None:
        with pytest.raises(T.WorldError, match="a timeout of 0 s was asked for; allowed is a number above 0"):
            T.set_timeout(T.Mesh((2,)), 0)
        T.set_timeout(T.Mesh((2,)), 5)

    run_ranks(2, body)


@pytest.mark.extended
def test_an_environment_without_a_folder_makes_one_and_removes_it_again(tmp_path: Path) -> None:
    with GlooRanks(2, {"TMPDIR": str(tmp_path)}) as found:
        found.run(start_world)
        (folder,) = (tmp_path / f"tritondt-flight-{os.getuid()}").iterdir()
    assert not folder.exists()


def start_world(rank: int) -> None:
    world.current()
