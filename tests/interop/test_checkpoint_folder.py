"""Folders of checkpoints: whole or not there, whoever was killed; what is not as it was written is refused."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.testing import assert_close

import tritondt as T
from tests.harness.fork_server import REPOSITORY
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import CheckpointError
from tritondt.interop import manifest, saves
from tritondt.interop.checkpoint_folder import CheckpointFolder

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    # torch 2.10 itself asks for one where it writes a tensor.
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(3) as ranks:
        yield ranks


def plain(step: float = 0.0) -> dict[str, Any]:
    return {
        "weights": torch.arange(600.0).reshape(20, 30) + step,
        "nested": {"moment": torch.full((7,), float(step))},
        "n": 1,
    }


def saved(path: Path, *steps: int, keep: int | None = None) -> CheckpointFolder:
    checkpoints = CheckpointFolder(path, keep=keep)
    for step in steps:
        checkpoints.save(plain(step), step)
    return checkpoints


def test_the_newest_is_loaded_and_any_other_on_request(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "new" / "folder")
    assert checkpoints.latest() is None
    for step in (10, 20, 15):
        checkpoints.save(plain(step), step)
    assert checkpoints.latest() == 15
    found = plain()
    assert checkpoints.load(found) == 15
    assert_close(found, plain(15), rtol=0, atol=0)
    assert checkpoints.load(found, 20) == 20
    assert_close(found, plain(20), rtol=0, atol=0)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3, 4, keep=2)
    assert saves.found_in(tmp_path) == [(3, 3), (4, 4)]
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 was asked for; .* has those of .*steps: 3, 4$"):
        checkpoints.load(plain(), 2)
    with pytest.raises(ValueError, match="keep=0 was given; allowed are a number of checkpoints above 0, and None"):
        CheckpointFolder(tmp_path, keep=0)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "spoil", "told"),
    [
        ("__0_0.distcp", truncate, r"__0_0\.distcp has \d+ bytes; \d+ were written when it was saved"),
        ("__0_0.distcp", flip, r"__0_0\.distcp is not as it was written: its checksum is"),
        ("__0_0.distcp", Path.unlink, r"__0_0\.distcp cannot be read: No such file or directory"),
        ("__0_0.distcp", make_folder, r"__0_0\.distcp (cannot be read|has \d+ bytes)"),
        (".metadata", flip, r"\.metadata is not as it was written: its checksum is"),
        (".metadata", truncate, r"\.metadata has \d+ bytes; \d+ were written"),
        (manifest.NAME, flip, r"manifest\.json is not as it was written: (it is no JSON|its checksum is another one)"),
        (manifest.NAME, truncate, r"manifest\.json is not as it was written: it is no JSON"),
        (manifest.NAME, Path.unlink, r"is no whole checkpoint: its manifest cannot be read \(No such file"),
        (manifest.NAME, lambda path: path.write_text("[]"), r"manifest\.json is not as it was written: its checksum"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], told: str
) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    spoil(tmp_path / saves.Save(2, 2).name / name)
    found = plain(7)
    with pytest.raises(CheckpointError, match=told):
        checkpoints.load(found)
    assert_close(found, plain(7), rtol=0, atol=0)
    assert checkpoints.load(found, 1) == 1
    assert_close(found, plain(1), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.update(other=torch.zeros(2)), "other"),
        (lambda state: state.update(weights=torch.zeros(20, 31)), r"\[20, 30\].* \[20, 31\].* for weights|weights"),
        (lambda state: state.pop("weights"), "the checkpoint has entries that the state lacks: weights; give a state"),
        (lambda state: state["nested"].clear(), r"entries that the state lacks: nested\.moment"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    checkpoints, found = saved(tmp_path, 1), plain(7)
    change(found)
    before = {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(CheckpointError, match=told):
        checkpoints.load(found)
    for name, value in before.items():
        assert_close(found[name], value, rtol=0, atol=0)


def test_a_part_is_loaded_on_request(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    found = {"weights": plain()["weights"]}
    checkpoints.load(found, is_partial=True)
    assert_close(found["weights"], plain(1)["weights"], rtol=0, atol=0)


def test_two_jobs_do_not_save_in_one_folder(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    with saves.lock(tmp_path), pytest.raises(CheckpointError, match=r"another process saves checkpoints in .* now"):
        checkpoints.save(plain(2), 2)
    checkpoints.save(plain(3), 3)
    assert saves.found_in(tmp_path) == [(1, 1), (2, 3)]


def test_rank_threads_are_refused(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"asked for by a rank that is a thread; .* knows processes only"):
            CheckpointFolder(tmp_path).save({"x": T.zeros(4, device_mesh=T.Mesh((2,)))}, 1)

    run_ranks(2, body)
    assert saves.found_in(tmp_path) == []


def kill_saves(folder: Path, seed: int, trials: int) -> str:
    command = [sys.executable, "-m", "tests.harness.killed.saves", str(folder), str(seed), str(trials)]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=550, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.extended
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    kill_saves(tmp_path, 1, 24)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_kills_leave_the_old_or_the_new(tmp_path: Path, seed: int) -> None:
    outcomes = kill_saves(tmp_path, seed, 200)
    assert "old 0," not in outcomes
    assert "new 0," not in outcomes


def cut(step: float, mesh: T.Mesh, *placements: Any) -> dict[str, Any]:
    whole = torch.arange(17 * 5.0).reshape(17, 5) + step
    return {"weight": T.distribute_tensor(whole, mesh, placements, src_data_rank=None), "step": step}


def save_and_load(rank: int, folder: str, is_async: bool) -> str:
    """Saves on three ranks, loads under another layout, and meets files that one rank finds altered."""
    mesh = T.Mesh((3,))
    checkpoints, state = CheckpointFolder(folder, keep=1), cut(1.0, mesh, T.Shard(0))
    for step in (1, 2):
        if is_async:
            under_way = checkpoints.async_save(state, step)
            state["weight"].add_(1)  # the save has a copy
            dist.barrier()
            assert under_way.result().step == step
        else:
            checkpoints.save(state, step)
            state["weight"].add_(1)
    found = cut(0.0, mesh, T.Shard(1))
    assert checkpoints.load(found) == 2
    assert_close(found["weight"].full_tensor(), cut(2.0, mesh, T.Replicate())["weight"].to_local(), rtol=0, atol=0)
    dist.barrier()
    if rank == 0:
        flip(next(Path(folder).glob("*/__1_0.distcp")))
    dist.barrier()
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(found)
    return str(raised.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_ranks_save_and_load_together(three_ranks: GlooRanks, tmp_path: Path, is_async: bool) -> None:
    texts = set(three_ranks.run(save_and_load, str(tmp_path / "saves"), is_async))
    assert len(texts) == 1
    assert "failed while reading" in texts.pop()
    assert [save.step for save in saves.found_in(tmp_path / "saves")] == [2]


def fail_on_one(rank: int, folder: str) -> list[str]:
    """What ranks are told where the first cannot write, a tensor cannot be saved, and no checkpoint is there."""
    checkpoints, texts = CheckpointFolder(folder), []
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(cut(0.0, T.Mesh((3,)), T.Shard(0)))
    texts.append(str(raised.value))
    checkpoints.save(cut(0.0, T.Mesh((3,)), T.Shard(0)), 7)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.save({"terms": T.DTensor.from_local(torch.ones(3), T.Mesh((3,)), [T.Partial()])}, 8)
    texts.append(str(raised.value))
    with pytest.raises(CheckpointError) as raised:
        CheckpointFolder(f"{folder}/{saves.Save(1, 7).name}/.metadata").save({}, 1)
    texts.append(str(raised.value))
    assert checkpoints.latest() == 7
    return texts


def test_all_ranks_are_told(three_ranks: GlooRanks, tmp_path: Path) -> None:
    told = three_ranks.run(fail_on_one, str(tmp_path))
    assert told[0] == told[1] == told[2]
    absent, terms, unwritable = told[0]
    assert "a checkpoint was asked for" in absent
    assert "has those of these steps: none" in absent
    assert "a rank holds a term of each element there, not its value; redistribute to Shard or Replicate" in terms
    assert "rank 0 failed while beginning a checkpoint" in unwritable


def fail_to_copy(rank: int, folder: str, how: str) -> str:
    """What ranks are told where one cannot copy its part, before anything is written; the next save is as any other."""

    class Unreadable:
        def state_dict(self) -> dict[str, Any]:
            if rank == 2:
                raise RuntimeError("out of memory")
            return {"part": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("nothing is loaded")

    checkpoints = CheckpointFolder(folder)
    calls: dict[str, Callable[[], object]] = {
        "async_save": lambda: checkpoints.async_save({"model": Unreadable()}, 1),
        "save": lambda: checkpoints.save({"model": Unreadable()}, 1),
        "load": lambda: checkpoints.load({"model": Unreadable()}, is_partial=True),
    }
    if how == "load":
        checkpoints.save({"model": {"part": torch.ones(3)}}, 0)
    with pytest.raises(CheckpointError) as raised:
        calls[how]()
    assert checkpoints.async_save(cut(0.0, T.Mesh((3,)), T.Shard(0)), 2).result().step == 2
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "doing"), [("async_save", "copying the state"), ("save", "taking the state"), ("load", "taking the state")]
)
def test_a_rank_that_cannot_give_its_part_tells_the_others(
    three_ranks: GlooRanks, tmp_path: Path, how: str, doing: str
) -> None:
    told = three_ranks.run(fail_to_copy, str(tmp_path), how)
    assert len(set(told)) == 1
    assert told[0].startswith(f"rank 2 failed while {doing} for ")
    assert told[0].endswith("RuntimeError: out of memory")


def raise_in_write(rank: int, folder: str) -> str:
    class FullDisk(dcp.FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            if rank == 1:
                raise OSError(28, "No space left on device")
            return super().write_data(*arguments)

    checkpoints = CheckpointFolder(folder)
    state = cut(0.0, T.Mesh((3,)), T.Shard(0))
    checkpoints.save(state, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "FileSystemWriter", FullDisk)
        with pytest.raises(CheckpointError) as raised:
            checkpoints.save(state, 2)
    assert checkpoints.latest() == 1
    checkpoints.save(state, 3)
    return str(raised.value)


def test_a_full_disk_leaves_the_old_one(three_ranks: GlooRanks, tmp_path: Path) -> None:
    for text in three_ranks.run(raise_in_write, str(tmp_path)):
        assert "rank 1: OSError: [Errno 28] No space left on device" in text
    assert not list(tmp_path.glob(".draft-*"))
