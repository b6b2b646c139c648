"""Saves of a job in one folder: each a folder of its own that comes to be by a rename, so it is whole or not there.

An unfinished save is called `.draft-...`, and one that is being removed `.old-...`. Processes that were killed leave
both behind; the next process that saves removes them, and a lock makes it the only one.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tritondt.errors import CheckpointError
from tritondt.interop import manifest

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_LEFT_BEHIND = (".draft-*", ".old-*")
_LOCK = ".lock"


class Save(NamedTuple):
    """The `number`-th save in a folder, of training step `step`: numbers order saves, steps may come back."""

    number: int
    step: int

    @property
    def name(self) -> str:
        """The name of its folder.

        >>> Save(12, 300).name
        '000012-step-300'
        """
        return f"{self.number:06d}-step-{self.step}"


def found_in(folder: Path) -> list[Save]:
    """The saves in a folder, the oldest first; none where there is no such folder."""
    if not folder.exists():
        return []
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir()]
    saves = [Save(int(match[1]), int(match[2])) for match in matches if match is not None]
    return sorted(save for save in saves if (folder / save.name).is_dir())


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Context in which nobody else saves in a folder; CheckpointError where somebody does. Ends with the process."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process saves checkpoints in {folder} now; a folder is for one job at a time"
            ) from error
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
    finally:
        os.close(descriptor)


def new_draft(folder: Path, keep: int | None) -> Path:
    """A new folder for what is being saved, after removing what killed processes have left; under the lock."""
    if keep is not None:  # one that is killed after each save would otherwise fill the disk
        prune(folder, keep)
    for pattern in _LEFT_BEHIND:
        for left in folder.glob(pattern):
            shutil.rmtree(left)
    draft = folder / f".draft-{secrets.token_hex(8)}"  # nobody who was taken for dead writes into it
    draft.mkdir()
    return draft


def commit(draft: Path, step: int) -> Save:
    """Makes a draft, which is on the disk, the newest save of its folder."""
    folder = draft.parent
    saves = found_in(folder)
    save = Save(saves[-1].number + 1 if saves else 1, step)
    draft.rename(folder / save.name)
    manifest.sync_entries(folder)
    return save


def prune(folder: Path, keep: int) -> None:
    """Removes all saves but the newest `keep`; each disappears at once, by a rename."""
    for save in found_in(folder)[:-keep]:
        old = folder / f".old-{save.name}"
        (folder / save.name).rename(old)
        shutil.rmtree(old)
