"""Sizes as nccl-tests writes them: 32M is 32 * 2**20 bytes, and a sweep goes by a factor or by a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from math import inf

from tritondt.cli.user_error import BenchmarkError

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
DEFAULT_STEP = 1 << 20
# A sweep of more sizes is a slip of the step, which counts bytes.
_MOST_SIZES = 10_000


def parse_bytes(text: str) -> int:
    """Bytes of a size with the binary units K, M, G and T; BenchmarkError for anything else, and for zero.

    >>> parse_bytes("32M"), parse_bytes("1.5k"), parse_bytes("4KiB"), parse_bytes("7")
    (33554432, 1536, 4096, 7)
    """
    found = _SIZE.fullmatch(text.strip())
    size = round(float(found[1]) * (1 << _UNITS[found[2].upper()])) if found else 0
    if size < 1:
        raise BenchmarkError(
            f"cannot read the size {text!r}; allowed is a number of bytes of at least 1, also with a unit K, M, G or T "
            "(powers of 1024), for example 32M"
        )
    return size


def sweep(first: int, last: int, factor: float | None = None, step: int | None = None) -> tuple[int, ...]:
    """Sizes from `first` to `last` bytes, each `factor` times or `step` bytes (default: 1M) above the one before.

    >>> sweep(8, 100, factor=2), sweep(4, 10, step=3), sweep(4, 4)
    ((8, 16, 32, 64), (4, 7, 10), (4,))
    """
    if last < first:
        raise BenchmarkError(
            f"sizes from {first} to {last} bytes were asked for; the last (-e) is at least the first (-b)"
        )
    if factor is not None and step is not None:
        raise BenchmarkError(f"sizes by a factor of {factor:g} (-f) and by steps of {step} bytes (-i): only one can be")
    if factor is not None and not 1 < factor < inf:
        raise BenchmarkError(f"sizes by a factor of {factor:g} were asked for (-f); allowed is a number above 1")
    if first == last:
        return (first,)
    by = DEFAULT_STEP if step is None else step
    if factor is None and (last - first) // by >= _MOST_SIZES:
        raise BenchmarkError(
            f"steps of {by} bytes (-i) from {first} to {last} are {(last - first) // by + 1} sizes; at most "
            f"{_MOST_SIZES} are measured, and -f 2 doubles instead"
        )
    return tuple(takewhile(lambda size: size <= last, _rising(first, factor, by)))


def _rising(size: int, factor: float | None, step: int) -> Iterator[int]:
    while True:
        yield size
        size = size + step if factor is None else max(size + 1, int(size * factor))


def bytes_text(size: int) -> str:
    """Bytes in the largest unit that divides them.

    >>> bytes_text(33554432), bytes_text(1536), bytes_text(7)
    ('32M', '1536', '7')
    """
    for unit in ("T", "G", "M", "K"):
        if size and size % (1 << _UNITS[unit]) == 0:
            return f"{size >> _UNITS[unit]}{unit}"
    return str(size)
