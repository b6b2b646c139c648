"""Folders of flight records on a machine with other users: they do not say where files go, no failure is fatal."""

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm import world
from tritondt.comm.monitor.flight import Flight
from tritondt.comm.monitor.flight_folder import FlightFolder, TemporaryFlightFolder, own_folder, prune

WORLD = "20261122T120000-7"
OTHER_USER = 4711


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def prepared(folder: FlightFolder) -> tuple[Flight, list[str]]:
    """A flight recorder of `folder`, and the warnings of its preparation."""
    flight = Flight(0, 2, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flight.prepare()
    return flight, [str(found.message) for found in caught]


def assert_nothing_is_written(flight: Flight, told: list[str], why: str) -> None:
    (text,) = told
    assert text.startswith("rank 0 writes no flight records: ")
    assert why in text
    assert text.endswith("TRITONDT_FLIGHT_DIR names a folder for them")
    assert flight.path_text == ""
    assert why in flight.write("a test")
    assert flight.write("a test").startswith("; no flight records are written (")
    flight.leave()


def test_only_this_user_can_write_the_folder(temporary: Path) -> None:
    flight, told = prepared(TemporaryFlightFolder(WORLD))
    assert told == []
    for folder in (own_folder(), own_folder() / WORLD):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert own_folder().parent == temporary
    assert flight.path == own_folder() / WORLD / "rank-0.json"
    assert flight.write("a test") == f"; flight records: {own_folder() / WORLD}"
    flight.leave()
    assert [path.name for path in (own_folder() / WORLD).iterdir()] == ["rank-0.json"]


def test_every_user_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(TemporaryFlightFolder(WORLD))[1] == []
    before = own_folder()
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    assert own_folder() != before


def test_a_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    own_folder().mkdir(0o777)
    flight, told = prepared(TemporaryFlightFolder(WORLD))
    assert_nothing_is_written(flight, told, f"is of user {user}; it must be of user {OTHER_USER}")
    assert list(own_folder().iterdir()) == []


def test_a_link_in_place_of_the_folder_is_refused(temporary: Path) -> None:
    (temporary / "theirs").mkdir()
    own_folder().symlink_to(temporary / "theirs")
    flight, told = prepared(TemporaryFlightFolder(WORLD))
    assert_nothing_is_written(flight, told, "is no folder but l")
    assert list((temporary / "theirs").iterdir()) == []


def test_a_folder_that_others_can_write_is_closed_to_them() -> None:
    own_folder().mkdir()
    own_folder().chmod(0o777)
    flight, told = prepared(TemporaryFlightFolder(WORLD))
    assert told == []
    assert own_folder().stat().st_mode & 0o777 == 0o700
    flight.leave()


def test_no_temporary_folder_at_all_is_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    flight, told = prepared(TemporaryFlightFolder(WORLD))
    assert_nothing_is_written(flight, told, "No usable temporary directory found")


def test_a_named_folder_that_cannot_be_made_is_not_fatal(temporary: Path) -> None:
    (temporary / "file").write_text("")
    flight, told = prepared(FlightFolder(temporary / "file" / "flight"))
    assert_nothing_is_written(flight, told, "Not a directory")


def test_a_named_folder_is_made_and_left_there(temporary: Path) -> None:
    flight, told = prepared(FlightFolder(temporary / "new" / "flight"))
    assert told == []
    flight.leave()
    assert list((temporary / "new" / "flight").iterdir()) == []


def test_a_planted_link_is_not_followed(temporary: Path) -> None:
    """Neither at the name of the file, which is left as it is, nor at that of its draft, which cannot be guessed."""
    folder, victim = temporary / "shared", temporary / "victim"
    victim.write_text("mine")
    folder.mkdir()
    (folder / "rank-0.json").symlink_to(victim)
    for number in range(50):
        (folder / f"rank-0.json.draft-{os.getpid()}-{number}").symlink_to(victim)
    flight, told = prepared(FlightFolder(folder))
    assert told == []
    assert flight.write("a test") == (
        f"; the flight record could not be written ([Errno 17] {folder}/rank-0.json is a link, not a file to replace: "
        "File exists)"
    )
    assert (folder / "rank-0.json").is_symlink()
    (folder / "rank-0.json").unlink()
    assert flight.write("a test") == f"; flight records: {folder}"
    assert victim.read_text() == "mine"


def old_world(number: int, age_s: float) -> Path:
    made = own_folder() / f"20260101T000000-{number}"
    made.mkdir(parents=True)
    (made / "rank-0.json").write_text("{}")
    (made / ".rank-1").write_text("")  # of a rank that was killed
    os.utime(made, (time.time() - age_s,) * 2)
    return made


def test_old_records_are_pruned() -> None:
    day_s = 24 * 3600.0
    week_old, fresh = old_world(1, 8 * day_s), old_world(2, 6 * day_s)
    foreign = own_folder() / "notes"
    foreign.mkdir()
    os.utime(foreign, (0, 0))
    prepared(TemporaryFlightFolder(WORLD))[0].leave()
    assert {path.name for path in own_folder().iterdir()} == {fresh.name, foreign.name}
    assert not week_old.exists()


def test_the_newest_records_are_kept_and_those_of_the_last_hour() -> None:
    older = [old_world(number, 7200.0 + number) for number in range(30)]
    latest = [old_world(100 + number, 60.0) for number in range(5)]
    prune(own_folder())
    assert sorted(own_folder().iterdir()) == sorted(older[:15] + latest)


def test_two_ranks_may_prune_the_same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank removes a folder when this one is about to read what lies in it."""
    old = old_world(1, 8 * 24 * 3600.0)

    def after_removal(read: Callable[[Path], object]) -> Callable[[Path], object]:
        def removed_first(path: Path) -> object:
            if path == old:
                monkeypatch.undo()
                subprocess.run(["rm", "-r", str(old)], check=True, timeout=150)
            return read(path)

        return removed_first

    home = own_folder()
    monkeypatch.setattr(os, "scandir", after_removal(os.scandir))
    monkeypatch.setattr(os, "listdir", after_removal(os.listdir))
    prune(home)
    assert list(home.iterdir()) == []


def test_what_a_rank_holds_is_never_pruned() -> None:
    flight, _ = prepared(TemporaryFlightFolder(WORLD))
    os.utime(own_folder() / WORLD, (0, 0))
    program = (
        "import sys; from pathlib import Path; from tritondt.comm.monitor.flight_folder import prune; "
        "prune(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(own_folder())], check=True, timeout=150)
    assert (own_folder() / WORLD).exists()
    flight.leave()
    assert not (own_folder() / WORLD).exists()


def exchange(rank: int) -> tuple[list[str], str]:
    """The warnings of a world without a folder for flight records, and the clause of its errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world.current()
    mesh = T.Mesh((2,))
    moved = T.distribute_tensor(torch.arange(4.0), mesh, [T.Shard(0)]).redistribute(placements=[T.Replicate()])
    torch.testing.assert_close(moved.to_local(), torch.arange(4.0), rtol=0, atol=0)
    return [str(found.message) for found in caught], world.current().flight.write("a test")


@pytest.mark.extended
def test_a_world_runs_without_flight_records(temporary: Path) -> None:
    (temporary / f"tritondt-flight-{os.geteuid()}").symlink_to(temporary)
    with GlooRanks(2, {"TMPDIR": str(temporary)}) as ranks:
        for rank, (told, clause) in enumerate(ranks.run(exchange)):
            assert [text.startswith(f"rank {rank} writes no flight records: ") for text in told] == [True]
            assert "is no folder but l" in clause


@pytest.mark.parametrize("name", ["../20261122T120000-7", "20261122T120000-7/..", "/etc", "", "x", WORLD + "\n"])
def test_a_name_from_the_store_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(T.WorldError, match=r"the store has '.*' for the folder of this world's flight records"):
        TemporaryFlightFolder(name)
