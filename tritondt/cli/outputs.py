"""Outputs of commands: files, looked at before anything is run for them, and terminals that lines are to fit."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import TracebackType

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


_FIRST_S = 2.0
_INTERVAL_S = 0.5
_ERASE = "\r\x1b[K"


class ProgressLine:
    """Context manager that shows on stderr what `tell` was told last, and for how long it has run in all."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_shown = self._stream.isatty()
        self._text, self._started = "", time.monotonic()
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> ProgressLine:
        if self._is_shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._is_shown:
            self._thread.join()
            self.erase()

    def tell(self, text: str) -> None:
        """Sets the text of the line: the work that is done now."""
        self._text = text

    def erase(self) -> None:
        """Clears the line, so that something else can be printed; it comes back by itself."""
        if self._is_shown:
            with self._lock:
                self._stream.write(_ERASE)
                self._stream.flush()

    def _show(self) -> None:
        while not self._end.wait(_INTERVAL_S):
            seconds = time.monotonic() - self._started
            if seconds >= _FIRST_S:
                with self._lock:
                    self._stream.write(f"{_ERASE}{self._text} ({seconds:.0f} s)")
                    self._stream.flush()
