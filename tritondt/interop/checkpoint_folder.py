"""Folder of checkpoints of a training job, each whole or not there, whenever a rank was killed.

    from tritondt.interop.checkpoint_folder import CheckpointFolder

    checkpoints = CheckpointFolder("runs/7", keep=2)
    step = checkpoints.latest()                 # None at the first start
    if step is not None:
        checkpoints.load(state)                 # on any number of ranks, any mesh, any layout
    ...
    checkpoints.save(state, step)

torch.distributed.checkpoint writes and reads the tensors. Around it: a manifest of checksums, a rename as the last act,
and a check of all bytes before the first is loaded. All ranks must see the folder.
"""

import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from tritondt.errors import ArgumentError, CheckpointError
from tritondt.errors.arguments import checked_class, first
from tritondt.interop import manifest, saves
from tritondt.interop.checkpoint_plans import WholeLoadPlanner
from tritondt.interop.together import Together

# What torch calls the files that a rank writes.
_OF_A_RANK = re.compile(r"__(\d+)_\d+\.distcp")


@checked_class
class CheckpointFolder:
    """Checkpoints in the folder `path`, of which the newest `keep` are kept, all of them for None.

    The ranks of `process_group`, those of the world by default, make it, save and load together; alone where
    torch.distributed is not initialised.
    """

    @first("path", "keep", "process_group")
    def __init__(
        self, path: str | Path, *, keep: int | None = None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if keep is not None and keep < 1:
            raise ArgumentError(f"keep={keep} was given; allowed are a number of checkpoints above 0, and None for all")
        self.path, self._keep, self._group = Path(path), keep, process_group
        self._beside: dist.ProcessGroup | None = None
        self._under_way: Future[saves.Save] | None = None

    def latest(self) -> int | None:
        """The training step of the newest checkpoint, None where there is none; a collective call."""
        ranks = Together(self._group)
        found = ranks.first(lambda: saves.found_in(self.path), f"looking for checkpoints in {self.path}")
        return found[-1].step if found else None

    def save(self, state: dict[str, Any], step: int) -> Path:
        """Saves tensors and other values as the newest checkpoint and returns its folder; a collective call.

        `state` is a dict as torch.distributed.checkpoint.save takes it, distributed tensors in it under any layout but
        Partial; `step` a number of the program's. CheckpointError, on all ranks, where it cannot be saved: what was
        there before stays.
        """
        self.wait()
        ranks = Together(self._group)
        with ExitStack() as stack:
            draft = self._begin(ranks, stack)
            # dcp.save asks each rank's objects for their states before the ranks meet: the others would wait.
            plain = dict[str, Any]()
            ranks.each(lambda: plain.update(_plain(state)), f"taking the state for {draft}")
            _run(partial(dcp.save, plain, storage_writer=_writer(draft)), ranks, f"saving {draft}")
            return self.path / self._end(ranks, draft, step).name

    def async_save(self, state: dict[str, Any], step: int) -> "Future[saves.Save]":
        """Copies the state to the host, returns, and saves it meanwhile; a collective call.

        CheckpointError, on all ranks, where one cannot copy its part. The future's `result()`, `wait()`, or the next
        save raises what went wrong later. The first such call makes a process group, on Gloo, because the program goes
        on using its own.
        """
        self.wait()
        ranks = self._ranks_beside()
        with ExitStack() as stack:
            draft = self._begin(ranks, stack)
            writer, copies = _writer(draft), dict[str, Any]()
            # dcp.async_save tells nobody of a rank that cannot copy: the others wait until Gloo's timeout.
            ranks.each(lambda: copies.update(_copied(writer, state)), f"copying the state for {draft}")
            kept = stack.pop_all()
        thread = ThreadPoolExecutor(1, thread_name_prefix="tritondt-checkpoint")
        self._under_way = thread.submit(self._finish, ranks, writer, copies, draft, step, kept)
        thread.shutdown(wait=False)
        return self._under_way

    def wait(self) -> None:
        """Returns when the save under way has ended; raises what went wrong with it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def load(self, state: dict[str, Any], step: int | None = None, *, is_partial: bool = False) -> int:
        """Loads a checkpoint, the newest or that of `step`, into `state` in place; returns its step. A collective call.

        Tensors may have other layouts, meshes and numbers of ranks than when they were saved. CheckpointError on all
        ranks, before anything is loaded, where there is none, where a file is missing, truncated or altered, where an
        entry has another shape or is missing, and where the checkpoint has entries that `state` lacks, unless
        `is_partial`.
        """
        self.wait()
        ranks, doing = Together(self._group), f"reading {self.path}"
        save, files = ranks.first(partial(self._chosen, step), doing)
        folder = self.path / save.name

        def check() -> None:
            manifest.check_sizes(folder, files)
            manifest.check_contents(folder, files, sorted(files)[ranks.rank :: ranks.size])

        ranks.each(check, doing)
        planner = dcp.DefaultLoadPlanner() if is_partial else WholeLoadPlanner()
        reader, plain = dcp.FileSystemReader(folder), dict[str, Any]()
        ranks.each(lambda: plain.update(_plain(state)), f"taking the state for {folder}")
        _run(partial(dcp.load, plain, storage_reader=reader, planner=planner), ranks, f"loading {folder}")
        ranks.each(lambda: _give(plain, state), f"loading {folder}")
        return save.step

    def _chosen(self, step: int | None) -> tuple[saves.Save, dict[str, manifest.FileRecord]]:
        """The save to load, and the records of its files."""
        found = saves.found_in(self.path)
        chosen = [save for save in found if step is None or save.step == step]
        if not chosen:
            steps = ", ".join(str(save.step) for save in found) or "none"
            asked = "a checkpoint" if step is None else f"the checkpoint of step {step}"
            raise CheckpointError(f"{asked} was asked for; {self.path} has those of these steps: {steps}")
        return chosen[-1], manifest.read(self.path / chosen[-1].name)

    def _begin(self, ranks: Together, stack: ExitStack) -> Path:
        """The folder that a save is written into; nobody else saves here until the stack is unwound."""

        def begin() -> Path:
            self.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(saves.lock(self.path))
            return saves.new_draft(self.path, self._keep)

        return ranks.first(begin, f"beginning a checkpoint in {self.path}")

    def _end(self, ranks: Together, draft: Path, step: int) -> saves.Save:
        """Makes what all ranks have written a checkpoint, and removes those that are not kept."""
        doing = f"ending a checkpoint in {self.path}"
        written = ranks.each(lambda: {path.name: manifest.record(path) for path in _own_files(draft, ranks)}, doing)

        def end() -> saves.Save:
            files = {name: found for of_rank in written for name, found in of_rank.items()}
            try:
                manifest.check_sizes(draft, files)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; all ranks must see one folder, on a file system they share") from error
            manifest.write(draft, files)
            save = saves.commit(draft, step)
            if self._keep is not None:
                saves.prune(self.path, self._keep)
            return save

        return ranks.first(end, doing)

    def _finish(
        self,
        ranks: Together,
        writer: dcp.FileSystemWriter,
        copies: dict[str, Any],
        draft: Path,
        step: int,
        stack: ExitStack,
    ) -> saves.Save:
        """Saves what was copied, in the thread of an asynchronous save."""
        with stack:
            _run(partial(dcp.save, copies, storage_writer=writer), ranks, f"saving {draft}")
            return self._end(ranks, draft, step)

    def _ranks_beside(self) -> Together:
        """The ranks in a process group that nothing else uses."""
        ranks = Together(self._group)
        if ranks.is_alone:
            return ranks
        if self._beside is None:
            self._beside = dist.new_group(dist.get_process_group_ranks(ranks.group or dist.group.WORLD), backend="gloo")
        return Together(self._beside)


def _run(call: Callable[..., object], ranks: Together, doing: str) -> None:
    """Calls a function of torch's, which raises on all ranks what one of them does."""
    try:
        call(process_group=ranks.group, no_dist=ranks.is_alone)
    except CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise CheckpointError(f"{doing} failed: {'; '.join(causes)}") from error


def _writer(draft: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(draft, sync_files=True, overwrite=False)


def _copied(writer: dcp.FileSystemWriter, state: dict[str, Any]) -> dict[str, Any]:
    """Copies on the host of a rank's part of a state, which may have what has a state itself."""
    copies: dict[str, Any] = writer.stage(_plain(state))
    return copies


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state with those of what has one itself."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def _give(plain: dict[str, Any], state: dict[str, Any]) -> None:
    """Puts what was loaded into a state, and gives it to what has a state itself."""
    for key, value in state.items():
        if isinstance(value, Stateful):
            value.load_state_dict(plain[key])
        else:
            state[key] = plain[key]


def _own_files(draft: Path, ranks: Together) -> list[Path]:
    """The files of a draft that a rank has written and records; the first rank those that have no rank's name."""
    own = []
    for path in sorted(draft.iterdir()):
        match = _OF_A_RANK.match(path.name)
        if (0 if match is None else int(match[1])) == ranks.rank:
            own.append(path)
    return own
