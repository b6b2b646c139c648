"""Files that commands write, looked at before anything is run for them."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import click


def refuse_obstacle(path: Path) -> None:
    """BadParameter where something lies at `path` that is no file: a link of somebody else's says where to write."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise click.BadParameter(f"{path} is no file but {stat.filemode(found.st_mode)}, and is not replaced")


def replace_file(path: Path, content: bytes) -> None:
    """Puts a new file at `path`, written beside it first: nobody reads half of it, and no link is followed."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def refuse_unwritable(path: str) -> None:
    """Opens a file for writing, and leaves none behind that was not there; BadParameter where it cannot be written.

    A pipe is not opened: whoever reads it would see its end.
    """
    if Path(path).is_fifo():
        return
    existed = Path(path).exists()
    try:
        with Path(path).open("ab"):
            pass
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}") from error
    if not existed:
        Path(path).unlink(missing_ok=True)


def refuse_unwritable_folder(folder: Path) -> None:
    """Looks whether files can be made in a folder, or it in the first of those above that is there.

    Makes nothing. BadParameter where they cannot.

    >>> refuse_unwritable_folder(Path("/dev/null/results"))
    Traceback (most recent call last):
    click.exceptions.BadParameter: /dev/null/results cannot be written: /dev/null is no folder
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise click.BadParameter(f"{folder} cannot be written: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{folder} cannot be written: {there} is read-only to this user")
