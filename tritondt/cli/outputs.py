"""Outputs of commands: files, looked at before anything is run for them, and terminals that lines are to fit."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
import textwrap
from pathlib import Path

import click

from tritondt import environment

# What shells give to a program that Ctrl-C has ended.
INTERRUPTED = 130


def columns(to_stderr: bool = False) -> int | None:
    """Columns of the terminal that a stream goes to; None where it is a file or a pipe, which any line fits."""
    stream = sys.stderr if to_stderr else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fitted(line: str, width: int | None, indent: str) -> list[str]:
    """The line, in parts where it is wider; those after the first are indented.

    >>> fitted("1.000  slower  a case of many words", 26, "               ")
    ['1.000  slower  a case of', '               many words']
    """
    if width is None or len(line) <= width:
        return [line]
    start = len(line) - len(line.lstrip())  # which textwrap would drop
    wrapper = textwrap.TextWrapper(width, initial_indent=line[:start], subsequent_indent=indent, break_on_hyphens=False)
    return wrapper.wrap(line[start:])


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


def is_first() -> bool:
    """Whether this process prints and writes: one that was started alone, or rank 0 of those of a launcher."""
    found = environment.launched()
    return found is None or found.rank == 0


def writable(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """The path that an option names, once it has been found that a file can be written there, by the rank that does.

    "-" is stdout.
    """
    if path not in (None, "-") and is_first():
        refuse_unwritable(path)
    return path


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
