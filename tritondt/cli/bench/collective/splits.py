"""Division of a buffer among ranks: even, skewed by a number, or by a file's matrix of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tritondt.cli.user_error import BenchmarkError

Matrix = tuple[tuple[int, ...], ...]

# nccl-tests rounds each rank's part down to whole 16 bytes.
_ALIGNMENT_BYTES = 16


def aligned(num_bytes: int, itemsize: int) -> int:
    """Number of elements in so many bytes, rounded down to whole 16 bytes.

    >>> aligned(100, 4), aligned(15, 4)
    (24, 0)
    """
    return num_bytes // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES // itemsize


def divide(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of `weights` that add up to `total`.

    >>> divide(10, (0, 1, 2)), divide(7, (1, 1, 1))
    ((0, 3, 7), (2, 3, 2))
    """
    whole = sum(weights)
    ends, before = [], 0.0
    for weight in weights:
        before += weight
        ends.append(round(total * before / whole))
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def skewed_weights(num_ranks: int, skew: float) -> tuple[float, ...]:
    """Weights of parts 0, 1, 2, ...: equal with a skew of 0, in proportion to these numbers with 1, between else.

    nccl-tests' spread, where the number is the distance of two ranks.

    >>> skewed_weights(4, 0), skewed_weights(3, 1)
    ((0.25, 0.25, 0.25, 0.25), (0.0, 0.3333333333333333, 0.6666666666666666))
    """
    if num_ranks == 1:
        return (1.0,)
    steps = num_ranks * (num_ranks - 1) / 2
    return tuple((1 - skew) / num_ranks + skew * part / steps for part in range(num_ranks))


def skewed_matrix(total: int, num_ranks: int, skew: float) -> Matrix:
    """Elements that each rank (a row) sends to each; a row adds up to `total`, and far ranks get more.

    >>> skewed_matrix(6, 3, 1)
    ((0, 2, 4), (4, 0, 2), (2, 4, 0))
    """
    parts = divide(total, skewed_weights(num_ranks, skew))
    return tuple(tuple(parts[(to - rank) % num_ranks] for to in range(num_ranks)) for rank in range(num_ranks))


def read_matrix(path: Path, num_rows: int, num_ranks: int) -> Matrix:
    """Bytes of a file's first `num_rows` lines of `num_ranks` numbers each, as nccl-tests reads its matrix files.

    BenchmarkError for what is no such file.
    """
    try:
        rows = [line.replace(",", " ").split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"cannot read the matrix {path}: {error}") from error
    rows = [row for row in rows if row and not row[0].startswith("#")]
    needed = f"{num_rows} line{'s' if num_rows > 1 else ''} of {num_ranks} whole numbers of bytes"
    if len(rows) < num_rows or any(len(row) < num_ranks for row in rows[:num_rows]):
        widths = sorted({len(row) for row in rows})
        raise BenchmarkError(f"the matrix {path} needs {needed}; found {len(rows)} of {widths} numbers")
    try:
        found = tuple(tuple(int(number) for number in row[:num_ranks]) for row in rows[:num_rows])
    except ValueError as error:
        raise BenchmarkError(f"the matrix {path} needs {needed}; {error}") from error
    if min(min(row) for row in found) < 0 or not any(map(sum, found)):
        raise BenchmarkError(f"the matrix {path} needs {needed}; none is below 0, and not all are 0")
    return found
