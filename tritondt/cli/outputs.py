"""Files that commands write, looked at before anything is run for them."""

from __future__ import annotations

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
