"""Files that others have written: read with a bound, as strict JSON, and shown without their control characters."""

from __future__ import annotations

import json
import math
import os
import stat
import unicodedata
from pathlib import Path
from typing import Any

# A flight recorder's 2,000 entries are 1 MB; texts of errors may be longer, and so are a day's measurements.
MOST_BYTES = 256 << 20
# Integers of 64 bits, signed or not.
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
# Control characters, those that turn the direction of writing and the like, halves of characters.
_UNSEEN = ("Cc", "Cf", "Cs")


class ForeignFileError(Exception):
    """A file that cannot be read, or does not hold what it should."""


def read_text(path: Path) -> str:
    """Content of a regular file; in a folder of others it may be a pipe, which nobody ends, or have no end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError of a name that no file can have
        raise ForeignFileError(f"it cannot be read: {error}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ForeignFileError(f"it is no regular file but {stat.filemode(found.st_mode)}")
        if found.st_size > MOST_BYTES:
            raise ForeignFileError(f"it has {found.st_size} bytes; allowed are {MOST_BYTES}")
        with os.fdopen(descriptor, encoding="utf-8", closefd=False) as file:
            return file.read(MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ForeignFileError(f"it cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def parse(text: str) -> Any:
    """The value of a JSON text; ForeignFileError for any other text, and for numbers that are none or beyond 64 bits.

    >>> parse('{"a": 1e999}')
    Traceback (most recent call last):
    tritondt.cli.foreign_files.ForeignFileError: it is no JSON: the number 1e999 is too large
    >>> parse('[NaN]')
    Traceback (most recent call last):
    tritondt.cli.foreign_files.ForeignFileError: it is no JSON: NaN is no number
    """
    try:
        return json.loads(text, parse_constant=_refused, parse_int=_integer, parse_float=_float)
    except RecursionError:
        raise ForeignFileError("it is no JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ForeignFileError(f"it is no JSON: {error}") from error


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) < 32 else _MOST + 1
    if not _LEAST <= value <= _MOST:
        raise ValueError(f"the number {_short(digits)} is too large")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {_short(digits)} is too large")
    return value


def _short(digits: str) -> str:
    return digits if len(digits) <= 32 else f"{digits[:16]}... of {len(digits)} digits"


def printable(text: str) -> str:
    r"""The text as a terminal may show it: what it would obey, or not show, is written out.

    Further lines are indented, so that none looks like one of the program's own.

    >>> print(printable("red: \x1b[31m, first\nsecond"))
    red: \x1b[31m, first
        second
    """
    if text.isascii() and text.isprintable():
        return text
    shown = (char if char == "\n" or unicodedata.category(char) not in _UNSEEN else _written_out(char) for char in text)
    return "".join(shown).replace("\n", "\n    ")


def _written_out(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
