"""Files that commands write, looked at before anything is run for them."""

from __future__ import annotations

import os
from pathlib import Path

import click


def refuse_unwritable(path: str) -> None:
    """Opens a file for writing, and leaves none behind that was not there; BadParameter where it cannot be written."""
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
