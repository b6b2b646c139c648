"""One measurement's sizes: how many elements every rank gives and gets, as plain numbers.

A buffer is divided among ranks evenly, skewed by a number, or by a file's matrix of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tritondt.cli.bench.collective.kinds import KINDS, Kind
from tritondt.cli.user_error import BenchmarkError

Matrix = tuple[tuple[int, ...], ...]

# nccl-tests rounds each rank's part down to whole 16 bytes.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Case:
    """A collective of `num_ranks` ranks on elements of `type` (nccl-tests' names).

    `matrix` has a row for each rank that sends and a column for each that receives where the collective is an
    all-to-all; where it divides otherwise, one row with each rank's part; else one number, what every rank has.
    """

    kind: Kind
    num_ranks: int
    type: str
    itemsize: int
    redop: str
    root: int
    matrix: Matrix

    @property
    def is_all_to_all(self) -> bool:
        """Whether each pair of ranks has a number of elements of its own."""
        return self.kind.name.startswith("all_to_all")

    @property
    def total(self) -> int:
        """Number of elements of all parts together, or of the one buffer."""
        return sum(self.matrix[0])

    def parts(self) -> tuple[int, ...]:
        """Number of elements of each rank's part of the whole."""
        return self.matrix[0]

    def sends(self, rank: int) -> tuple[int, ...]:
        """Number of elements that `rank` sends to each rank in an all-to-all."""
        return self.matrix[rank]

    def receives(self, rank: int) -> tuple[int, ...]:
        """Number of elements that `rank` gets from each rank in an all-to-all."""
        return tuple(row[rank] for row in self.matrix)

    def input_length(self, rank: int) -> int:
        """Number of elements of the buffer that `rank` gives."""
        name = self.kind.name.removesuffix("_v")
        if name == "all_to_all":
            return sum(self.sends(rank))
        if name in ("all_gather", "gather"):
            return self.parts()[rank]
        return 0 if name == "scatter" and rank != self.root else self.total

    def output_length(self, rank: int) -> int:
        """Number of elements of the buffer in which `rank` finds the result; 0 where only the root has one."""
        name = self.kind.name.removesuffix("_v")
        if name == "all_to_all":
            return sum(self.receives(rank))
        if name in ("reduce_scatter", "scatter"):
            return self.parts()[rank]
        return 0 if name in ("gather", "reduce") and rank != self.root else self.total

    @property
    def size(self) -> int:
        """Bytes of the largest buffer that a rank gives or gets: nccl-tests' size, and what algbw counts."""
        ranks = range(self.num_ranks)
        return self.itemsize * max(max(self.input_length(rank), self.output_length(rank)) for rank in ranks)

    @property
    def count(self) -> int:
        """Number of elements in nccl-tests' column: of one rank's part where parts are equal, else of the buffer."""
        if self.kind.divides and not self.kind.has_uneven_parts:
            return self.parts()[0]
        return self.size // self.itemsize

    def __str__(self) -> str:
        return f"{self.kind.name} of {self.size} bytes of {self.type}"


def make_case(
    name: str, num_ranks: int, type_and_size: tuple[str, int], redop: str, root: int, num_bytes: int, skew: float
) -> Case | None:
    """Case of about `num_bytes`, rounded down as in nccl-tests; None where nothing is left for a rank.

    >>> make_case("all_gather", 4, ("float", 4), "sum", 0, 1000, 0.5).matrix
    ((60, 60, 60, 60),)
    >>> make_case("all_gather_v", 4, ("float", 4), "sum", 0, 1000, 0.5).matrix
    ((30, 50, 70, 90),)
    >>> make_case("all_gather", 4, ("float", 4), "sum", 0, 8, 0.5) is None
    True
    """
    kind = KINDS[name]
    type_name, itemsize = type_and_size
    per_rank = aligned(num_bytes // num_ranks, itemsize) if kind.divides else num_bytes // itemsize
    if per_rank == 0:
        return None
    total = per_rank * num_ranks
    if name.startswith("all_to_all"):
        matrix = skewed_matrix(total, num_ranks, skew if kind.has_uneven_parts else 0.0)
    elif kind.has_uneven_parts:
        matrix = (divide(total, skewed_weights(num_ranks, skew)),)
    else:
        matrix = ((per_rank,) * num_ranks,) if kind.divides else ((per_rank,),)
    return _case(kind, num_ranks, type_name, itemsize, redop, root, matrix)


def case_of_matrix(
    name: str, num_ranks: int, type_and_size: tuple[str, int], redop: str, root: int, bytes_matrix: Matrix
) -> Case:
    """Case whose parts are a file's bytes, each rounded down to whole 16 bytes."""
    type_name, itemsize = type_and_size
    matrix = tuple(tuple(aligned(number, itemsize) for number in row) for row in bytes_matrix)
    return _case(KINDS[name], num_ranks, type_name, itemsize, redop, root, matrix)


def case_of_elements(
    name: str, num_ranks: int, type_and_size: tuple[str, int], redop: str, root: int, parts: tuple[int, ...]
) -> Case:
    """Case of so many elements: of each rank's part, of each pair's in an all-to-all, or of the one buffer.

    >>> case_of_elements("all_to_all", 2, ("float", 4), "none", 0, (3, 3)).matrix
    ((3, 3), (3, 3))
    """
    type_name, itemsize = type_and_size
    matrix = (parts,) * num_ranks if name.startswith("all_to_all") else (parts,)
    return _case(KINDS[name], num_ranks, type_name, itemsize, redop, root, matrix)


def _case(kind: Kind, num_ranks: int, type_name: str, itemsize: int, redop: str, root: int, matrix: Matrix) -> Case:
    return Case(
        kind,
        num_ranks,
        type_name,
        itemsize,
        redop if kind.reduces else "none",
        root if kind.has_root else -1,
        matrix,
    )


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
